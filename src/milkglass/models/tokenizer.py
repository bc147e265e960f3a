"""Reads a model's own tokenizer from its folder, by the `tokenizers` library, and makes it safe for threads.

It gives the ids, texts, special tokens and chat templates of transformers' AutoTokenizer, and imports neither
transformers nor PyTorch. A folder without tokenizer.json, or of a kind that is not in tokenizer_kinds.py, is read by
transformers, if it is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken

from milkglass.errors import CodecError, CorruptCheckpoint, ModelError
from milkglass.models.checkpoint import read_json, read_model_json, require_readable
from milkglass.models.families import family_of
from milkglass.models.file_names import CONFIG, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG
from milkglass.models.tokenizer_kinds import KINDS, NAMED_TOKENS, kind_name
from milkglass.models.tokenizer_parts import byte_letters, require_known_parts
from milkglass.sequences import Ids

UNLIMITED_LENGTH = int(1e30)  # transformers' model_max_length of a folder that states none
MAX_TRUNCATION = int(1e20)  # a longer limit cuts nothing
# How BERT's decoder joins words to marks, and the replacement
CLEAN_UP_REPLACEMENTS = (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), *((f" {end}", end) for end in
            ("n't", "'m", "'s", "'ve", "'re"))  # fmt: skip


def load_tokenizer(folder: Path, from_provider: bool = False) -> Tokenizer:
    """Loads a folder's tokenizer, from its files alone.

    Args:
        folder: a model's folder.
        from_provider: whether the folder came from a provider that must not read the texts (tokenizer_parts.py).

    Raises:
        ModelError: no tokenizer can be loaded, or it has a part whose effect on a text is not known.
    """
    require_readable(folder)
    try:
        tokenizer = _read_tokenizer(folder)
    except BaseException as error:
        if isinstance(error, ModelError) or (not isinstance(error, Exception) and not is_panic(error)):
            raise
        raise ModelError(
            f"the tokenizer in {folder.name} cannot be loaded ({type(error).__name__})",
            "a tokenizer.json is needed: save it with a fast tokenizer's save_pretrained",
        ) from error
    require_known_parts(tokenizer, folder.name, from_provider)
    return tokenizer


class Tokenizer:
    """Turns text into ids and back.

    The library's tokenizer keeps settings between calls, such as whether special tokens are read in a text. A call sets
    them and then reads the text, so threads take turns.

    Attributes:
        special_tokens_map: the special tokens with a name, such as `eos_token`.
        all_special_tokens: these and the folder's other special tokens, each once.
        chat_template: a template, several by name, or None.
        model_max_length: the most tokens of the model, as tokenizer_config.json states it, not checked.
        has_token_types: whether the tokenizer distinguishes the two texts of a pair.

    Raises:
        CodecError: from each method that reads or writes a text: the library panicked, for example because a pattern of
            the tokenizer took too many steps.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: Mapping[str, str] | None = None,
        more_special_tokens: Sequence[str] = (),
        chat_template: str | Mapping[str, str] | None = None,
        model_max_length: Any = UNLIMITED_LENGTH,
        has_token_types: bool = False,
        truncation_side: str = "right",
        cleans_up: bool = False,
        splits_special: bool = False,
    ) -> None:
        """Wraps the library's tokenizer.

        Args:
            backend: the library's tokenizer. It must not be used elsewhere.
            special: the special tokens with a name.
            more_special_tokens: those without one.
            chat_template: see the class.
            model_max_length: see the class.
            has_token_types: see the class.
            truncation_side: "right" or "left", from which a longer text is cut.
            cleans_up: whether `decode` removes WordPiece's spaces before marks, unless its caller says otherwise.
            splits_special: whether the text of a special token is text, unless a call says otherwise.
        """
        self.backend_tokenizer, self.special_tokens_map = backend, dict(special or {})
        self.all_special_tokens = list(dict.fromkeys([*self.special_tokens_map.values(), *more_special_tokens]))
        self.chat_template, self.model_max_length = chat_template, model_max_length
        self.has_token_types = has_token_types
        self._truncation_side, self._cleans_up, self._splits_special = truncation_side, cleans_up, splits_special
        self._shared_use = _SharedUse()
        backend.no_padding()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_shared_use"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _shared_use=_SharedUse())

    # --- text to ids --------------------------------------------------------------------------------------------------
    def __call__(
        self,
        texts: str | Sequence[str],
        pairs: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        split_special_tokens: bool | None = None,
        return_offsets_mapping: bool = False,
        return_special_tokens_mask: bool = False,
    ) -> dict[str, Any]:
        """Returns `input_ids`, a list for each text, and what else is requested of each token.

        `token_type_ids` (which text of a pair a token belongs to) are there if the tokenizer has them.

        Args:
            texts: one text, whose lists are returned without a list around them, or several.
            pairs: the second text of each.
            add_special_tokens: whether special tokens around a text are added.
            truncation: whether longer texts are cut to `max_length` (default: the model's limit).
            max_length: the most tokens, including special ones.
            split_special_tokens: whether the text of a special token is text.
            return_offsets_mapping: whether `offset_mapping` is returned: each token's (start, stop) in its text.
            return_special_tokens_mask: whether `special_tokens_mask` is returned: 1 for a token that was added.
        """
        is_single = isinstance(texts, str)
        first_texts = [texts] if is_single else list(texts)
        second_texts = ([pairs] if pairs else None) if isinstance(pairs, str) else pairs
        limit = (self.model_max_length if max_length is None else max_length) if truncation else None
        reads_special_as_text = self._splits_special if split_special_tokens is None else split_special_tokens
        cut_at = None if limit is None or limit > MAX_TRUNCATION else limit
        with _no_panic, self._shared_use.with_settings((cut_at, reads_special_as_text), self._apply_settings):
            backend = self.backend_tokenizer
            encode = backend.encode_batch if return_offsets_mapping else backend.encode_batch_fast
            inputs = first_texts if second_texts is None else list(zip(first_texts, second_texts, strict=True))
            encodings = encode(inputs, add_special_tokens=add_special_tokens)
        columns: dict[str, list[Any]] = {"input_ids": [encoding.ids for encoding in encodings]}
        if self.has_token_types:
            columns["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        if return_offsets_mapping:
            columns["offset_mapping"] = [encoding.offsets for encoding in encodings]
        if return_special_tokens_mask:
            columns["special_tokens_mask"] = [encoding.special_tokens_mask for encoding in encodings]
        return {name: lists[0] for name, lists in columns.items()} if is_single else columns

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Returns how many special tokens are added to a text, or to a pair of texts."""
        return int(self.backend_tokenizer.num_special_tokens_to_add(pair))

    # --- ids to text --------------------------------------------------------------------------------------------------
    def decode(
        self, ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """Returns the text of ids (t,), a list, an array or one number.

        Args:
            clean_up_tokenization_spaces: whether WordPiece's spaces before marks are removed. None: the folder's
                setting.
        """
        plain_ids = ids.tolist() if hasattr(ids, "tolist") else ids
        plain_ids = [plain_ids] if isinstance(plain_ids, int) else list(plain_ids)
        with _no_panic, self._shared_use:
            text = str(self.backend_tokenizer.decode(plain_ids, skip_special_tokens))
        cleans_up = self._cleans_up if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        if cleans_up and type(self.backend_tokenizer.model).__name__ != "BPE":
            for spaced, joined_text in CLEAN_UP_REPLACEMENTS:
                text = text.replace(spaced, joined_text)
        return text

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        """Returns the text of each row. See `decode`."""
        return [self.decode(row, **options) for row in rows]

    # --- tokens -------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """Returns the id of each token, including added ones."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Returns the tokens that were added to the vocabulary, including special ones, by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """Returns the ids of the tokens that were added to the vocabulary, by their text."""
        return {token.content: token_id for token_id, token in sorted(self.added_tokens_decoder.items())}

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of a token, or of each. A token that does not exist gets the unknown token's id, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None and tokens != self.unk_token else token_id

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Returns the token of an id, or of each, or None for an id without one."""
        if np.ndim(ids) == 0:
            return self.backend_tokenizer.id_to_token(int(ids))
        return [self.backend_tokenizer.id_to_token(int(token_id)) for token_id in ids]

    @cached_property
    def byte_of_letter(self) -> dict[str, int] | None:
        """Returns the byte of each letter of a byte-level vocabulary. None: the vocabulary is of another kind."""
        if "ByteLevel" not in repr(self.backend_tokenizer.decoder):
            return None
        return {letter: byte for byte, letter in byte_letters().items()}

    @property
    def all_special_ids(self) -> list[int]:
        """Returns the ids of `all_special_tokens`, in their order."""
        return list(self.convert_tokens_to_ids(self.all_special_tokens))

    @property
    def special_ids(self) -> list[int]:
        """Returns the ids of all special tokens, sorted: `all_special_ids`, and added tokens marked as special."""
        marked_ids = (token_id for token_id, token in self.added_tokens_decoder.items() if token.special)
        return sorted({*self.all_special_ids, *marked_ids})

    def __getattr__(self, name: str) -> Any:
        """Returns a special token by its name (`eos_token`), or its id (`eos_token_id`), or None."""
        token, _, suffix = name.partition("_token")
        if name.startswith("_") or suffix not in ("", "_id") or f"{token}_token" not in NAMED_TOKENS:
            raise AttributeError(f"a tokenizer has no attribute {name!r}")
        special_token = self.special_tokens_map.get(f"{token}_token")
        return special_token if special_token is None or not suffix else self.convert_tokens_to_ids(special_token)

    # --- conversations ------------------------------------------------------------------------------------------------
    def template(self, with_tools: bool = False) -> str:
        """Returns the chat template; of several the one for tools, if `with_tools` and there is one.

        Raises ValueError if there is none, or several without a default.
        """
        if not isinstance(self.chat_template, Mapping):
            if self.chat_template is None:
                raise ValueError("the tokenizer has no chat template")
            return self.chat_template
        for name in ("tool_use", "default")[not with_tools :]:
            if name in self.chat_template:
                return self.chat_template[name]
        raise ValueError("the tokenizer has several chat templates, and none is the default")

    def _apply_settings(self, cut_at: int | None, reads_special_as_text: bool) -> None:
        """Sets the length to which texts are cut (None: they are not), and whether special tokens in them are text."""
        if cut_at is None:
            self.backend_tokenizer.no_truncation()
        else:
            self.backend_tokenizer.enable_truncation(cut_at, direction=self._truncation_side)
        self.backend_tokenizer.encode_special_tokens = reads_special_as_text


class _PanicGuard:
    """Raises CodecError where the library panics. It is no generator, because each token of an answer passes here."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and is_panic(error):
            raise CodecError(
                "the tokenizer failed on this text", "use the tokenizer that the model was published with"
            ) from None  # its message may quote the text


_no_panic = _PanicGuard()


class _SharedUse:
    """Lets threads use one tokenizer of the library at once, unless they need different settings.

    The library keeps settings between calls. A thread that needs others waits until no thread is in a call. A block
    `with use:` is a call that does not depend on them, and never waits.
    """

    def __init__(self) -> None:
        self._changed, self._in_use = threading.Condition(), 0
        self._settings: tuple[Any, ...] | None = None

    @contextmanager
    def with_settings(self, settings: tuple[Any, ...], apply: Callable[..., None]) -> Iterator[None]:
        """Keeps the tokenizer at these settings during the block. `apply` receives them if it has others."""
        with self._changed:
            self._changed.wait_for(lambda: self._settings == settings or not self._in_use)
            if self._settings != settings:
                self._settings = None  # if it fails, they are not known
                apply(*settings)
                self._settings = settings
            self._in_use += 1
        try:
            yield
        finally:
            self.__exit__()

    def __enter__(self) -> None:
        with self._changed:
            self._in_use += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._in_use -= 1
            self._changed.notify_all()


# --- files ------------------------------------------------------------------------------------------------------------
def _read_tokenizer(folder: Path) -> Tokenizer:
    """Builds a folder's tokenizer as transformers would, or lets transformers build it. Raises what either raises."""
    settings = _read_if_present(folder / TOKENIZER_CONFIG)
    path = folder / TOKENIZER
    if not path.is_file() or "auto_map" in settings or "fast_tokenizer_files" in settings:
        return _read_by_transformers(folder)
    text = path.read_text("utf-8")
    kind = KINDS.get(kind_name(_read_if_present(folder / CONFIG), settings, text))
    if kind is None:
        return _read_by_transformers(folder)
    tokens, more_named, added = _special_tokens(folder, settings)
    plain_settings = {name: entry for name, entry in settings.items() if not name.endswith(("_token", "_tokens"))}
    all_settings = {**kind.tokens, **plain_settings, **tokens}
    file = tokenizers.Tokenizer.from_str(text)
    backend = file if kind.build is None else kind.build(file, all_settings, text)
    if backend is None:
        return _read_by_transformers(folder)
    truncation, padding = file.truncation, file.padding
    if truncation:
        all_settings.setdefault("truncation_side", truncation["direction"])
    if padding:
        all_settings.setdefault("pad_token", padding["pad_token"])
    if file.post_processor is not None:
        backend.post_processor = file.post_processor
    named_tokens = {
        name: kind.special_token(name, all_settings[name])
        for name in NAMED_TOKENS
        if all_settings.get(name) is not None
    } | more_named
    for special_token in named_tokens.values():
        if not isinstance(special_token, str | AddedToken):
            raise TypeError("a special token is neither a text nor an added token")
    extra_tokens = list(all_settings.get("extra_special_tokens") or [])
    _add_tokens(backend, added, named_tokens, extra_tokens)
    if file.post_processor is None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    special = {name: str(special_token) for name, special_token in named_tokens.items()}
    names = settings.get("model_input_names")
    limit = settings.get("model_max_length", settings.get("max_len"))
    tokenizer = Tokenizer(
        backend,
        special,
        [str(token) for token in extra_tokens],
        chat_template=_read_templates(folder, settings),
        model_max_length=UNLIMITED_LENGTH if limit is None else limit,
        has_token_types=kind.has_token_types if names is None else "token_type_ids" in names,
        truncation_side=str(all_settings.get("truncation_side", "right")),
        cleans_up=bool(settings.get("clean_up_tokenization_spaces")),
        splits_special=bool(settings.get("split_special_tokens")),
    )
    if kind.finish is not None:
        kind.finish(backend, all_settings, tokenizer.convert_tokens_to_ids)
    return tokenizer


def _read_if_present(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty if there is no such file."""
    return read_model_json(path) if path.is_file() else {}


def _special_tokens(
    folder: Path, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[int, AddedToken]]:
    """Returns the special tokens of a folder's files, those with names of the model's own, and the added tokens."""
    tokens = {
        name: _with_added_tokens(entry) for name, entry in settings.items() if name.endswith(("_token", "_tokens"))
    }
    if not tokens.get("extra_special_tokens") and "additional_special_tokens" in tokens:
        tokens["extra_special_tokens"] = tokens.pop("additional_special_tokens")
    model_named_tokens = {
        name: tokens.pop(name)
        for name in list(tokens)
        if name.endswith("_token") and name not in NAMED_TOKENS and isinstance(tokens[name], str | AddedToken)
    }
    if isinstance(tokens.get("extra_special_tokens"), dict):
        model_named_tokens |= tokens.pop("extra_special_tokens")
    if "added_tokens_decoder" in settings:
        added = {int(token_id): AddedToken(**token) for token_id, token in settings["added_tokens_decoder"].items()}
    else:
        for name, entry in _read_if_present(folder / SPECIAL_TOKENS).items():
            tokens[name] = _special_entry(name, entry, tokens)
        if isinstance(tokens.get("extra_special_tokens"), dict):
            model_named_tokens |= tokens.pop("extra_special_tokens")
        special = {str(tokens[name]) for name in NAMED_TOKENS if tokens.get(name)}
        special |= {str(token) for token in tokens.get("extra_special_tokens") or []}
        added = {
            token_id: AddedToken(token, normalized=token not in special, special=token in special)
            for token, token_id in _read_if_present(folder / "added_tokens.json").items()
        }
        for added_token in read_json(folder / TOKENIZER)["added_tokens"]:
            token_id = added_token.pop("id")
            added[token_id] = AddedToken(**added_token)
    if "additional_special_tokens" in tokens:
        tokens.setdefault("extra_special_tokens", tokens.pop("additional_special_tokens"))
    by_text = {str(token): token for token in added.values()}
    for name in NAMED_TOKENS:
        if tokens.get(name) is not None:
            tokens[name] = by_text.get(str(tokens[name]), tokens[name])
    return tokens, model_named_tokens, added


def _with_added_tokens(entry: Any) -> Any:
    """Returns an entry in which each added token that JSON marks is an AddedToken."""
    if isinstance(entry, dict):
        if entry.get("__type") == "AddedToken":
            return AddedToken(**{name: item for name, item in entry.items() if name != "__type"})
        return {name: _with_added_tokens(item) for name, item in entry.items()}
    return [_with_added_tokens(item) for item in entry] if isinstance(entry, list) else entry


def _special_entry(name: str, entry: Any, tokens: Mapping[str, Any]) -> Any:
    """Returns an entry of the file SPECIAL_TOKENS."""
    if name == "extra_special_tokens" and isinstance(entry, list):
        extra_tokens = list(tokens.get(name) or [])
        return extra_tokens + [token for token in map(_with_flags, entry) if token not in extra_tokens]
    return entry if name == "extra_special_tokens" else _with_flags(entry)


def _with_flags(entry: Any) -> Any:
    """Returns an entry that has flags as a special AddedToken, and a plain text as it is."""
    return AddedToken(**{**entry, "special": True}) if isinstance(entry, dict) else entry


def _add_tokens(
    backend: tokenizers.Tokenizer,
    added: Mapping[int, AddedToken],
    named_tokens: Mapping[str, Any],
    extra_tokens: Sequence[Any],
) -> None:
    """Adds the tokens of the files in the order of their ids, then further special ones."""
    tokens: list[Any] = [token for _, token in sorted(added.items())]
    present_texts = {token.content for token in backend.get_added_tokens_decoder().values()} | {
        str(token) for token in tokens
    }
    for special_token in (*named_tokens.values(), *extra_tokens):
        # by text and flags, as transformers compares them
        if str(special_token) not in present_texts and special_token not in tokens:
            tokens.append(special_token)
    special = {str(token) for token in named_tokens.values()}
    additional = [AddedToken(token, special=True) if isinstance(token, str) else token for token in tokens]
    for token in additional:
        token.special = token.special or str(token) in special
    if additional:
        backend.add_tokens(additional)


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Returns the chat template, or several by name, from their own files or from tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
    files |= {path.name.removesuffix(".jinja"): path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    templates = {name: path.read_text("utf-8") for name, path in files.items()}
    if templates:
        return templates["default"] if list(templates) == ["default"] else templates
    template_setting = settings.get("chat_template")
    return (
        {token["name"]: token["template"] for token in template_setting}
        if isinstance(template_setting, list)
        else template_setting
    )


def _read_by_transformers(folder: Path) -> Tokenizer:
    """Reads a tokenizer that only transformers can read. Raises ModelError if it is absent or reads no fast one."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            f"the tokenizer in {folder.name} has no tokenizer.json of a kind that is read without transformers",
            "pip install 'milkglass[train]', or save a tokenizer.json beside the model",
        ) from None
    hf_tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not hf_tokenizer.is_fast:
        raise ModelError(f"{folder.name} has no fast tokenizer", "save a tokenizer.json beside the model")
    return Tokenizer(
        hf_tokenizer.backend_tokenizer, hf_tokenizer.special_tokens_map, hf_tokenizer.all_special_tokens,
        hf_tokenizer.chat_template,
        hf_tokenizer.model_max_length, "token_type_ids" in hf_tokenizer.model_input_names, hf_tokenizer.truncation_side,
        bool(hf_tokenizer.clean_up_tokenization_spaces), bool(hf_tokenizer.split_special_tokens),
    )  # fmt: skip


# --- what others ask of it --------------------------------------------------------------------------------------------
def is_panic(error: BaseException) -> bool:
    """Returns whether the tokenizers library panicked, with an error that is not an Exception."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def decodes_by_byte(tokenizer: Tokenizer) -> bool:
    """Returns whether a character without a token is several tokens of a byte each (SentencePiece's byte fallback)."""
    return "ByteFallback" in repr(tokenizer.backend_tokenizer.decoder)


def token_limit(folder: Path, tokenizer: Tokenizer) -> int:
    """Returns the most tokens of a text. A family that counts positions from an id (RoBERTa's padding) has fewer.

    Raises CorruptCheckpoint if the tokenizer's limit is not a number.
    """
    config = read_model_json(folder / CONFIG)
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    limit = tokenizer.model_max_length
    if not isinstance(limit, int | float) or limit < 1:
        raise CorruptCheckpoint(
            "model_max_length in tokenizer_config.json is no number of tokens", "set it to what the model takes"
        )
    if positions is None:
        return int(limit)
    unused = max(family_of(config).pinned(config), default=-1) + 1
    return min(int(positions) - unused, int(limit))


def added_text(read: Callable[[Ids], str], previous_id: int, token: int) -> tuple[str, bool]:
    """Returns what a token adds to the text after the previous one, and whether it continues that one's word.

    Args:
        read: returns the text of ids (t,).
        previous_id: the id of the token before; below 0: there is none.
        token: the token's id.
    """
    token_text = read(np.array([token])).strip()
    token_text = token_text.removeprefix("##") or token_text  # "##" alone stays
    if previous_id < 0:
        return token_text, False
    previous_text, joint_text = read(np.array([previous_id])), read(np.array([previous_id, token]))
    remainder = joint_text[len(previous_text) :] if joint_text.startswith(previous_text) else f" {token_text}"
    return (remainder.strip() or token_text, not remainder[:1].isspace()) if remainder else (token_text, False)

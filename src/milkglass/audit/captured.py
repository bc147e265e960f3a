"""Builds the scene of a client whose code and key are not here, from texts and what the client sent for each.

A row of a captured file holds a text and what crossed for it:

    {"text": "...", "sent": [2054, 2003]}            ids, one for each token of the public model
    {"text": "...", "sent": "replaced words"}        text
    {"text": "...", "sent": [[0.1, ...], ...]}       vectors, one for each token, or one for the whole text

Where ids are sent, the vendor's server has a model of its own, whose table attacks read too if its folder is given.
Where text is sent, attacks read the public model's table.

Vectors of which most come again, byte for byte, are a cipher like ids. They are numbered, and attacked as both.

A random half of the rows is attacked. One attacker has the texts of the other half, except those that overlap an
attacked text (decontaminate.py). A second one has also what was sent for those texts, as the client's vendor can have
by running it. A third one has public text of another kind, if it is given. As a control, give the public model's own
ids or states: all of the text is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.attacks.embeddings.sparse import equal_rows
from milkglass.audit.alignment import IN_ORDER, MIN_FIXED_SHARE_OF_WORDS, Alignment, Order, align, fixed_orders
from milkglass.audit.decontaminate import uncontaminated_indices
from milkglass.audit.defence_scene import public_scene
from milkglass.audit.key_scene import truth_of
from milkglass.audit.scene import ALIKE, KNOWN, MIN_PRIVATE_TEXTS, OTHER, Adversary, Scene, require_attacker_texts
from milkglass.client.codec.codec import Codec
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.errors import CodecError, EmptyText, UsageError, first_few
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.view import Model
from milkglass.progress import Progress, Stage, no_progress, no_stage
from milkglass.rows.labels import is_number
from milkglass.rows.place import Place, text_of
from milkglass.rows.tables import json_rows
from milkglass.sequences import Ids, Sequences
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Observation, Tokens, Weights

SentKind = Literal["ids", "text", "vectors"]
ID_LIMIT = 1 << 22  # ids must be lower
MAX_SHOWN_DIGITS = 20  # of a number in a message
MAX_DISTINCT_SHARE = 0.5  # of vectors: with more different ones they are no cipher of tokens
MAX_UNKNOWN_SHARE = 0.2  # of the tokens that were sent; what has more of them is not taken for text
MAX_WORD_CHARACTERS = 60  # a longer word, longer than any of its text, is taken for an encoding such as base64
# Tokens per letter sent, relative to the texts': mirrored words have 2.1, rot13 2.4, replaced words 0.8 to 1.1
MAX_TOKENS_PER_LETTER_RATIO = 1.75
NON_JSON_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")  # suffixes of files that cannot hold ids or vectors


@dataclass(frozen=True)
class CapturedRow:
    """Holds a text and what was sent for it.

    Attributes:
        place: the row's line, for messages.
        text: the private text.
        kind: what was sent: "ids", "text" or "vectors".
        sent: a text, ids (tokens,), or vectors (tokens, d); (1, d) is one vector for the whole text.
    """

    place: Place
    text: str
    kind: SentKind
    sent: Any


def read_captured(path: Path) -> list[CapturedRow]:
    """Reads the captured rows of a JSON Lines file.

    Raises:
        CodecError: a row has no text, or what was sent is of none of the three kinds, or not of the first row's kind.
        EmptyText: there are no rows.
    """
    if path.suffix.lower() in NON_JSON_SUFFIXES:
        raise CodecError(f"{path.name} is no JSON Lines file", 'give {"text": ..., "sent": ...} a line')
    rows = list(_read_rows(path))
    if not rows:
        raise EmptyText(f"{path.name} has no rows", 'give {"text": ..., "sent": ...} a line')
    for row in rows:
        if row.kind != rows[0].kind:
            raise CodecError(
                f"{row.place} has {row.kind}, and {rows[0].place} has {rows[0].kind}",
                "give what one client sent, in one form",
            )
    return rows


def rows_within_limit(base: Checkpoint, rows: Sequence[CapturedRow]) -> tuple[list[CapturedRow], int]:
    """Returns the rows whose text fits the public model's token limit, and that limit.

    For a longer text it is not known which of what was sent belongs to the tokens that are kept.
    """
    codec = public_codec(base)
    encoded = codec.tokenizer([row.text for row in rows], split_special_tokens=True)["input_ids"]
    return [row for row, ids in zip(rows, encoded, strict=True) if len(ids) <= codec.max_tokens], codec.max_tokens


def _read_rows(path: Path) -> Iterator[CapturedRow]:
    for place, row in json_rows(path):
        text = text_of(place, row, "text")
        if "sent" in row and "sent_file" in row:
            raise CodecError(f"{place} has both sent and sent_file", "give one of them")
        if "sent_file" in row:
            yield CapturedRow(place, text, "vectors", _read_vectors(place, path.parent, row["sent_file"]))
        elif "sent" in row:
            yield CapturedRow(place, text, *_parse_sent(place, row["sent"]))
        else:
            raise CodecError(f"{place} has no field sent", "give what the client sent: ids, text, or vectors")


def _read_vectors(place: Place, folder: Path, name: Any) -> NDArray[np.float32]:
    """Returns the vectors (tokens, d) in a NumPy file beside the rows. Nothing in the file is executed.

    Raises:
        CodecError: the file is not in the folder of the rows, or holds no matrix of finite numbers.
    """
    hint = 'give "sent_file": "vectors-1.npy", a file beside the rows, written by numpy.save of an array (tokens, d)'
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise CodecError(f"{place} has a sent_file that is no file in the folder of the rows", hint)
    try:
        vectors = np.load(folder / name, allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise CodecError(f"{place}: its sent_file cannot be read as a NumPy array", hint) from None
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype.kind not in "fiu" or not vectors.size:
        raise CodecError(f"{place}: its sent_file holds no matrix of numbers", hint)
    with np.errstate(over="ignore"):
        vectors = vectors.astype(np.float32)
    if not np.isfinite(vectors).all():
        raise CodecError(f"{place}: its sent_file holds numbers that are not finite, or beyond fp32", hint)
    return vectors


def _parse_sent(place: Place, value: Any) -> tuple[SentKind, Any]:
    """Returns the kind and the value of what was sent for one text. Raises CodecError."""
    if isinstance(value, str):
        return "text", value
    hint = 'give "sent": [1, 2], "sent": "words" or "sent": [[0.5, 1.0]]'
    if not isinstance(value, list):
        raise CodecError(f"{place}: what was sent is no list of ids, no text, and no list of vectors", hint)
    if not value:
        raise CodecError(f"{place}: what was sent is an empty list", "leave the row out, or give what was sent")
    if all(isinstance(row, list) for row in value):
        return "vectors", _parse_vectors(place, value, hint)
    kinds = {type(number) for number in value}
    if not kinds <= {int, float}:
        raise CodecError(f"{place}: what was sent is a list that holds other things than numbers", hint)
    wrong = next((number for number in value if type(number) is float or not 0 <= number < ID_LIMIT), None)
    if wrong is None:
        return "ids", np.array(value, np.int64)
    raise CodecError(
        f"{place}: what was sent is one list of {len(value):,} numbers, and {str(wrong)[:MAX_SHOWN_DIGITS]} is no id: "
        f"ids are whole numbers from 0 to {ID_LIMIT - 1:,}",
        'is it a vector? give "sent": [[0.5, 1.0]], a list of vectors',
    )


def _parse_vectors(place: Place, rows: list[list[Any]], hint: str) -> NDArray[np.float32]:
    """Returns vectors (tokens, d) as fp32. Raises CodecError if they are no matrix of finite numbers."""
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise CodecError(f"{place}: its vectors have several lengths: {first_few(sorted(map(str, widths)))}", hint)
    if widths == {0} or not all(type(number) in (int, float) for row in rows for number in row):
        raise CodecError(f"{place}: its vectors hold other things than numbers, or nothing", hint)
    vectors = _finite_vectors(rows)
    if vectors is None:
        raise CodecError(
            f"{place}: a number of its vectors is not finite, or beyond fp32",
            "leave the row out, or give what was sent",
        )
    return vectors


def _is_list_of_numbers(text: str) -> bool:
    """Returns whether most pieces of a text, between blanks, commas and brackets, are numbers."""
    pieces = text.translate(str.maketrans("[](),;", " " * 6)).split()
    return 2 * sum(is_number(piece) for piece in pieces) > len(pieces) > 1


def _finite_vectors(rows: list[list[float]]) -> NDArray[np.float32] | None:
    """Returns numbers as fp32, or None if one is too large for that or no number."""
    try:
        with np.errstate(over="ignore"):
            vectors = np.array(rows, np.float64).astype(np.float32)
    except OverflowError:  # a whole number beyond fp64
        return None
    return vectors if np.isfinite(vectors).all() else None


def captured_scene(
    base: Checkpoint,
    rows: Sequence[CapturedRow],
    seed: int,
    layer: int = 0,
    served: Checkpoint | None = None,
    public: Sequence[str] | None = None,
    stage: Stage = no_stage,
) -> Scene:
    """Returns the scene of captured rows.

    Args:
        base: the public model whose tokenizer the client uses.
        rows: what `read_captured` returned.
        seed: decides which half is attacked.
        layer: how many layers the client runs before it sends vectors.
        served: the model on the vendor's server, to which ids are sent. None: the attacker does not have it.
        public: texts of another kind that an attacker has. None: no attacker has any.
        stage: reports the search for the order in which tokens were sent, one step for each text.

    Raises:
        CodecError: what was sent does not fit the public model's tokens, or the served model.
        UsageError: there are too few rows, or too few public texts.
    """
    codec, order = public_codec(base), np.random.default_rng(seed).permutation(len(rows))
    if rows[0].kind == "ids" and served is None:
        rows = _with_dense_ids(rows, len(codec.sigma))
    middle = len(rows) // 2
    private, attacker_rows = ([rows[i] for i in part] for part in (order[:middle], order[middle:]))
    if len(private) < MIN_PRIVATE_TEXTS:
        raise UsageError(
            f"too few captured rows, {len(rows)}: one half is attacked, and {MIN_PRIVATE_TEXTS} are needed in it",
            f"give {2 * MIN_PRIVATE_TEXTS} or more",
        )
    kept_indices = uncontaminated_indices([row.text for row in attacker_rows], [row.text for row in private])
    require_attacker_texts(ALIKE, len(kept_indices))
    client = _CapturedClient(base, codec, layer)
    texts = client.sent_texts(rows, stage("find the order", len(rows)))
    private_sent, attacker_sent = texts.select(order[:middle]), texts.select(order[middle:][kept_indices])
    corpora = [attacker_sent.original]
    attackers = []
    if public is not None:
        kept_indices = uncontaminated_indices(public, [row.text for row in private])
        require_attacker_texts(OTHER, len(kept_indices))
        corpora.insert(0, client.public_ids([public[index] for index in kept_indices.tolist()]))
        attackers.append(Adversary.with_text(OTHER, Knowledge(corpus=corpora[0])))
    truth = replace(truth_of(codec, private_sent.sent, private_sent.original, corpora), origin=private_sent.origin)
    order_text = "" if texts.order == IN_ORDER else f", sent {texts.order}"
    kind = "vectors that come again" if rows[0].kind == "vectors" and texts.origin is not None else rows[0].kind
    scheme = {"name": f"captured {kind}{order_text}"}
    text_alone = Knowledge(corpus=attacker_sent.original)
    text_and_client = replace(text_alone, **client.knowledge_fields(attacker_sent))
    attackers += [Adversary.with_text(ALIKE, text_alone), Adversary.with_text(KNOWN, text_and_client, "the client")]
    max_id = int(texts.sent.ids.max(initial=0))
    served_weights = [] if served is None else [_served_weights(served, rows[0], max_id)]
    if rows[0].kind == "text":  # its tokens are public ids, so that the public model's table belongs to them
        served_weights = [Weights(Model.open(base.folder))]
    size = max(len(codec.sigma), max_id + 1, *(weights.model.vocab_size for weights in served_weights))
    truth = replace(truth, inverse=_likeliest_public_ids(private_sent, size))
    scene = public_scene(
        base,
        codec,
        (*served_weights, *private_sent.observations),
        truth,
        [row.text for row in private],
        attackers,
        scheme=scheme,
        size=size,
    )
    if not any(_shows_shared_rows(weights.model, private_sent.sent.ids) for weights in served_weights):
        return scene
    adversaries = tuple(
        replace(adversary, knowledge=replace(adversary.knowledge, has_shared_ids=True))
        for adversary in scene.adversaries
    )
    return replace(scene, adversaries=adversaries)


def _with_dense_ids(rows: Sequence[CapturedRow], size: int) -> list[CapturedRow]:
    """Returns rows of ids, where those above the public vocabulary are numbered from its `size` on, in their order.

    The number of such an id tells nothing to an attacker without the vendor's table. Attacks take time and memory for
    each number that an id can have.
    """
    used = np.unique(np.concatenate([row.sent for row in rows]))
    above = used[used >= size]
    return [
        replace(row, sent=np.where(row.sent >= size, size + np.searchsorted(above, row.sent), row.sent)) for row in rows
    ]


def _served_weights(served: Checkpoint, row: CapturedRow, max_id: int) -> Weights:
    """Returns the weights of the model on the server. Raises CodecError if these ids cannot be sent to it.

    Args:
        row: the first captured row.
        max_id: the highest id that was sent.
    """
    if row.kind != "ids":
        raise CodecError(f"{row.place} has {row.kind}, and --server-model is for ids", "leave --server-model out")
    model = Model.open(served.folder)
    if model.vocab_size <= max_id:
        raise CodecError(
            f"id {max_id} was sent, and the table of {served.folder.name} has {model.vocab_size} rows",
            "give the model that the vendor's server runs",
        )
    return Weights(model)


def _shows_shared_rows(model: Model, sent: Ids) -> bool:
    """Returns whether the table shows that most ids stand for clusters: other ids have the same row."""
    used = np.unique(sent)
    is_unique = np.zeros(model.vocab_size, np.bool_)
    for rows in equal_rows(model.table).values():
        is_unique[rows] = len(rows) == 1
    return float(is_unique[used].mean()) < 1 / 2


@dataclass(frozen=True, eq=False)
class _SentTexts:
    """Holds what crossed for some rows.

    Attributes:
        observations: what the server saw.
        sent: the ids that crossed, or the numbers of vectors that come again; where other vectors crossed, the public
            ids.
        original: the texts' public ids.
        places: for each text (tokens,) the place of each token in what was sent for the text. None for vectors without
            numbers, which are stored in the order of the tokens.
        order: the name of the order in which the tokens were sent.
    """

    observations: tuple[Observation, ...]
    sent: Sequences
    original: Sequences
    places: Sequence[Ids] | None
    order: str

    @property
    def origin(self) -> Ids | None:
        """Returns (tokens of original,) the place of each token in `sent`, or None as `places`."""
        if self.places is None:
            return None
        starts = np.repeat(np.cumsum(self.sent.lengths) - self.sent.lengths, self.original.lengths)
        places = np.concatenate([np.zeros(0, np.int64), *self.places])
        return np.where(places == NO_BELIEF, NO_BELIEF, places + starts)

    def select(self, indices: Ids) -> _SentTexts:
        """Returns what crossed for the rows with these indices, in their order."""
        sent, original = self.sent.select(indices), self.original.select(indices)
        places = None if self.places is None else [self.places[index] for index in indices.tolist()]

        def select(observation: Observation) -> Observation:
            if not isinstance(observation, Activations):
                return Tokens(sent)
            states = observation.hidden.split(observation.lengths.tolist())
            hidden = torch.cat([states[index] for index in indices.tolist()])
            return replace(observation, hidden=hidden, lengths=observation.lengths[indices])

        return _SentTexts(tuple(map(select, self.observations)), sent, original, places, self.order)


@dataclass(frozen=True)
class _CapturedClient:
    """Turns captured rows into what the server saw, and into the knowledge of an attacker who ran the client.

    Attributes:
        base: the public model whose tokenizer the client uses.
        codec: encodes texts in the public model's ids.
        layer: how many layers the client runs before it sends vectors.
    """

    base: Checkpoint
    codec: Codec
    layer: int

    def sent_texts(self, rows: Sequence[CapturedRow], progress: Progress = no_progress) -> _SentTexts:
        """Returns what was sent, and where each token of the texts went.

        Args:
            progress: receives 1 for each text.

        Raises:
            CodecError: what was sent does not fit the public model's tokens.
        """
        original = self.public_ids([row.text for row in rows])
        if rows[0].kind == "vectors":
            return self._sent_vectors(rows, original, progress)
        if rows[0].kind == "ids":
            sent = Sequences.of([row.sent for row in rows])
            aligned = self._align_ids(rows, original, sent, progress)
        else:
            sent = Sequences.of([self._replaced_ids(row) for row in rows])
            self._require_words(rows, sent, original)
            pairs = list(zip(original, sent, strict=True))
            aligned = align(pairs, TEXT_ORDERS, min_fixed_share=MIN_FIXED_SHARE_OF_WORDS, progress=progress)
        return _SentTexts((Tokens(sent),), sent, original, aligned.places, aligned.order)

    def public_ids(self, texts: Sequence[str]) -> Sequences:
        """Returns texts in the public model's ids, each cut to what that model reads."""
        return Sequences.of(self.codec.encode(texts, truncate=True).ids)

    def _replaced_ids(self, row: CapturedRow) -> Ids:
        """Returns the public ids of all that was sent in place of a text, which may be longer than the text."""
        if not row.sent.strip():
            return np.zeros(0, np.int64)
        return np.asarray(self.codec.tokenizer(row.sent, split_special_tokens=True)["input_ids"], np.int64)

    def _require_words(self, rows: Sequence[CapturedRow], sent: Sequences, original: Sequences) -> None:
        """Raises CodecError if what was sent does not look like words, of which attacks could read nothing.

        That is so if most rows were sent empty, as lists of numbers or with an overlong word, if many tokens are
        unknown, or if there are too many tokens per letter, as in mirrored, spaced or enciphered words.
        """
        hint = "give what crossed: words, ids or vectors; decode what is encoded, such as base64"
        empty_rows = [row for row in rows if not row.sent.strip()]
        if 2 * len(empty_rows) > len(rows):
            counted = f"{len(empty_rows):,} of {len(rows):,} rows"
            raise CodecError(f"{empty_rows[0].place} has an empty text as sent, as have {counted}", hint)
        listed_rows = [row for row in rows if _is_list_of_numbers(row.sent) and not _is_list_of_numbers(row.text)]
        if 2 * len(listed_rows) > len(rows):
            raise CodecError(
                f"{listed_rows[0].place}: what was sent is numbers in quotation marks, as in {len(listed_rows):,} of "
                f"{len(rows):,} rows",
                'ids are a list without quotation marks, "sent": [1, 2], and vectors one of lists',
            )
        unknown_share = float(np.mean(sent.ids == self.codec.tokenizer.unk_token_id)) if len(sent.ids) else 0.0
        if unknown_share > MAX_UNKNOWN_SHARE:
            raise CodecError(
                f"{100 * unknown_share:.0f} % of the tokens that were sent are unknown to {self.base.folder.name}; of "
                f"text it is {100 * MAX_UNKNOWN_SHARE:.0f} % at most",
                hint,
            )
        long_words = dict[str, int]()  # the length of the longest word by the row's place
        for row in rows:
            longest, longest_of_text = (max(map(len, text.split()), default=0) for text in (row.sent, row.text))
            if longest > max(MAX_WORD_CHARACTERS, longest_of_text):
                long_words[str(row.place)] = longest
        if 2 * len(long_words) > len(rows):
            place, length = next(iter(long_words.items()))
            raise CodecError(
                f"{place}: what was sent has a word of {length:,} characters, as have {len(long_words):,} of "
                f"{len(rows):,} rows one of more than {MAX_WORD_CHARACTERS}; text does not",
                hint,
            )
        letters_sent, letters = (
            sum(len("".join(text.split())) for text in texts)
            for texts in ((row.sent for row in rows), (row.text for row in rows))
        )
        ratio = len(sent.ids) * letters / max(1, len(original.ids) * letters_sent)
        if ratio > MAX_TOKENS_PER_LETTER_RATIO:
            raise CodecError(
                f"{rows[0].place}: what was sent has {ratio:.1f} times as many tokens of {self.base.folder.name} for a "
                f"letter as the texts, over {len(rows):,} rows; words have {MAX_TOKENS_PER_LETTER_RATIO} times at most",
                "attacks here read words: undo what spells them otherwise, such as mirrored letters, letters with "
                "blanks between them or a cipher of letters",
            )

    def _align_ids(
        self, rows: Sequence[CapturedRow], original: Sequences, sent: Sequences, progress: Progress
    ) -> Alignment:
        """Returns where each token of each text was sent: NO_BELIEF for a special token that was not sent.

        Raises:
            CodecError: the numbers of ids and tokens of a row do not fit.
        """
        special_count, first, behind = self._special_counts()
        kept = list[slice]()  # the tokens of each text that were sent
        for row, token_ids, sent_ids in zip(rows, original, sent, strict=True):
            if len(sent_ids) == len(token_ids):
                kept.append(slice(0, len(token_ids)))
            elif special_count and len(sent_ids) == len(token_ids) - special_count:
                kept.append(slice(first, first + len(sent_ids)))
            else:
                raise CodecError(
                    f"{row.place} has {len(sent_ids)} ids for a text of {len(token_ids)} tokens of "
                    f"{self.base.folder.name}",
                    "give the model whose tokenizer the client uses with --model, and one id for each token: leave "
                    "out ids that fill a text up to a length, or that stand in front of every text",
                )
        sent_tokens = [(ids[part], sent_ids) for ids, part, sent_ids in zip(original, kept, sent, strict=True)]
        aligned, places = align(sent_tokens, fixed_orders(first, behind), progress=progress), list[Ids]()
        for token_ids, part, places_of_kept in zip(original, kept, aligned.places, strict=True):
            places.append(np.full(len(token_ids), NO_BELIEF, np.int64))
            places[-1][part] = places_of_kept
        return Alignment(aligned.order, places)

    def _special_counts(self) -> tuple[int, int, int]:
        """Returns how many special tokens a text has, in all, in front and at its end."""
        special_count = self.codec.tokenizer.num_special_tokens_to_add(pair=False)
        leading_special_ids = self.codec.tokenizer("")["input_ids"][:1]
        first = int(special_count > 0 and leading_special_ids == self.codec.tokenizer("a")["input_ids"][:1])
        return special_count, first, special_count - first

    def _sent_vectors(self, rows: Sequence[CapturedRow], original: Sequences, progress: Progress) -> _SentTexts:
        """Returns captured vectors as states of whole texts, or of each token. Raises CodecError."""
        width = rows[0].sent.shape[1]
        other = next((row for row in rows if row.sent.shape[1] != width), None)
        if other is not None:
            raise CodecError(
                f"the vectors of {other.place} have {other.sent.shape[1]} numbers each, and "
                f"those of {rows[0].place} have {width}",
                'give what one client sent; ids are one list, "sent": [1, 2]',
            )
        lengths = np.array([len(row.sent) for row in rows], np.int64)
        is_pooled = bool((lengths == 1).all())
        for row, count, token_count in zip(rows, lengths.tolist(), original.lengths.tolist(), strict=True):
            if not is_pooled and count != token_count:
                raise CodecError(
                    f"{row.place} has {count} vectors for a text of {token_count} tokens of {self.base.folder.name}",
                    "give one vector for each token, special ones too, or one for each text",
                )
        vectors, order = [row.sent for row in rows], IN_ORDER
        if not is_pooled:
            _, *ends = self._special_counts()
            aligned = _align_vectors(vectors, original, fixed_orders(*ends), progress)
            order = aligned.order
            vectors = [text[places] for text, places in zip(vectors, aligned.places, strict=True)]
        states = Activations(torch.from_numpy(np.concatenate(vectors)), lengths, self.layer, is_pooled)
        numbers = None if is_pooled else _numbers_of_repeated(vectors, len(self.codec.sigma))
        if numbers is None:
            return _SentTexts((states,), original, original, None, order)
        places = [np.arange(len(text)) for text in numbers]
        return _SentTexts((states, Tokens(numbers)), numbers, original, places, order)

    def knowledge_fields(self, sent_texts: _SentTexts) -> dict[str, Any]:
        """Returns the fields of `Knowledge` of an attacker who ran the client on the other half of the rows."""
        corpus, origin, sent = sent_texts.original, sent_texts.origin, sent_texts.sent
        captured_texts, knowledge = _CapturedTexts(corpus), dict[str, Any]()
        for observation in sent_texts.observations:
            if isinstance(observation, Activations):
                knowledge["observe"] = partial(_observe_captured, captured_texts, observation)
        if origin is None:
            return knowledge
        has_origin = origin != NO_BELIEF
        pairs = np.unique(np.stack([sent.ids[origin[has_origin]], corpus.ids[has_origin]], 1), axis=0)
        text_starts = np.cumsum(sent.lengths) - sent.lengths
        places_in_text = np.where(has_origin, origin - text_starts[corpus.sequence_indices], NO_BELIEF)

        def rehearse(ids: Sequences, seed: int) -> tuple[Sequences, Ids]:
            sent_rows, lengths = captured_texts.rows(ids, sent.lengths)
            original_rows, _ = captured_texts.rows(ids, corpus.lengths)
            starts = np.repeat(np.cumsum(lengths) - lengths, ids.lengths)
            places = places_in_text[original_rows]
            return Sequences(sent.ids[sent_rows], lengths), np.where(places == NO_BELIEF, NO_BELIEF, places + starts)

        return {**knowledge, "pairs": pairs, "rehearse": rehearse}


class _CapturedTexts:
    """Finds captured texts by their public ids: what the client sent is known for these texts alone."""

    def __init__(self, corpus: Sequences) -> None:
        self._index_of = {ids.tobytes(): index for index, ids in enumerate(corpus)}

    def rows(self, texts: Sequences, lengths: Ids) -> tuple[Ids, Ids]:
        """Finds the rows of captured texts in a flat array.

        Args:
            texts: the texts in public ids.
            lengths: (captured texts,) how many rows of the array each captured text has.

        Returns:
            The rows of these texts, one text after another, and (texts,) how many each has.

        Raises:
            ValueError: a text was not captured: the client itself is not here.
        """
        try:
            indices = np.array([self._index_of[ids.astype(np.int64).tobytes()] for ids in texts], np.int64)
        except KeyError:
            raise ValueError("only captured texts can be rehearsed") from None
        starts = np.cumsum(lengths) - lengths
        parts = [np.arange(starts[text], starts[text] + lengths[text]) for text in indices.tolist()]
        return np.concatenate([np.zeros(0, np.int64), *parts]), lengths[indices]


def _observe_captured(captured_texts: _CapturedTexts, states: Activations, ids: Sequences, seed: int) -> Activations:
    """Returns what was captured for texts, as `Knowledge.observe`. There is one draw alone, whatever the seed."""
    rows, lengths = captured_texts.rows(ids, states.lengths)
    return replace(states, hidden=states.hidden[torch.from_numpy(rows)], lengths=lengths)


def _vector_digest(vector: NDArray[np.float32]) -> bytes:
    """Returns a digest of 16 bytes, which is equal for vectors that are equal byte for byte."""
    return hashlib.blake2b(vector.tobytes(), digest_size=16).digest()


def _numbers_of_repeated(vectors: Sequence[NDArray[np.float32]], size: int) -> Sequences | None:
    """Returns a number in place of each vector, equal ones for equal vectors; None if most vectors come once.

    The numbers begin at `size`, the number of public ids, and follow the vectors' digests, which tell nothing.
    """
    digests = [_vector_digest(row) for text in vectors for row in text]
    number_of = {digest: size + index for index, digest in enumerate(sorted(set(digests)))}
    if len(number_of) > MAX_DISTINCT_SHARE * len(digests):
        return None
    return Sequences(
        np.array([number_of[digest] for digest in digests], np.int64), np.array([*map(len, vectors)], np.int64)
    )


def _align_vectors(
    vectors: Sequence[NDArray[np.float32]], original: Sequences, orders: Mapping[str, Order], progress: Progress
) -> Alignment:
    """Finds one order for the vectors of all texts, by vectors that occur in several texts.

    No order is sought for each text alone: it would tell attackers what the server never sees.
    """
    size = int(original.ids.max(initial=0)) + 1  # vectors are numbered from here on: none is a token
    numbers = dict[bytes, int]()
    digests = (map(_vector_digest, text) for text in vectors)
    sent = [np.array([numbers.setdefault(one, size + len(numbers)) for one in text], np.int64) for text in digests]
    return align(list(zip(original, sent, strict=True)), orders, learns=False, progress=progress)


def _matched_places(token_ids: Ids, sent: Ids) -> Ids:
    """Returns where each token of a text is in the replaced text, by their longest common parts."""
    places = np.full(len(token_ids), NO_BELIEF, np.int64)
    matcher = SequenceMatcher(None, token_ids.tolist(), sent.tolist(), autojunk=False)
    for operation, start, end, sent_start, sent_end in matcher.get_opcodes():
        if operation in ("equal", "replace"):
            count = min(end - start, sent_end - sent_start)
            places[start : start + count] = np.arange(sent_start, sent_start + count)
    return places


def _matched_backwards(token_ids: Ids, sent: Ids) -> Ids:
    """Returns where each token of a text is in a replaced text whose words stand the other way round."""
    places = _matched_places(token_ids, sent[::-1])
    return np.where(places == NO_BELIEF, NO_BELIEF, len(sent) - 1 - places)


TEXT_ORDERS: Mapping[str, Order] = {IN_ORDER: _matched_places, "backwards": _matched_backwards}


def _likeliest_public_ids(texts: _SentTexts, size: int) -> Ids:
    """Returns (size,) the public id that each sent id most often stands for; NO_BELIEF where it was not sent.

    Vectors without numbers have no ids: then every public id stands for itself.
    """
    if texts.origin is None:
        return np.arange(size, dtype=np.int64)
    inverse = np.full(size, NO_BELIEF, np.int64)
    is_sent = texts.origin != NO_BELIEF
    pairs, counts = np.unique(
        np.stack([texts.sent.ids[texts.origin[is_sent]], texts.original.ids[is_sent]], 1), axis=0, return_counts=True
    )
    for index in np.argsort(counts, kind="stable").tolist():
        inverse[pairs[index, 0]] = pairs[index, 1]
    return inverse


def rows_digest(rows: Sequence[CapturedRow]) -> str:
    """Returns the digest of captured rows, by which an audit that was stopped finds its earlier results."""
    hasher = hashlib.sha256()
    for row in rows:
        sent = row.sent.encode() if isinstance(row.sent, str) else row.sent.tobytes()
        shape = [] if isinstance(row.sent, str) else list(row.sent.shape)
        hasher.update(json.dumps([row.kind, row.text, shape, len(sent)]).encode() + sent)
    return hasher.hexdigest()

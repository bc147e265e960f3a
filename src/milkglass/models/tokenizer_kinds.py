"""Builds the kinds of tokenizers that transformers' AutoTokenizer builds from a folder's files.

Most kinds use tokenizer.json unchanged. Some use only its vocabulary and merges, and build the rest from their own code
and from tokenizer_config.json (`do_lower_case`, `add_prefix_space`). A model was trained with what its kind builds, so
the same is built here, by the `tokenizers` library alone. `tests/models/test_tokenizer.py` compares every kind with the
installed version of transformers.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

Settings = Mapping[str, Any]  # the entries of tokenizer_config.json, special tokens among them
# Takes the tokenizer of a tokenizer.json, the settings and the text of the file
Build = Callable[[Tokenizer, Settings, str], Tokenizer | None]
# Takes the tokenizer, the settings and a function that returns a token's id, or None for a token that does not exist
Finish = Callable[[Tokenizer, Settings, Callable[[str], Any]], None]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
UNCHANGED_KINDS = frozenset(
    {"TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer", "MistralCommonBackend"}
)
# The kind of a model type whose files name none, or a wrong one
KIND_OF_TYPE = {
    "bert": "BertTokenizer", "distilbert": "BertTokenizer", "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer", "gpt2": "GPT2Tokenizer", "mistral": "TokenizersBackend",
    "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "gemma": "GemmaTokenizer", "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer", "mpnet": "MPNetTokenizer",
}  # fmt: skip
MISNAMED_TYPES = frozenset({"qwen2"})  # model types whose published files name another kind than they need


@dataclass(frozen=True)
class TokenizerKind:
    """Describes a kind of tokenizer by what its own code decides.

    Attributes:
        tokens: the special tokens if tokenizer_config.json names none. None as a token: the padding of tokenizer.json
            is not used either.
        has_token_types: whether the kind distinguishes the two texts of a pair.
        build: returns the tokenizer that the kind makes of a file's, or None if only transformers can make it. If
            `build` is None, the file's is used.
        finish: sets what depends on the special tokens, after they were added.
        mask_takes_blank: whether the mask takes the blank before it.
    """

    tokens: Mapping[str, str | None]
    has_token_types: bool = False
    build: Build | None = None
    finish: Finish | None = None
    mask_takes_blank: bool = False

    def special_token(self, name: str, value: Any) -> Any:
        """Returns a special token of this name as it is added to a tokenizer."""
        if self.mask_takes_blank and isinstance(value, str):
            return AddedToken(value, lstrip=name == "mask_token")  # normalized is decided when it becomes special
        return value


def kind_name(config: Mapping[str, Any], settings: Settings, text: str) -> str:
    """Returns AutoTokenizer's kind, by config.json, tokenizer_config.json and the text of tokenizer.json."""
    model_type = str(config.get("model_type") or "")
    registered_kind = KIND_OF_TYPE.get(model_type)
    class_setting = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not class_setting:
        return registered_kind or "TokenizersBackend"
    declared_kind = _general_kind(str(class_setting))
    is_misnamed = model_type in MISNAMED_TYPES
    if declared_kind == "LlamaTokenizer" and not is_misnamed and '"ByteLevel"' in text:
        return "TokenizersBackend"
    if registered_kind and registered_kind != declared_kind:
        return (
            "TokenizersBackend"
            if registered_kind == "TokenizersBackend"
            else registered_kind
            if is_misnamed
            else declared_kind
        )
    return declared_kind


def _general_kind(name: str) -> str:
    """Returns a kind's name without its former ending, and one name for all kinds that use a file unchanged."""
    name = "TokenizersBackend" if name == "PreTrainedTokenizerFast" else name.removesuffix("Fast")
    return "TokenizersBackend" if name in UNCHANGED_KINDS else name


def _build_bert(file: Tokenizer, settings: Settings, text: str) -> Tokenizer | None:
    if type(file.model).__name__ != "WordPiece":
        return None
    backend = Tokenizer(models.WordPiece(file.get_vocab(with_added_tokens=False), unk_token=str(settings["unk_token"])))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _finish_bert(backend: Tokenizer, settings: Settings, id_of: Callable[[str], Any]) -> None:
    cls, sep = str(settings["cls_token"]), str(settings["sep_token"])
    ids = [2 if id_of(cls) is None else id_of(cls), 3 if id_of(sep) is None else id_of(sep)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=list(zip([cls, sep], ids, strict=True)),
    )


def _finish_mpnet(backend: Tokenizer, settings: Settings, id_of: Callable[[str], Any]) -> None:
    sep, cls = str(settings["sep_token"]), str(settings["cls_token"])
    ids = [2 if id_of(sep) is None else id_of(sep), 0 if id_of(cls) is None else id_of(cls)]
    backend.post_processor = processors.RobertaProcessing((sep, ids[0]), (cls, ids[1]), True, False)


def _bpe_only(file: Tokenizer, **flags: Any) -> Tokenizer | None:
    """Returns a tokenizer of the file's vocabulary and merges only, with these settings of BPE."""
    model = file.model
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    settings = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    for name, setting in {**settings, **flags}.items():
        setattr(model, name, setting)
    return Tokenizer(model)


def _build_gpt2(file: Tokenizer, settings: Settings, text: str) -> Tokenizer | None:
    if (backend := _bpe_only(file)) is not None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
        backend.decoder = decoders.ByteLevel()
    return backend


def _finish_roberta(backend: Tokenizer, settings: Settings, id_of: Callable[[str], Any]) -> None:
    sep, cls = str(settings["sep_token"]), str(settings["cls_token"])
    backend.post_processor = processors.RobertaProcessing(
        (sep, id_of(sep)),
        (cls, id_of(cls)),
        settings.get("trim_offsets", True),
        settings.get("add_prefix_space", False),
    )


def _build_xlm_roberta(file: Tokenizer, settings: Settings, text: str) -> Tokenizer | None:
    is_plain = re.search(r'"unk_id"\s*:\s*3\b', text) and not re.search(r'"byte_fallback"\s*:\s*true', text)
    if type(file.model).__name__ != "Unigram" or not is_plain:
        return None
    backend = Tokenizer(file.model)
    if (letters := _precompiled_map(file)) is not None:
        backend.normalizer = normalizers.Precompiled(letters)
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    )
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    return backend


def _precompiled_map(file: Tokenizer) -> bytes | None:
    """Returns SentencePiece's table of letters in the file's normalizer, or None."""
    if file.normalizer is None:
        return None
    state = json.loads(file.normalizer.__getstate__())
    for normalizer in state["normalizers"] if state["type"] == "Sequence" else [state]:
        if normalizer["type"] == "Precompiled" and "precompiled_charsmap" in normalizer:
            return base64.b64decode(normalizer["precompiled_charsmap"])
    return None


def _finish_xlm_roberta(backend: Tokenizer, settings: Settings, id_of: Callable[[str], Any]) -> None:
    bos, eos = str(settings["bos_token"]), str(settings["eos_token"])
    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A", eos],
        pair=[bos, "$A", eos, eos, "$B", eos],
        special_tokens=[(bos, id_of(bos)), (eos, id_of(eos))],
    )


def _build_llama(file: Tokenizer, settings: Settings, text: str) -> Tokenizer | None:
    backend = _bpe_only(file, fuse_unk=True, byte_fallback=True)
    if backend is None:
        return None
    space_setting = settings.get("add_prefix_space")
    adds_space = True if space_setting is None else space_setting
    scheme = ("always" if settings.get("legacy", False) else "first") if adds_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if adds_space else steps)
    return backend


QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _build_qwen2(file: Tokenizer, settings: Settings, text: str) -> Tokenizer | None:
    if (backend := _bpe_only(file)) is None:
        return None
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.NFC()
    adds_space = bool(settings.get("add_prefix_space"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=False),
        ]
    )
    return backend


def _finish_qwen2(backend: Tokenizer, settings: Settings, id_of: Callable[[str], Any]) -> None:
    tokens = dict.fromkeys(str(settings[name]) for name in NAMED_TOKENS if settings.get(name) is not None)
    tokens |= dict.fromkeys(str(token) for token in settings.get("extra_special_tokens") or [])
    backend.add_tokens([AddedToken(token, special=True) for token in tokens])


def _build_gemma(file: Tokenizer, settings: Settings, text: str) -> Tokenizer | None:
    backend = _bpe_only(file, fuse_unk=True, byte_fallback=True, unk_token=str(settings["unk_token"]))
    if backend is None:
        return None
    backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend


_BERT_TOKENS = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}  # fmt: skip
_ROBERTA_TOKENS = {
    "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>",
    "pad_token": "<pad>", "mask_token": "<mask>",
}  # fmt: skip
_MPNET_TOKENS = {**_ROBERTA_TOKENS, "unk_token": "[UNK]"}
_GEMMA_TOKENS = {
    "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>",
}  # fmt: skip
_END_OF_TEXT = "<|endoftext|>"
_QWEN2_TOKENS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT)
KINDS = {
    "TokenizersBackend": TokenizerKind({}),
    "BertTokenizer": TokenizerKind(_BERT_TOKENS, True, _build_bert, _finish_bert),
    "DistilBertTokenizer": TokenizerKind(_BERT_TOKENS, False, _build_bert, _finish_bert),
    "RobertaTokenizer": TokenizerKind(_ROBERTA_TOKENS, False, _build_gpt2, _finish_roberta),
    "XLMRobertaTokenizer": TokenizerKind(_ROBERTA_TOKENS, False, _build_xlm_roberta, _finish_xlm_roberta),
    "MPNetTokenizer": TokenizerKind(_MPNET_TOKENS, False, _build_bert, _finish_mpnet, True),
    "GPT2Tokenizer": TokenizerKind(
        {**dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT), "pad_token": None}, False, _build_gpt2
    ),
    "LlamaTokenizer": TokenizerKind(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, False, _build_llama
    ),
    "Qwen2Tokenizer": TokenizerKind(_QWEN2_TOKENS, False, _build_qwen2, _finish_qwen2),
    "GemmaTokenizer": TokenizerKind(_GEMMA_TOKENS, False, _build_gemma),
}

"""Checks the parts of a tokenizer.json, and refuses those whose effect on a text is not known.

A tokenizer is a small program: its normalizer and pre-tokenizer may have regular expressions that look ahead, replace
words by others, or run for minutes. A folder's tokenizer is therefore accepted only if the effect of each of its parts
on a text is known, and a provider's only if its regular expressions are exactly published ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from milkglass.errors import ModelError
from milkglass.models.pieces import reads_as

Part = dict[str, Any]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The exact patterns by which published tokenizers split a text
PUBLISHED_SPLITS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # the same, shorter
        # Llama 3, SmolLM 3
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 3.5
        _CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Mistral's Tekken
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # GPT-4o
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Replacements of published normalizers: (pattern, replacement)
PUBLISHED_REPLACEMENTS = frozenset(
    {(" ", "▁"), ("``", '"'), ("''", '"'), ("\u2581", " "), (r" {2,}", " "), (r" {2,}", "▁"), (r"\s+", " ")}
)
PROVIDER_NORMALIZERS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "BertNormalizer", "ByteLevel", "Nmt"}
)
# Normalizers in a folder of the user's choice. Precompiled is SentencePiece's compiled table of letters
USER_NORMALIZERS = PROVIDER_NORMALIZERS | {"Precompiled"}
KNOWN_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Digits", "Metaspace", "UnicodeScripts"}
)
KNOWN_DECODERS = frozenset({"ByteLevel", "Metaspace", "WordPiece", "ByteFallback", "Fuse", "BPEDecoder"})
# Kinds of parts that may occur several times. Others may occur once, since each may lengthen a text
REPEATABLE_KINDS = frozenset({"Replace", "Split", "Punctuation", "Digits", "Strip"})
SEQUENCE_FIELDS = ("normalizers", "pretokenizers", "processors", "decoders")  # names of the field of a sequence's parts
MAX_PARTS = 16
MAX_ADDED_TOKENS = 16  # tokens that a post-processor puts around a text
# Of PUBLISHED_REPLACEMENTS: published as regular expressions only. A plain string would match other text
REGEX_ONLY_PATTERNS = frozenset({r" {2,}", r"\s+"})
# A field of decoders and pre-tokenizers that may have one value, since others would change what is read
FIXED_SETTINGS = {"Metaspace": ("replacement", "▁"), "WordPiece": ("prefix", "##"), "BPEDecoder": ("suffix", "</w>")}
# Control characters, bytes that UTF-8 does not use, and first bytes of characters that Unicode has not assigned. A
# published tokenizer may lack a token for them
RARE_BYTES = frozenset({*range(0x20), 0x7F, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}) - frozenset(b"\t\n\r")
TEST_SENTENCE = "I am not ill, and 2 of my friends now call the doctor."
KNOWN_POST_PROCESSORS = frozenset({"ByteLevel", "BertProcessing", "RobertaProcessing"})


def require_known_parts(tokenizer: Any, folder: str, from_provider: bool) -> None:
    """Raises ModelError for a tokenizer whose effect on a text is not known, or that loses or changes a text.

    Each part must be on the lists of this file. In a folder from a provider that must not read the texts, a regular
    expression must be a published one, no text may become an unknown token, and plain text must give no special token.
    In a folder of the user's choice the expression of a Split may be any. Cutting words at random, and a sentence that
    does not come back, are refused in both.
    """
    backend = tokenizer.backend_tokenizer
    for kind, part, fault in _faults(backend, from_provider):
        raise ModelError(
            f"the tokenizer in {folder} has the {kind} {_part_text(part)}: {fault}",
            "use the published tokenizer of this model" + (", or don't use this provider" if from_provider else ""),
        )
    if from_provider:
        _require_no_unknown(tokenizer, folder)
        _require_no_special_in_text(tokenizer, folder)
    if getattr(backend.model, "dropout", None):
        raise ModelError(
            f"the tokenizer in {folder} cuts words at random (dropout {backend.model.dropout})",
            'set "dropout" to null in its tokenizer.json',
        )
    _require_readable(tokenizer, backend, folder)


def _faults(backend: Any, from_provider: bool) -> Iterator[tuple[str, Part, str]]:
    """Yields each part that is not accepted: its kind, the part, and why."""
    normalizers, pre_tokenizers = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    post_processors, decoders = _parts(backend.post_processor), _parts(backend.decoder)
    for part in normalizers:
        if fault := _normalizer_fault(part, from_provider):
            yield "normalizer", part, fault
    for part in pre_tokenizers:
        if fault := _pre_tokenizer_fault(part, from_provider):
            yield "pre-tokenizer", part, fault
    for part in post_processors:
        if fault := _post_processor_fault(part):
            yield "post-processor", part, fault
    for part in decoders:
        if fault := _decoder_fault(part):
            yield "decoder", part, fault
    for parts in ([*normalizers, *pre_tokenizers], decoders, post_processors):
        kinds = Counter(part["type"] for part in parts)
        for part in parts:
            if len(parts) > MAX_PARTS or (kinds[part["type"]] > 1 and part["type"] not in REPEATABLE_KINDS):
                fault = f"it stands {kinds[part['type']]} times among {len(parts)} parts, and may stand once"
                yield "part", part, fault


def _decoder_fault(part: Part) -> str:
    """Returns why a decoder is not accepted, or ""."""
    if part["type"] in KNOWN_DECODERS:
        return _fixed_setting_fault(part)
    if part["type"] == "Strip":
        strips_one_space = part["content"] == " " and part["start"] <= 1 and part["stop"] <= 1
        return "" if strips_one_space else "it leaves letters out"
    if part["type"] == "Replace":
        [(_, pattern)] = part["pattern"].items()
        return "" if (pattern, part["content"]) == ("▁", " ") else "what you read would not be what the model wrote"
    return "it is not on the list of those whose effect on a text is known"


def _fixed_setting_fault(part: Part) -> str:
    """Returns why a part's setting is not that of FIXED_SETTINGS, or ""."""
    name, expected = FIXED_SETTINGS.get(part["type"], ("", ""))
    return "" if part.get(name, expected) == expected else f"its {name} is another than {expected}"


def _require_readable(tokenizer: Any, backend: Any, folder: str) -> None:
    """Raises ModelError for a tokenizer that reads a plain English sentence as another one.

    The sentence is ASCII, in which published normalizers change only the case. A tokenizer that has no token for one of
    its words is accepted.
    """
    ids = tokenizer(TEST_SENTENCE, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if tokenizer.unk_token_id not in ids and not reads_as(tokenizer, str.casefold, ids, TEST_SENTENCE):
        raise ModelError(
            f"the tokenizer in {folder} reads a plain sentence as another one: it would change or leave out what you "
            "write",
            "use the published tokenizer of this model",
        )


def byte_letters() -> dict[int, str]:
    """Returns the letter that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(unprintable)}


def _require_no_unknown(tokenizer: Any, folder: str) -> None:
    """Raises ModelError for a tokenizer that has no token for some text.

    The tokenizer's author chooses which words have no token, and the unknown token that they share is not sanitized.
    Byte-level BPE, and BPE that falls back to bytes, have a token for everything. If a published one lacks a rare byte
    and has no unknown token, it drops the byte, and the text is refused (`reads_as`).
    """
    backend = tokenizer.backend_tokenizer
    vocabulary = backend.get_vocab(with_added_tokens=False)
    kind, parts = type(backend.model).__name__, [*_parts(backend.pre_tokenizer), *_parts(backend.normalizer)]
    is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
    letters = byte_letters() if is_byte_level else {byte: f"<0x{byte:02X}>" for byte in range(256)}
    falls_back_to_bytes = is_byte_level or getattr(backend.model, "byte_fallback", False)
    missing_bytes = {byte for byte, letter in letters.items() if letter not in vocabulary}
    replaces_bytes = bool(missing_bytes) and backend.model.unk_token is not None
    if kind != "BPE" or not falls_back_to_bytes or replaces_bytes or not missing_bytes <= RARE_BYTES:
        raise ModelError(
            f"the tokenizer in {folder} ({kind}) has no token for some texts, which would then be one that says so",
            "a provider's must be byte-level BPE, or BPE that falls back to bytes; don't use this provider",
        )


def _require_no_special_in_text(tokenizer: Any, folder: str) -> None:
    """Raises ModelError for a tokenizer that makes a special token of plain text: special tokens are not sanitized."""
    for token_id in tokenizer.special_ids:
        token = tokenizer.convert_ids_to_tokens(token_id)
        for text in {str(token), tokenizer.decode([token_id]), " " + tokenizer.decode([token_id]).strip()}:
            ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            if token_id in ids:
                raise ModelError(
                    f"the tokenizer in {folder} calls an ordinary word special (token {token_id}): it would not be "
                    "sanitized",
                    "don't use this provider",
                )


def _parts(component: Any) -> list[Part]:
    """Returns a component's parts, and those of nested sequences. A component that is None has none."""
    return [] if component is None else [*_flatten(json.loads(component.__getstate__()))]


def _flatten(part: Part) -> Iterator[Part]:
    """Yields a part, or the parts of a sequence and of sequences in it."""
    if part["type"] != "Sequence":
        yield part
        return
    (nested_parts,) = (part[name] for name in SEQUENCE_FIELDS if name in part)
    for nested_part in nested_parts:
        yield from _flatten(nested_part)


def _normalizer_fault(part: Part, from_provider: bool) -> str:
    """Returns why a normalizer is not accepted, or ""."""
    kind = part["type"]
    if kind in (PROVIDER_NORMALIZERS if from_provider else USER_NORMALIZERS):
        return ""
    if kind == "Prepend" and part["prepend"] == "▁":
        return ""
    if kind == "Replace":
        [(pattern_kind, pattern)] = part["pattern"].items()
        is_published = (pattern, part["content"]) in PUBLISHED_REPLACEMENTS
        if is_published and (pattern_kind == "Regex" or pattern not in REGEX_ONLY_PATTERNS):
            return ""
        return "it replaces a part of a text by another, and it is not a published one"
    return "it is not on the list of those whose effect on a text is known"


def _pre_tokenizer_fault(part: Part, from_provider: bool) -> str:
    """Returns why a pre-tokenizer is not accepted, or ""."""
    kind = part["type"]
    if kind in KNOWN_PRE_TOKENIZERS:
        return _fixed_setting_fault(part)
    if kind == "Punctuation":
        return "" if part["behavior"] != "Removed" else "it leaves parts of a text out"
    if kind == "Split":
        [(pattern_kind, pattern)] = part["pattern"].items()
        is_published = pattern_kind == "Regex" and pattern in PUBLISHED_SPLITS  # each of them matches every character
        if part["behavior"] == "Removed" and not (is_published and part["invert"]):
            return "it leaves parts of a text out"
        if from_provider and not is_published and (pattern_kind, pattern) != ("String", " "):
            return "its regular expression is not a published one"
        return ""
    return "it is not on the list of those whose effect on a text is known"


def _post_processor_fault(part: Part) -> str:
    """Returns why a post-processor is not accepted, or ""."""
    if part["type"] in KNOWN_POST_PROCESSORS:
        return ""
    if part["type"] == "TemplateProcessing":
        forms = (part["single"], part["pair"])
        orders = [[step["Sequence"]["id"] for step in form if "Sequence" in step] for form in forms]
        if orders != [["A"], ["A", "B"]]:
            return "it repeats a text or leaves one out"
        id_counts = {name: len(token["ids"]) for name, token in part["special_tokens"].items()}
        added_count = max(
            sum(id_counts.get(step["SpecialToken"]["id"], 0) for step in form if "SpecialToken" in step)
            for form in forms
        )
        return f"it puts {added_count} tokens around a text" if added_count > MAX_ADDED_TOKENS else ""
    return "it is not on the list of those whose effect on a text is known"


def _part_text(part: Part) -> str:
    """Returns a short description of a part. Its content is the provider's, so it is written as JSON with escapes."""
    options = {name: value for name, value in part.items() if name != "type" and value not in (None, [], {})}
    text = json.dumps(options)
    return str(part["type"]) + ("" if not options else f" {text}" if len(text) <= 80 else f" {text[:80]}...")

"""Leaves out public texts that overlap private ones, for attackers who do not have the private texts.

Every audit and recipe uses this rule: a public text is left out if it equals a private text, contains one, or is
contained in one. Texts are compared by their letters and digits alone, in lower case, without accents and blanks, since
data sets split and space the same phrase differently ("isn't", "is n't", "isn ' t"). Without blanks, three short words
may match across the borders of other words; such a public text is left out too, which errs on the safe side. A text of
fewer than `MIN_CONTAINED_WORDS` words is part of nearly every long text, so it counts only if it equals a whole text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.metrics.text import WORD_PATTERN
from milkglass.rows.repeats import letters_and_digits
from milkglass.sequences import Ids, Sequences

MIN_CONTAINED_WORDS = 3  # a text with fewer words is not searched for inside other texts
_TEXT_SEPARATOR = "\n"  # stands between texts; no normalised text contains it


def uncontaminated_indices(public: Sequence[str], private: Sequence[str]) -> Ids:
    """Returns (kept,) the indices of the public texts that overlap no private text, in order."""
    normalised_public, normalised_private = (
        [letters_and_digits(text) for text in texts] for texts in (public, private)
    )
    private_set = set(normalised_private)
    left_out_indices = {index for index, letters in enumerate(normalised_public) if letters in private_set}
    long_texts = [
        letters
        for index, letters in enumerate(normalised_public)
        if index not in left_out_indices and _has_min_words(public[index])
    ]
    contained_texts = {part for part, _ in _occurrences(long_texts, sorted(private_set))}
    left_out_indices |= {
        index
        for index, letters in enumerate(normalised_public)
        if letters in contained_texts and _has_min_words(public[index])
    }
    long_private_texts = [
        letters for letters, text in zip(normalised_private, private, strict=True) if _has_min_words(text)
    ]
    left_out_indices |= {index for _, index in _occurrences(long_private_texts, normalised_public)}
    return np.array([index for index in range(len(public)) if index not in left_out_indices], np.int64)


def without_private(public: Sequences, private: Sequences, tokenizer: Any) -> Sequences:
    """Returns the public texts that `uncontaminated_indices` keeps.

    Texts are ids, and are compared as the tokenizer decodes them.
    """
    return public.select(uncontaminated_indices(decode_texts(public, tokenizer), decode_texts(private, tokenizer)))


def decode_texts(ids: Sequences, tokenizer: Any) -> list[str]:
    """Returns the texts of ids as the tokenizer reads them, without special tokens."""
    id_lists = [text_ids.tolist() for text_ids in ids]
    return [str(text) for text in tokenizer.batch_decode(id_lists, skip_special_tokens=True)]


def tokenizer_round_trip(texts: Sequence[str], tokenizer: Any) -> list[str]:
    """Returns texts as the tokenizer reads them, for comparison with `decode_texts`: both lack unknown words."""
    if not texts:
        return []
    ids = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [str(text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def _has_min_words(text: str) -> bool:
    """Returns whether a text has enough words to be searched for inside other texts."""
    return len(WORD_PATTERN.findall(text)) >= MIN_CONTAINED_WORDS


def _occurrences(parts: Sequence[str], wholes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yields each part that occurs in a whole, with the whole's index, once for each occurrence.

    The first 2^j letters of each part, more than half of it, are compared by a hash with every window of 2^j letters of
    the wholes. The part itself is compared only where these are equal. Time grows with the letters of both, times the
    logarithm of the longest part.
    """
    parts_by_size: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for part in {*parts} - {""}:
        size = 1 << (len(part).bit_length() - 1)
        parts_by_size[size][part[:size]].append(part)
    joined = _TEXT_SEPARATOR.join(wholes)
    ends = np.cumsum([len(text) + 1 for text in wholes])
    hashes_by_size = _window_hashes(joined)
    for size in (1 << power for power in range(max(parts_by_size, default=0).bit_length())):
        hashes = next(hashes_by_size, None)
        if hashes is None:  # the wholes are shorter than this
            return
        parts_by_start = parts_by_size[size]
        start_hashes = np.array([_hash_of(start) for start in parts_by_start], np.uint64)
        for position in np.flatnonzero(np.isin(hashes, start_hashes)).tolist():
            for part in parts_by_start.get(joined[position : position + size], ()):
                if joined.startswith(part, position):
                    yield part, int(np.searchsorted(ends, position, side="right"))


def _window_hashes(text: str) -> Iterator[NDArray[np.uint64]]:
    """Yields for 1, 2, 4, ... letters the polynomial hash, modulo 2^64, of each window of that length."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64)
    size, base = 1, np.array([0x9E3779B97F4A7C15], np.uint64)
    while size <= len(text):
        yield codes
        codes = codes[:-size] * base + codes[size:]
        size, base = 2 * size, base * base


def _hash_of(start: str) -> int:
    """Returns the polynomial hash of a text of 2^j letters."""
    *_, last = _window_hashes(start)
    return int(last[0])

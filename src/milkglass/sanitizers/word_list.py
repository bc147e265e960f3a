"""Reads the frequencies of English words from a published list, for users without a corpus (CMIF, section 4.1).

The list is that of the package wordfreq (Speer 2022, version 3.1.1: books, news, subtitles, the web, until 2021): its
words with a frequency of at least 1e-7 and no digit, which make up 96 % of running English. Words with a digit are left
out, since the list counts numbers by their shape: a number is never common here. It contains no punctuation.

For a model's tokens each word is tokenized in four ways, among which its frequency is divided: after a space (0.93) or
at the start of a text (0.07), each in small letters (0.9) or capitalised (0.1). These shares are close to those of
Enron's e-mails, where 0.07 of the words are capitalised and 0.07 follow no space. The count of a token is 0 if no word
of the list needs it. It is also 0 for a token of one byte, or of one character that is no word of the list as "a" is:
digits, punctuation, and what spells rare names. A name spelled by longer pieces of English words is as common as these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.models.array_cache import ArrayCache, Arrays, digest_of
from milkglass.progress import Progress, no_progress
from milkglass.sequences import Sequences

LIST_NAME = "a list of English words (wordfreq)"
MIN_FREQUENCY = 1e-7  # of a word that is used, per running word
CAPITAL_SHARE = 0.1  # share of a word's occurrences that are capitalised
START_SHARE = 0.07  # share of a word's occurrences that follow no space
WORDS_AT_A_TIME = 8192  # words tokenized at a time
RUNNING_WORDS = 1e12  # counts are of so many running words: the rarest piece of the rarest word still counts
CONTEXT_WORD = "a"  # a word that others follow
SPACE_MARKERS, CONTINUATION = "\u0120\u2581", "##"  # what stands for the space before a word, and for none
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # a byte of a character that has no token (SentencePiece)


@cache
def english_frequencies() -> dict[str, float]:
    """Returns the frequency of each word in lower case per running word, most frequent first."""
    from wordfreq import get_frequency_dict

    frequencies = get_frequency_dict("en", wordlist="best")
    return {
        word: frequency
        for word, frequency in frequencies.items()
        if frequency >= MIN_FREQUENCY and not any(letter.isdigit() for letter in word)
    }


def token_counts(
    tokenizer: Any, row_count: int, progress: Progress = no_progress, folder: Path | None = None
) -> NDArray[np.int64]:
    """Returns (row_count,) how often each token occurs in 10^12 running words of English, from a cache or computed.

    Args:
        tokenizer: the model's tokenizer.
        row_count: how many rows the model's table has.
        progress: receives the number of words that are done.
        folder: the folder of the cache. None: the folder of all caches.

    Raises:
        CorruptCheckpoint: the cache is damaged.
    """
    counts_cache = ArrayCache("word_list", {"counts": np.int64}, folder)
    inputs = ["milkglass-token-counts/2", version("wordfreq"), MIN_FREQUENCY, CAPITAL_SHARE, START_SHARE, row_count]
    digest = digest_of([*inputs, tokenizer.backend_tokenizer.to_str()])

    def is_valid(arrays: Arrays) -> bool:
        return bool(arrays["counts"].shape == (row_count,) and arrays["counts"].min() >= 0)

    return counts_cache(digest, lambda: {"counts": _count_tokens(tokenizer, row_count, progress)}, is_valid)["counts"]


def _count_tokens(tokenizer: Any, row_count: int, progress: Progress) -> NDArray[np.int64]:
    """Returns (row_count,) the expected count of each token in RUNNING_WORDS words."""
    frequencies = np.zeros(row_count)
    all_words, word_frequencies = list(english_frequencies()), np.array(list(english_frequencies().values()))
    for start in range(0, len(all_words), WORDS_AT_A_TIME):
        block = slice(start, start + WORDS_AT_A_TIME)
        words = all_words[block]
        for spellings, way_share in _tokenized_spellings(tokenizer, words):
            token_frequencies = np.repeat(word_frequencies[block] * way_share, spellings.lengths)
            frequencies += np.bincount(spellings.ids, token_frequencies, minlength=row_count)[:row_count]
        progress(len(words))
    named_count = min(len(tokenizer), row_count)
    tokens = tokenizer.convert_ids_to_tokens(range(named_count))
    # A tokenizer that does not mark spaces marks the pieces that continue a word
    marks_spaces = any(token and token[0] in SPACE_MARKERS for token in tokens)
    frequencies[:named_count][[token is None or is_spelling_piece(token, marks_spaces) for token in tokens]] = 0
    return np.ceil(frequencies * RUNNING_WORDS).astype(np.int64)


def is_spelling_piece(token: str, marks_spaces: bool) -> bool:
    """Returns whether a token is one byte or one character, and no one-letter word of the list that begins a word.

    Args:
        token: the token as the vocabulary spells it.
        marks_spaces: whether the tokenizer marks a token that begins a word by a space. If not, it marks one that
            continues a word by ##.
    """
    if BYTE_TOKEN.fullmatch(token):
        return True
    letters = token.removeprefix(CONTINUATION).lstrip(SPACE_MARKERS)
    begins_word = token[:1] in SPACE_MARKERS if marks_spaces else not token.startswith(CONTINUATION)
    return len(letters) == 1 and not (begins_word and letters.lower() in english_frequencies())


def _tokenized_spellings(tokenizer: Any, words: list[str]) -> Iterator[tuple[Sequences, float]]:
    """Yields the ids of each word in each of the four ways of the module, with the way's share of occurrences."""
    (context,) = _ids(tokenizer, [CONTEXT_WORD])
    for is_capitalised, share in ((False, 1 - CAPITAL_SHARE), (True, CAPITAL_SHARE)):
        spellings = [word.capitalize() for word in words] if is_capitalised else words
        yield Sequences.of(_ids(tokenizer, spellings)), share * START_SHARE
        # After another word, not after a bare space: some tokenizers put a space of their own before a text
        in_context = _ids(tokenizer, [f"{CONTEXT_WORD} {word}" for word in spellings])
        tokens = [ids[len(context) :] if ids[: len(context)] == context else ids for ids in in_context]
        yield Sequences.of(tokens), share * (1 - START_SHARE)


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Returns the ids of each text, without special tokens."""
    batch = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)
    id_lists: list[list[int]] = batch["input_ids"]
    return id_lists

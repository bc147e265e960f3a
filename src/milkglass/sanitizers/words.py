"""Splits a text into words and what is between them, and looks words up in a table.

Only white space and punctuation (ASCII punctuation and symbols, Unicode's category P) are kept unchanged. Every other
character is part of a word: letters, marks, digits, emoji, currency signs, controls, unassigned ones. So an oddity
becomes an unknown word, which is replaced.

The same rule serves every table, a model's too. A model's tokenizer would let more through (its own unknown symbols,
pieces of rare names). A word that the vocabulary has only in pieces is unknown.

`split_pattern` splits at all punctuation, as the recipes of papers do. `whole_word_pattern` splits as people read:
contractions, addresses, names and tags are one word each.

    don't   o'clock   John's        one word each; of a table that lacks it, the word before its ending is looked up
    https://t.co/x   a.b@c.org      one word each, which no table has: it is replaced whole
    @some_name   #some_tag          the mark is kept, and what follows is one word

`whole_word_pattern` reveals no more than `split_pattern`: punctuation inside a word is replaced together with the word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import cache

UNKNOWN_CODE, NUMBER_CODE = -1, -2  # codes of words without a row
FIRST_KEPT_CODE = -3  # the i-th kept word has the code FIRST_KEPT_CODE - i
ASCII_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
PLAIN_SPACES = " \t\n\r"  # white space that stays as it is
MAX_REMEMBERED_WORDS = 1 << 18  # distinct words that a `Lookup` remembers
MAX_PUNCTUATION = 0x20000  # no punctuation beyond; what Unicode may put there later is part of a word
APOSTROPHES = "'\u2019"
APOSTROPHE_ENDINGS = ("'s", "'re", "'ve", "'ll", "'d", "'m")
CONTRACTION_ENDINGS = frozenset(("n't", *APOSTROPHE_ENDINGS))
IRREGULAR_STEMS = {"can't": "can", "won't": "will", "shan't": "shall"}
SUBJECTS = """
i you he she it we they that there here this who what where how let
"""
AUXILIARIES = """
is are was were have has had do does did would should could might must need ca wo sha
"""
CONTRACTED = frozenset(
    [word + ending for word in SUBJECTS.split() for ending in APOSTROPHE_ENDINGS]
    + [f"{word}n't" for word in AUXILIARIES.split()]
)


def is_kept(character: str) -> bool:
    """Returns whether a character is white space or punctuation, which is kept unchanged."""
    return character in ASCII_PUNCTUATION or character.isspace() or unicodedata.category(character).startswith("P")


@cache
def kept_characters() -> str:
    """Returns every character that is kept, for a character class of a regular expression."""
    return re.escape("".join(c for c in map(chr, range(MAX_PUNCTUATION)) if is_kept(c)))


@cache
def split_pattern(splits_contractions: bool) -> re.Pattern[str]:
    """Returns a pattern whose `split` gives what is between words at even places and words at odd ones.

    With `splits_contractions`, "don't" and "it's" are two words each, as in GloVe: "do" "n't", "it" "'s".
    """
    letter = f"[^{kept_characters()}]"
    if not splits_contractions:
        return re.compile(f"({letter}+)")
    end, apostrophe = f"(?!{letter})", "['\u2019]"
    alternatives = (
        f"{letter}+?(?=n{apostrophe}t{end})",
        f"n{apostrophe}t{end}",
        f"(?<={letter}){apostrophe}(?:s|re|ve|ll|d|m){end}",
    )
    return re.compile(f"({'|'.join(alternatives)}|{letter}+)", re.IGNORECASE)


def is_word(text: str) -> bool:
    """Returns whether a text can be one of the words into which `split_pattern` splits a text."""
    return text in CONTRACTION_ENDINGS or bool(text) and not any(is_kept(c) for c in text)


@cache
def whole_word_pattern() -> re.Pattern[str]:
    """Returns a pattern like that of `split_pattern`, for words as people read them (see the module)."""
    letter = f"[^{kept_characters()}]"
    address = r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?')\]}]"
    mail = r"[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64}){1,8}"
    handle = f"(?<=[@#])(?:{letter}|_)+"
    word = f"{letter}+(?:[{APOSTROPHES}]{letter}+)*"
    return re.compile(f"({address}|{mail}|{handle}|{word})", re.IGNORECASE)


def is_whole_word(text: str) -> bool:
    """Returns whether a text is one of the words of `whole_word_pattern`, and nothing else."""
    return whole_word_pattern().fullmatch(text) is not None


def with_plain_spaces(text: str) -> str:
    """Returns what stands between two words, with a blank for each rare kind of white space."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(" " if c.isspace() and c not in PLAIN_SPACES else c for c in text)


def is_number(word: str) -> bool:
    """Returns whether a word has a digit or another character of Unicode's category N."""
    return any(unicodedata.category(c).startswith("N") for c in word)


def spellings(word: str) -> Iterable[str]:
    """Yields how a table may spell a word, in turn: unchanged, in lower case, without accents."""
    word = word.replace("\u2019", "'")
    yield word
    lower = word.lower()
    yield lower
    yield "".join(c for c in unicodedata.normalize("NFD", lower) if unicodedata.category(c) != "Mn")


def word_before_contraction(word: str) -> str | None:
    """Returns the word before a contraction's ending, in lower case: "do" for "don't"; None without such an ending."""
    lower = word.lower().replace("\u2019", "'")
    if lower in IRREGULAR_STEMS:
        return IRREGULAR_STEMS[lower]
    for contraction in CONTRACTION_ENDINGS:
        if lower.endswith(contraction) and lower != contraction:
            return lower.removesuffix(contraction)
    return None


class Lookup(dict[str, int]):
    """Maps a word of a text to its row, or to a code: UNKNOWN_CODE, NUMBER_CODE, FIRST_KEPT_CODE - i for kept word i.

    Everything with a digit is a number, even if the table has it. When MAX_REMEMBERED_WORDS are remembered, all are
    forgotten.

    Attributes:
        rows: the row of each word of the table.
        kept: the index of each kept word.
        shortened: returns the word to look up in place of a word without a row, or None.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        kept: Mapping[str, int],
        shortened: Callable[[str], str | None] = lambda word: None,
    ) -> None:
        super().__init__()
        self.rows, self.kept, self.shortened = rows, kept, shortened

    def __missing__(self, word: str) -> int:
        if len(self) >= MAX_REMEMBERED_WORDS:
            self.clear()
        self[word] = code = self._find(word)
        return code

    def _find(self, word: str) -> int:
        """Returns the row or the code of a word that is not remembered."""
        for spelling in spellings(word):
            if spelling in self.kept:
                return FIRST_KEPT_CODE - self.kept[spelling]
        if is_number(word):
            return NUMBER_CODE
        row = next((self.rows[spelling] for spelling in spellings(word) if spelling in self.rows), None)
        if row is None and (shorter := self.shortened(word)) is not None:
            row = next((self.rows[spelling] for spelling in spellings(shorter) if spelling in self.rows), None)
        return UNKNOWN_CODE if row is None else row

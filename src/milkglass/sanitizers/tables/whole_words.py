"""Split a text as people read it: contractions, addresses, names and tags are one word each.

    don't   o'clock   John's        one word each; of a table that lacks it, the word before its ending is looked up
    https://t.co/x   a.b@c.org      one word each, which no table has: it is replaced whole
    @some_name   #some_tag          the mark is kept, and what follows is one word

Otherwise the rule is that of words.py, which the recipes of papers use. What crosses is no more: the signs inside
such a word are replaced with it.
"""

from __future__ import annotations

import re
from functools import cache

from milkglass.sanitizers.tables.words import between

TICKS = "'\u2019"
ENDINGS = ("'s", "'re", "'ve", "'ll", "'d", "'m")
ODD = {"can't": "can", "won't": "will", "shan't": "shall"}
_SUBJECTS = """
i you he she it we they that there here this who what where how let
"""
_AUXILIARIES = """
is are was were have has had do does did would should could might must need ca wo sha
"""
CONTRACTED = frozenset(
    [one + ending for one in _SUBJECTS.split() for ending in ENDINGS] + [f"{one}n't" for one in _AUXILIARIES.split()]
)


@cache
def whole_pattern() -> re.Pattern[str]:
    """Splitting with it gives what is between, a word, what is between, ..."""
    inside = f"[^{between()}]"
    address = r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?')\]}]"
    mail = r"[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64}){1,8}"
    named = f"(?<=[@#])(?:{inside}|_)+"
    word = f"{inside}+(?:[{TICKS}]{inside}+)*"
    return re.compile(f"({address}|{mail}|{named}|{word})", re.IGNORECASE)


def is_whole_word(text: str) -> bool:
    return whole_pattern().fullmatch(text) is not None


def stem(word: str) -> str | None:
    """The word before a contraction's ending, in small letters; None where there is none. "don't" gives "do"."""
    small = word.lower().replace("\u2019", "'")
    if small in ODD:
        return ODD[small]
    return next((small.removesuffix(one) for one in ("n't", *ENDINGS) if small.endswith(one) and small != one), None)

"""Public text, as an attacker may have it who does not have the private text itself.

Data sets overlap: a phrase of one is part of a sentence of another, cut by other rules. So texts are compared by their
letters and digits alone, in lower case and without accents, and what holds a private text, or is part of one, is left
out. Parts of fewer than `WORDS` words are in nearly every text and give nothing away; they are compared as a whole.

What this module does not know: tokens, files, what is done with the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

WORDS = 3  # of a text that is looked for inside another


def apart(public: Sequence[str], private: Sequence[str]) -> list[int]:
    """The numbers of the public texts that hold no private text and are in none."""
    secret = {bare(one) for one in private}
    parts = sorted({bare(one) for one in private if _long(one)} - {""})
    whole = "\n".join(sorted(secret))  # no text has a line's end in it, once it is bare
    result = []
    for number, text in enumerate(public):
        letters = bare(text)
        inside = letters in secret or (_long(text) and letters in whole)
        if not inside and not any(one in letters for one in parts):
            result.append(number)
    return result


def bare(text: str) -> str:
    """Its letters and digits: "Café, isn't" becomes "cafeisnt", as a tokenizer that cuts it would leave it."""
    return "".join(one for one in unicodedata.normalize("NFKD", text).lower() if one.isalnum())


def _long(text: str) -> bool:
    return len(re.findall(r"\w+", text)) >= WORDS

"""Finds which tokens are forms of one word (GHOST, sections 2.2 and 3.3).

A token that is a whole word has its word's lemma by simplemma's dictionary. A piece of a word is its own lemma. Words
are compared in lower case. Pieces are recognised by the marker that most of a vocabulary's marked tokens have:
WordPiece marks pieces (##ing); SentencePiece and byte-level BPE mark what begins a word, so that tokens without a mark
are pieces. A vocabulary without markers has whole words only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.sanitizers.tables.vocabulary import BLANKS

PIECE = "##"  # WordPiece's, before what goes on a word


def marker(tokens: Sequence[str]) -> str | None:
    """Returns the most frequent of the three markers. None: no token has one."""
    counts = {mark: sum(one.startswith(mark) and len(one) > len(mark) for one in tokens) for mark in (PIECE, *BLANKS)}
    result = max(counts, key=lambda mark: counts[mark])
    return result if counts[result] else None


def whole_words(tokens: Sequence[str]) -> NDArray[np.bool_]:
    """Returns (n,) which tokens, as their vocabulary spells them, are or begin whole words."""
    mark = marker(tokens)
    if mark is None:
        return np.ones(len(tokens), np.bool_)
    return np.array([one.startswith(mark) for one in tokens]) != (mark == PIECE)


def lemmas_of(tokens: Sequence[str], texts: Sequence[str], language: str = "en") -> NDArray[np.int64]:
    """Returns (n,) numbers, equal for tokens of one lemma.

    Args:
        tokens: as the vocabulary spells them.
        texts: what each token reads as, apart from blanks.
        language: two letters of ISO 639-1.

    Raises:
        UsageError: simplemma lacks the language.
    """
    require_language(language)
    from simplemma import lemmatize

    numbers: dict[str, int] = {}
    result = np.empty(len(tokens), np.int64)
    for place, (token, text, whole) in enumerate(zip(tokens, texts, whole_words(tokens), strict=True)):
        word = text.strip().lower()
        lemma = lemmatize(word, language).lower() if whole and word else token.lower()
        result[place] = numbers.setdefault(lemma, len(numbers))
    return result


def require_language(language: str) -> None:
    """Raises UsageError if there are no lemmas of a language."""
    from simplemma.strategies.dictionaries.dictionary_factory import SUPPORTED_LANGUAGES

    if language not in SUPPORTED_LANGUAGES:
        raise UsageError(
            f"there are no lemmas of the language {language!r}", f"languages: {', '.join(sorted(SUPPORTED_LANGUAGES))}"
        )


def version() -> str:
    """Returns the dictionary's version, on which a search depends."""
    from importlib.metadata import version as of

    return of("simplemma")

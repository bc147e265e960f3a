"""Puts a sanitizer in front of any model: text in, text out, and a tally of what was replaced.

Every word of the result is a word of the table or one that the caller kept by name, in the table's spelling: no
spelling, capital or accent of the input gets through. What was between words stays, but white space other than blanks,
tabs and line ends becomes a blank. Two words that touch are written apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.noise.stream import Stream
from milkglass.progress import Progress, no_progress
from milkglass.sanitizers import word_list, words
from milkglass.sanitizers.sanitizer import UNKNOWN, Sanitizer
from milkglass.sanitizers.table import Ids, Mask, WordVectors, open_table, table_of
from milkglass.sanitizers.word_list import token_counts
from milkglass.sanitizers.words import (
    CONTRACTED,
    FIRST_KEPT_CODE,
    NUMBER_CODE,
    Lookup,
    is_whole_word,
    whole_word_pattern,
    word_before_contraction,
)

Splitting = Literal["pieces", "whole"]  # how a text is split into words (words.py); "pieces": at all punctuation
WORD_CLASSES = ("stopword", "number", "unknown", "sensitive", "other")
STOPWORD_CLASS, NUMBER_CLASS, UNKNOWN_CLASS, SENSITIVE_CLASS, OTHER_CLASS = range(len(WORD_CLASSES))
# English function words, which CUSTEXT+ and --keep-stopwords let cross: pronouns, articles, prepositions, conjunctions,
# auxiliaries and negations, nothing that names anything. Words that are names as well ("will", "may", "don") and single
# letters but "a" and "i" are left out.
_STOPWORD_LINES = """
i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it
its itself they them their theirs themselves what which who whom whose this that these those am is are was were be
been being have has had having do does did doing would should could can cannot must might shall ought
a an the and but if or because as until while of at by for with about against between into through during before
after above below to from up down in out on off over under again further then once here there when where why how
all any both each few more most other some such no nor not only own same so than too very just also yet
n't 's 're 've 'll 'd 'm
"""
STOPWORDS = frozenset(_STOPWORD_LINES.split())


def _zero_counts() -> NDArray[np.int64]:
    """Returns a count of 0 for each of WORD_CLASSES."""
    return np.zeros(len(WORD_CLASSES), np.int64)


@dataclass
class WordTally:
    """Counts words by class, in the order of WORD_CLASSES.

    A word that the caller kept counts in its class, as not drawn.

    Attributes:
        texts: the number of texts.
        words: (classes,) the number of words of each class.
        drawn: (classes,) how many of these went through the mechanism.
        replaced: (classes,) how many of these came out as another word. A draw may be the word itself.
    """

    texts: int = 0
    words: NDArray[np.int64] = field(default_factory=_zero_counts)
    drawn: NDArray[np.int64] = field(default_factory=_zero_counts)
    replaced: NDArray[np.int64] = field(default_factory=_zero_counts)

    def add(self, other: WordTally) -> None:
        """Adds the counts of another tally."""
        self.texts += other.texts
        self.words += other.words
        self.drawn += other.drawn
        self.replaced += other.replaced

    def document(self) -> dict[str, dict[str, float | int]]:
        """Returns the counts by class, and those of all, for a report. It contains no text."""
        counts = np.stack([self.words, self.drawn, self.replaced], 1)
        counts_by_class = {"all": counts.sum(0), **dict(zip(WORD_CLASSES, counts, strict=True))}
        return {
            name: {
                "words": int(words),
                "drawn": int(drawn),
                "replaced": int(replaced),
                "replaced_share": float(replaced / words) if words else 0.0,
            }
            for name, (words, drawn, replaced) in counts_by_class.items()
        }


@dataclass(frozen=True, eq=False)
class WordReader:
    """Maps words of texts to rows of a table.

    Attributes:
        table: the words that have a row.
        kept: words that the caller allows to cross, in lower case.
        splitting: how texts are split into words.
    """

    table: WordVectors
    kept: tuple[str, ...] = ()
    splitting: Splitting = "pieces"

    def split(self, text: str) -> list[str]:
        """Returns what is between words at even places, and words at odd ones."""
        return self._pattern.split(text)

    def codes(self, text_words: Sequence[str]) -> Ids:
        """Returns (words,) the row of each word, or for one without a row the negative code of `Lookup`."""
        return np.fromiter(map(self.lookup.__getitem__, text_words), np.int64, len(text_words))

    def counts(self, texts: Iterable[str]) -> NDArray[np.int64]:
        """Returns (n,) how often each row of the table occurs in these texts."""
        codes = self.codes([word for text in texts for word in self.split(text)[1::2]])
        return np.bincount(codes[codes >= 0], minlength=len(self.table))

    def english_counts(self, progress: Progress = no_progress) -> NDArray[np.int64]:
        """Returns (n,) how often each row occurs in 10^12 words of English.

        Args:
            progress: counts the words of the frequency list.
        """
        counts = np.zeros(len(self.table))
        for word, share in word_list.english_frequencies().items():
            for spelling, spelling_share in (
                (word, 1 - word_list.CAPITAL_SHARE),
                (word.capitalize(), word_list.CAPITAL_SHARE),
            ):
                codes = self.codes(self.split(spelling)[1::2])
                np.add.at(counts, codes[codes >= 0], share * spelling_share * word_list.RUNNING_WORDS)
            progress(1)
        return np.ceil(counts).astype(np.int64)

    @cached_property
    def row_of_word(self) -> dict[str, int]:
        """Returns the row of each word of the table that may be drawn."""
        return {self.table.words[row]: row for row in self.table.candidates.tolist()}

    @cached_property
    def lookup(self) -> Lookup:
        """Returns the lookup from a word of a text to its row or its code."""
        kept_indices = {word: index for index, word in enumerate(self.kept)}
        if self.splitting == "whole":
            return Lookup(self.row_of_word, kept_indices, word_before_contraction)
        return Lookup(self.row_of_word, kept_indices)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return whole_word_pattern() if self.splitting == "whole" else words.split_pattern("n't" in self.row_of_word)


@dataclass(frozen=True, eq=False)
class TextSanitizer:
    """Sanitizes texts by words, in front of any model.

    Attributes:
        sanitizer: the mechanism over a table of words.
        keep_stopwords: whether STOPWORDS cross unchanged.
        allow: further words that cross unchanged, in any case.
        splitting: how texts are split into words.

    Raises:
        UsageError: an allowed word is not a single word.
    """

    sanitizer: Sanitizer
    keep_stopwords: bool = False
    allow: frozenset[str] = frozenset()
    splitting: Splitting = "pieces"

    def __post_init__(self) -> None:
        is_word = is_whole_word if self.splitting == "whole" else words.is_word
        if bad_count := sum(not is_word(word) for word in self.allow):
            raise UsageError(f"{bad_count} of the allowed words are not one word each", "allow single words")

    def text(self, text: str, stream: Stream) -> str:
        """Returns one text sanitized."""
        return self.texts([text], stream)[0]

    def texts(self, texts: Sequence[str], stream: Stream, tally: WordTally | None = None) -> list[str]:
        """Returns each text sanitized, in order. The words of all texts are drawn together; `tally` counts them."""
        return ["".join(new_parts) for _, new_parts in self.parts(texts, stream, tally)]

    def parts(
        self, texts: Sequence[str], stream: Stream, tally: WordTally | None = None
    ) -> list[tuple[list[str], list[str]]]:
        """Returns each text before and after, as parts: what is between words at even places, and words at odd ones."""
        parts_of_texts = [self.reader.split(text) for text in texts]
        original_words = [word for parts in parts_of_texts for word in parts[1::2]]
        codes = self.reader.codes(original_words)
        is_replaceable = codes > FIRST_KEPT_CODE
        is_drawn = np.zeros(len(codes), np.bool_)
        new_codes = codes.copy()
        replaceable_codes = np.maximum(codes[is_replaceable], UNKNOWN)
        new_codes[is_replaceable], is_drawn[is_replaceable] = self.sanitizer.sanitize_checked(replaceable_codes, stream)
        table_words, kept = self.sanitizer.table.words, self.reader.kept
        new_words = [table_words[code] if code >= 0 else kept[FIRST_KEPT_CODE - code] for code in new_codes.tolist()]
        if tally is not None:
            tally.texts += len(texts)
            is_changed = self._changed_mask(codes, new_codes, is_drawn, original_words, new_words)
            self._count(tally, codes, is_drawn, is_changed)
        substitutes = iter(new_words)
        return [(parts, _replace_words(parts, substitutes)) for parts in parts_of_texts]

    @property
    def guarantee(self) -> str | None:
        """Returns the mechanism's guarantee, or None if nothing is promised for any word."""
        guarantee = self.sanitizer.guarantee
        return f"{guarantee}; words that are kept have none" if guarantee and self.reader.kept else guarantee

    @cached_property
    def reader(self) -> WordReader:
        """Returns the reader of the mechanism's table that keeps the words that cross unchanged."""
        kept_words = {word.lower() for word in self.allow} | (self._stopwords if self.keep_stopwords else frozenset())
        return WordReader(self.sanitizer.table, tuple(sorted(kept_words)), self.splitting)

    @property
    def _stopwords(self) -> frozenset[str]:
        """Returns the stopwords as texts are split: contractions too if these are one word each."""
        return STOPWORDS | CONTRACTED if self.splitting == "whole" else STOPWORDS

    # --- the tally ----------------------------------------------------------------------------------------------------
    def _changed_mask(
        self, codes: Ids, new_codes: Ids, is_drawn: Mask, original_words: list[str], new_words: list[str]
    ) -> Mask:
        """Returns (words,) which words were drawn and came out as another. A number may be drawn as itself."""
        is_changed = is_drawn & (new_codes != codes)
        for place in np.flatnonzero(codes == NUMBER_CODE):
            is_changed[place] = original_words[place].lower() != new_words[place].lower()
        return is_changed

    def _count(self, tally: WordTally, codes: Ids, is_drawn: Mask, is_changed: Mask) -> None:
        """Adds words to the tally, each in its class."""
        classes = np.where(codes >= 0, self._row_classes[np.maximum(codes, 0)], OTHER_CLASS)
        classes[codes == UNKNOWN] = UNKNOWN_CLASS
        classes[codes == NUMBER_CODE] = NUMBER_CLASS
        is_kept = codes <= FIRST_KEPT_CODE
        classes[is_kept] = self._kept_classes[FIRST_KEPT_CODE - codes[is_kept]]
        tally.words += np.bincount(classes, minlength=len(WORD_CLASSES))
        tally.drawn += np.bincount(classes[is_drawn], minlength=len(WORD_CLASSES))
        tally.replaced += np.bincount(classes[is_changed], minlength=len(WORD_CLASSES))

    @cached_property
    def _row_classes(self) -> NDArray[np.int64]:
        """Returns (n,) the class of each row of the table."""
        is_sensitive = self.sanitizer.sensitive_mask()
        classes = np.full(len(self.sanitizer.table), OTHER_CLASS)
        if is_sensitive is not None:
            classes[is_sensitive] = SENSITIVE_CLASS
        classes[[word.lower() in STOPWORDS for word in self.sanitizer.table.words]] = STOPWORD_CLASS
        return classes

    @cached_property
    def _kept_classes(self) -> NDArray[np.int64]:
        """Returns (kept,) the class that a kept word would have had."""
        codes = WordReader(self.sanitizer.table, splitting=self.splitting).codes(self.reader.kept)
        classes = np.where(codes >= 0, self._row_classes[np.maximum(codes, 0)], UNKNOWN_CLASS)
        classes[codes == NUMBER_CODE] = NUMBER_CLASS
        classes[[word in self._stopwords for word in self.reader.kept]] = STOPWORD_CLASS
        return classes


def _replace_words(parts: list[str], substitutes: Iterator[str]) -> list[str]:
    """Returns new parts: each word replaced by the next of `substitutes`, and what is between words with plain spaces.

    Words that touched are written with a blank between them.
    """
    new_parts = [words.with_plain_spaces(parts[0])]
    last_word_place = len(parts) - 2
    for place in range(1, len(parts), 2):
        new_parts.append(next(substitutes))
        new_parts.append(
            words.with_plain_spaces(parts[place + 1]) if parts[place + 1] or place == last_word_place else " "
        )
    return new_parts


@dataclass(frozen=True, eq=False)
class TokenReader:
    """Maps texts to tokens of a model, which are the rows of its own embedding table.

    Attributes:
        table: the tokens, and their embeddings.
        tokenizer: the model's tokenizer.
    """

    table: WordVectors
    tokenizer: Any = field(repr=False)

    @classmethod
    def of_model(cls, folder: Path, name: str) -> TokenReader:
        """Opens the model in a folder. Reports call its table `name`."""
        tokenizer, vectors = open_table(folder)
        return cls(table_of(tokenizer, vectors, name), tokenizer)

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """Returns (t,) the ids of each text, without the tokens that a model puts around a text."""
        if not texts:
            return []
        batch = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)
        return [np.asarray(row, np.int64) for row in batch["input_ids"]]

    def counts(self, texts: Iterable[str]) -> NDArray[np.int64]:
        """Returns (n,) how often each row of the table occurs in these texts."""
        id_arrays = [np.zeros(0, np.int64), *self.ids(list(texts))]
        return np.bincount(np.concatenate(id_arrays), minlength=len(self.table))

    def english_counts(self, progress: Progress = no_progress) -> NDArray[np.int64]:
        """Returns (n,) how often each row occurs in 10^12 words of English.

        Args:
            progress: counts the words of the frequency list.
        """
        return token_counts(self.tokenizer, len(self.table), progress)

    def text(self, ids: Ids) -> str:
        """Returns the text of ids (t,), without special tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@dataclass(frozen=True, eq=False)
class TokenTextSanitizer:
    """Sanitizes texts by tokens of a model (CMIF, section 3.2: w_i is a row of the embedding layer).

    A text is tokenized alone, its ids go through the mechanism, and the result is decoded. Special tokens are never
    drawn, and what looks like one in a text is text. A tokenizer may split the decoded text into other tokens than were
    drawn, since two that touch may merge. That is postprocessing of the draws and reveals nothing more.
    """

    sanitizer: Sanitizer
    reader: TokenReader

    def texts(self, texts: Sequence[str], stream: Stream, tally: WordTally | None = None) -> list[str]:
        """Returns each text sanitized, in order. The tokens of all texts are drawn together."""
        id_arrays = self.reader.ids(texts)
        if not id_arrays:
            return []
        ids = np.concatenate(id_arrays)
        new_ids, is_drawn = self.sanitizer.sanitize_checked(ids, stream)
        if tally is not None:
            self._count(tally, len(texts), ids, is_drawn, is_drawn & (new_ids != ids))
        stops = np.cumsum([len(text_ids) for text_ids in id_arrays])
        return [self.reader.text(text_ids) for text_ids in np.split(new_ids, stops[:-1])]

    @property
    def guarantee(self) -> str | None:
        """Returns the mechanism's guarantee, or None if nothing is promised."""
        return self.sanitizer.guarantee

    def _count(self, tally: WordTally, text_count: int, ids: Ids, is_drawn: Mask, is_changed: Mask) -> None:
        """Counts tokens as sensitive or other; the other classes of the tally are for words."""
        is_sensitive = self.sanitizer.sensitive_mask()
        classes = np.full(len(ids), OTHER_CLASS)
        if is_sensitive is not None:
            classes[is_sensitive[ids]] = SENSITIVE_CLASS
        tally.texts += text_count
        for counts, mask in ((tally.words, slice(None)), (tally.drawn, is_drawn), (tally.replaced, is_changed)):
            counts += np.bincount(classes[mask], minlength=len(counts))

"""Reads the words that a sanitizer knows, with a vector for each, from a GloVe file or from a model.

Of a model's own embeddings, a table for texts has the tokens that are a word by themselves, spelled as in a text, so
that a sanitized word is one token again. Pieces of words ("##ing") are not words and replace none. A table for token
ids has every row, with special ones marked.

A GloVe text file has a line a word, `word float float ...`, separated by single blanks. Words keep the file's order, by
frequency in the published files. Left out are entries that words.py cannot find in a text (punctuation, "new
york", "<unk>") and second entries of a word. A first line of two integers (word2vec's) is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import BadTable
from milkglass.sanitizers.words import is_word

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]
Mask = NDArray[np.bool_]
MAX_VALUE = 1e15  # values are below this, so that their squares can be summed in fp32
TEXT_ROWS_AT_A_TIME = 4096  # rows of a file that are held as text at a time
MAX_LINE_CHARACTERS = 1 << 16
GLOVE_HINT = "give a GloVe text file: a word and its numbers on each line"
SPACE_MARKERS = ("\u0120", "\u2581")  # byte-level BPE's, SentencePiece's
RESERVED_TOKEN = re.compile(r"[\[<].*(unused|reserved|pad|extra_id|special).*[\]>]|madeupword\d+", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Holds the words that a sanitizer knows, with a vector for each.

    Attributes:
        words: (n,), each once.
        vectors: (n, d), fp32.
        special: (n,) whether a row is neither drawn nor replaced, such as [CLS] and [unused7]. None: no row is special.
        name: for reports; without a path or a text.

    Raises:
        BadTable: vectors or mask do not fit the words, values are not finite, or fewer than 2 rows can be drawn.
    """

    words: tuple[str, ...]
    vectors: Vectors = field(repr=False)
    special: Mask | None = field(default=None, repr=False)
    name: str = "table"

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or self.vectors.dtype != np.float32 or len(self.vectors) != len(self.words):
            raise BadTable(
                f"{len(self.words)} words do not fit vectors of shape {self.vectors.shape} and {self.vectors.dtype}",
                "give one fp32 vector for each word",
            )
        if not np.abs(self.vectors).max(initial=0) < MAX_VALUE:  # nor is nan
            raise BadTable("the table has values that are not finite, or too large", "make or fetch it again")
        if self.special is not None and self.special.shape != (len(self.words),):
            raise BadTable(f"the mask of special rows has shape {self.special.shape}", "give one entry for each word")
        if len(self.candidates) < 2:
            raise BadTable(
                f"the table has {len(self.candidates)} words to draw from, at least 2 are needed", "give a larger table"
            )

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def candidates(self) -> Ids:
        """Returns (m,) the rows that may be drawn, ascending."""
        return np.arange(len(self)) if self.special is None else np.flatnonzero(~self.special)

    @cached_property
    def places(self) -> Ids:
        """Returns (n,) a row's place among the candidates; -1 for special rows."""
        places = np.full(len(self), -1, np.int64)
        places[self.candidates] = np.arange(len(self.candidates))
        return places


def read_glove(path: Path) -> WordVectors:
    """Reads a GloVe file. Raises BadTable, which names the line, for a file of another format."""
    words: dict[str, None] = {}
    blocks: list[Vectors] = []
    pending: list[str] = []
    width = 0

    def flush() -> None:
        if pending:
            blocks.append(_floats(pending, width, path))
            pending.clear()

    try:
        for number, word, values in _lines(path):
            width = width or len(values)
            if len(values) < width:
                raise BadTable(f"line {number} of {path.name} has {len(values)} numbers, the first {width}", GLOVE_HINT)
            if len(values) > width:  # a word with blanks in it
                continue
            if is_word(word) and word not in words:
                words[word] = None
                pending.append(" ".join(values))
                if len(pending) == TEXT_ROWS_AT_A_TIME:
                    flush()
        flush()
    except UnicodeDecodeError:
        raise BadTable(f"{path.name} is not UTF-8 text", GLOVE_HINT) from None
    if not blocks:
        raise BadTable(f"{path.name} has no words", GLOVE_HINT)
    return WordVectors(tuple(words), np.concatenate(blocks), name=path.name)


def _lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yields the number of each line, its word and its numbers. Raises BadTable for a line of another form."""
    with path.open(encoding="utf-8", newline="\n") as file:
        number = 0
        while line := file.readline(MAX_LINE_CHARACTERS):
            number += 1
            if len(line) == MAX_LINE_CHARACTERS:
                raise BadTable(
                    f"line {number} of {path.name} is longer than {MAX_LINE_CHARACTERS} characters", GLOVE_HINT
                )
            word, *values = line.rstrip("\r\n").rstrip(" ").split(" ")
            if number == 1 and len(values) == 1 and word.isdigit() and values[0].isdigit():
                continue
            if not values:
                raise BadTable(f"line {number} of {path.name} has no numbers", GLOVE_HINT)
            yield number, word, values


def _floats(rows: list[str], width: int, path: Path) -> Vectors:
    """Returns (rows, width) the numbers of rows of text. Raises BadTable for what is no number."""
    try:
        vectors = np.array([row.split(" ") for row in rows], np.float32)
    except ValueError:
        raise BadTable(f"{path.name} has an entry that is not a number", GLOVE_HINT) from None
    return vectors.reshape(-1, width)


def words_of_model(folder: Path, name: str) -> WordVectors:
    """Returns the whole words of a model's vocabulary, in the order of their ids.

    Args:
        folder: the model's folder.
        name: what reports and messages call the table.

    Raises:
        BadTable: the vocabulary has no whole words.
        ModelError: the model or its tokenizer cannot be read.
    """
    tokenizer, vectors = open_table(folder)
    rows: dict[str, int] = {}
    special = special_rows(tokenizer, len(vectors))
    ids = [i for i in range(min(len(tokenizer), len(vectors))) if not special[i]]
    word_beginnings = [i for i in ids if tokenizer.convert_ids_to_tokens(i).startswith(SPACE_MARKERS)]
    ids = word_beginnings or ids  # where tokens say that a word begins, others are pieces
    texts = [text.strip() for text in tokenizer.batch_decode([[i] for i in ids])]
    candidates = [(i, text) for i, text in zip(ids, texts, strict=True) if is_word(text)]
    for prefix in (" ", ""):  # SentencePiece may put a blank of its own before a text
        requested = [prefix + text for _, text in candidates]
        encodings = tokenizer(requested, add_special_tokens=False)["input_ids"] if requested else []
        whole_word_flags = [encoding == [i] for (i, _), encoding in zip(candidates, encodings, strict=True)]
        for (i, text), is_whole in zip(candidates, whole_word_flags, strict=True):
            if is_whole:
                rows.setdefault(text, i)
        candidates = [
            candidate for candidate, is_whole in zip(candidates, whole_word_flags, strict=True) if not is_whole
        ]
    row_of_word = dict(sorted(rows.items(), key=itemgetter(1)))
    if not row_of_word:
        raise BadTable(f"the vocabulary of {name} has no whole words", "give a GloVe file as the table")
    return WordVectors(tuple(row_of_word), vectors[list(row_of_word.values())], name=name)


def tokens_of_model(folder: Path, name: str) -> WordVectors:
    """Returns every row of a model's embeddings by token id; special rows are neither drawn nor replaced.

    Raises ModelError if the model or its tokenizer cannot be read.
    """
    return table_of(*open_table(folder), name)


def table_of(tokenizer: Any, vectors: NDArray[np.float32], name: str) -> WordVectors:
    """Returns every row of these embeddings by token id, see `tokens_of_model`."""
    tokens = [*tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), len(vectors))))]
    tokens += [f"<row {i}>" for i in range(len(tokens), len(vectors))]
    return WordVectors(tuple(map(str, tokens)), vectors, special_rows(tokenizer, len(vectors)), name)


def open_table(folder: Path) -> tuple[Any, NDArray[np.float32]]:
    """Returns a model's tokenizer, and its embeddings (n, d). Raises ModelError."""
    from milkglass.models.tokenizer import load_tokenizer
    from milkglass.models.view import Model

    return load_tokenizer(folder), np.ascontiguousarray(Model.open(folder).table.numpy(), np.float32)


def special_rows(tokenizer: Any, row_count: int) -> NDArray[np.bool_]:
    """Returns (row_count,) which rows are special or added tokens, [unusedN] and the like, or beyond the vocabulary."""
    is_special = np.ones(row_count, np.bool_)
    count = min(len(tokenizer), row_count)
    tokens = tokenizer.convert_ids_to_tokens(range(count))
    is_special[:count] = [token is None or bool(RESERVED_TOKEN.fullmatch(token)) for token in tokens]
    special_added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    is_special[[i for i in {*tokenizer.all_special_ids, *special_added} if i < row_count]] = True
    return is_special

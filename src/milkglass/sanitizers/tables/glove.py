"""Read a GloVe text file: a line a word, `word float float ...`, separated by single blanks.

Words keep the file's order, which is that of frequency in the published files. Entries that our splitting can't find in
a text (punctuation, "new york", "<unk>") are left out, and a second entry of a word as well. A first line of two whole
numbers (word2vec's) is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from milkglass.errors import BadTable
from milkglass.sanitizers.tables.table import Vectors, WordVectors
from milkglass.sanitizers.tables.words import is_word

ROWS = 4096  # rows held as text at a time
LINE = 1 << 16  # bytes of a line


def read_glove(path: Path) -> WordVectors:
    """Raises BadTable, naming the line, for a file of another format."""
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
                raise BadTable(f"line {number} of {path.name} has {len(values)} numbers, the first {width}", HINT)
            if len(values) > width:  # a word with blanks in it
                continue
            if is_word(word) and word not in words:
                words[word] = None
                pending.append(" ".join(values))
                if len(pending) == ROWS:
                    flush()
        flush()
    except UnicodeDecodeError:
        raise BadTable(f"{path.name} is not UTF-8 text", HINT) from None
    if not blocks:
        raise BadTable(f"{path.name} has no words", HINT)
    return WordVectors(tuple(words), np.concatenate(blocks), name=path.name)


HINT = "give a GloVe text file: a word and its numbers on each line"


def _lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        number = 0
        while line := file.readline(LINE):
            number += 1
            if len(line) == LINE:
                raise BadTable(f"line {number} of {path.name} is longer than {LINE} characters", HINT)
            word, *values = line.rstrip("\r\n").rstrip(" ").split(" ")
            if number == 1 and len(values) == 1 and word.isdigit() and values[0].isdigit():
                continue
            if not values:
                raise BadTable(f"line {number} of {path.name} has no numbers", HINT)
            yield number, word, values


def _floats(rows: list[str], width: int, path: Path) -> Vectors:
    try:
        result = np.array([row.split(" ") for row in rows], np.float32)
    except ValueError:
        raise BadTable(f"{path.name} has an entry that is not a number", HINT) from None
    return result.reshape(-1, width)

"""Finds the delimiter of a table from its first rows.

A delimiter gives every first row, the header too, the same number of cells, at least two. If several do, or none does
because a row is broken, the header decides, by the names of columns that the caller knows. csv.Sniffer is not used: it
counts characters of the text as well, and takes letters for delimiters.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection
from itertools import islice
from pathlib import Path

from milkglass.errors import UsageError
from milkglass.rows.encoding import UTF8

NAMES = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
FIRST, ROWS = 1 << 16, 20  # characters and rows that are read


def delimiter_named(name: str) -> str:
    """Returns a delimiter, given it or its name. Raises UsageError if it is not one sign."""
    result = NAMES.get(name, "\t" if name == "\\t" else name)
    if len(result) != 1 or result in '"\r\n' or result.isalnum():
        raise UsageError(
            f"the delimiter {name!r} is not one sign", f"give a sign such as ';', or one of {', '.join(NAMES)}"
        )
    return result


def delimiter_of(path: Path, known: Collection[str]) -> str:
    """Returns the delimiter of a .csv or .tsv file. If the rows do not tell, the file's name decides.

    Text that is not UTF-8 is reported by whoever reads it.

    Args:
        known: names of columns that the caller looks for.
    """
    own = "\t" if path.suffix.lower() == ".tsv" else ","
    signs = [own, *(sign for sign in NAMES.values() if sign != own)]
    rows = {sign: _first_rows(path, sign) for sign in signs}
    even = [sign for sign in signs if len({len(cells) for cells in rows[sign]}) == 1 and len(rows[sign][0]) > 1]

    def named(sign: str) -> int:
        """Returns how many known columns the header has with this delimiter."""
        return len({cell.strip() for cell in rows[sign][0]} & set(known)) if rows[sign] else 0

    return max(even or signs, key=named)  # the first of equals: the file's own


def _first_rows(path: Path, sign: str) -> list[list[str]]:
    """Returns complete first rows, or none if the quotes do not fit this delimiter."""
    with path.open(encoding=UTF8, errors="replace", newline="") as file:
        head = file.read(FIRST)
        cut = bool(file.read(1))
    rows: list[list[str]] = []
    text = io.StringIO(head, newline="")
    plain = quotes_are_text(path, sign)
    reader = csv.reader(text, delimiter=sign, quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL)
    try:
        for cells in islice(reader, ROWS + 1):
            rows += [cells] if cells else []
    except csv.Error:
        return rows[:ROWS]
    return rows[:-1][:ROWS] if cut and len(rows) > 1 else rows[:ROWS]  # the last one may be half a row


def quotes_are_text(path: Path, sign: str) -> bool:
    """Returns whether a quotation mark is part of the text, as in the TSV that GLUE writes."""
    return path.suffix.lower() == ".tsv" and sign == "\t"

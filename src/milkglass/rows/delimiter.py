"""Which sign stands between the cells of a table, by its first rows.

A sign is one that gives every first row, the header too, the same number of cells, two at least. Where several do, or
none does because a row is broken, the header decides: by the names of columns that the caller knows. csv.Sniffer
counts signs of the text as well, and takes letters for delimiters.
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
FIRST, ROWS = 1 << 16, 20  # characters and rows that are looked at


def delimiter_named(name: str) -> str:
    """A sign, or its name. Raises UsageError."""
    result = NAMES.get(name, "\t" if name == "\\t" else name)
    if len(result) != 1 or result in '"\r\n' or result.isalnum():
        raise UsageError(
            f"the delimiter {name!r} is not one sign", f"give a sign such as ';', or one of {', '.join(NAMES)}"
        )
    return result


def delimiter_of(path: Path, known: Collection[str]) -> str:
    """The delimiter of a .csv or .tsv file. known: names of columns that the caller looks for. Where nothing tells, it
    is what the file's name says. Text that is not UTF-8 is reported by whoever reads it."""
    own = "\t" if path.suffix.lower() == ".tsv" else ","
    signs = [own, *(sign for sign in NAMES.values() if sign != own)]
    rows = {sign: _first_rows(path, sign) for sign in signs}
    even = [sign for sign in signs if len({len(cells) for cells in rows[sign]}) == 1 and len(rows[sign][0]) > 1]

    def named(sign: str) -> int:
        """How many known columns the header has, read in this way."""
        return len({cell.strip() for cell in rows[sign][0]} & set(known)) if rows[sign] else 0

    return max(even or signs, key=named)  # the first of equals: the file's own


def _first_rows(path: Path, sign: str) -> list[list[str]]:
    """Rows that are whole; none where the quotes do not fit this sign."""
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
    """Whether a quotation mark is part of the text, as in the TSV that GLUE writes."""
    return path.suffix.lower() == ".tsv" and sign == "\t"

"""Where a row is and what its columns are, for messages.

A message names the file, the line and the column, and never a cell's content: it may be private. The first line of a
file without a header is a row of text. It is taken as a header, and shown whole, where one of its cells is a column
that the user or the program looks for, however it is written ("Customer said" for customer_said): a row of text that
holds that very word as a cell is not to be expected. In any other first line a cell with a blank, such as "my arm
hurts", may be text. Of those only the single words that look like names are shown, and the rest is counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from milkglass.errors import CodecError, EmptyText
from milkglass.unique_keys import RepeatedKey

SHOWN = 20  # column names in a message
FIRST = 3  # places in a message

WIDEST = 64  # characters of a column's name in a message
USUAL = frozenset({"text", "sentence", "label"})  # columns that are looked for in any file

_NAME = re.compile(r"[A-Za-z_#][\w#.-]{0,31}", re.ASCII)
_BETWEEN = re.compile(r"[\W_]+")

NAMING = "--text-column names the column of texts (in Python: DataFile(path, text=NAME))"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a row: "line 7 of dev.tsv".

    Attributes:
        file: The file's name.
        number: From 1.
        noun: What a row is called.
    """

    file: str
    number: int
    noun: str = "line"

    def __str__(self) -> str:
        return f"{self.noun} {self.number} of {self.file}"


Row = Mapping[str, Any]
Rows = Iterator[tuple[Place, Row]]


def listed(places: Sequence[Place]) -> str:
    """Write the places of one file as "line 7", "lines 7, 9 and 12" or "lines 7, 9, 12 and 4 more"."""
    first = [str(one.number) for one in places[:FIRST]]
    more = len(places) - len(first)
    if len(places) == 1:
        return f"{places[0].noun} {first[0]}"
    nouns = "entries" if places[0].noun == "entry" else f"{places[0].noun}s"
    last = f"{more:,} more" if more else first.pop()
    return f"{nouns} {', '.join(first)} and {last}"


def require_columns(file: str, names: Sequence[str], needed: Sequence[str], texts: Sequence[str] = ()) -> None:
    """Raise CodecError for a header that lacks a column or has one twice. texts: columns of which one must be there."""
    if texts and not {*texts} & {*names}:
        raise CodecError(
            f"the header of {file} names no column {' or '.join(texts[:2])}",
            f"{columns_there(names, (*needed, *texts))}; {NAMING}",
        )
    if lost := [name for name in needed if name not in names]:
        raise CodecError(f"the header of {file} names no column {lost[0]}", columns_there(names, needed))
    require_unique(file, names)


def require_unique(file: str, names: Sequence[str]) -> None:
    """Raise CodecError for a header that names a column twice: readers differ in which of the two they take.

    Columns without a name are not read.
    """
    for place, name in enumerate(names, 1):
        if name.strip() and (first := names.index(name) + 1) < place:
            twice = f"names the column {shown_name(name)} twice, as column {first} and as column {place}"
            raise CodecError(f"the header of {file} {twice}", "rename one of them")


def repeated(place: Place | str, error: RepeatedKey) -> CodecError:
    """The error for a JSON object with a key twice: readers differ in which of the two they take."""
    return CodecError(f"{place} has the key {shown_name(error.key)} twice", "rename one of them")


def columns_there(names: Collection[str], known: Collection[str] = ()) -> str:
    """Write "the columns there are: id, customer said". Names that may be text are counted and not shown (see above).

    Args:
        names: The columns.
        known: Columns that are looked for, beside the USUAL ones.
    """
    looked_for = {_plain(name) for name in (*known, *USUAL)} - {""}
    header = any(_plain(name) in looked_for for name in names)
    shown = [shown_name(name) for name in names if name.strip() and (header or _NAME.fullmatch(name))]
    hidden = len(names) - len(shown[:SHOWN])
    if len(names) == 1 and not shown:
        return "its first line is one cell: --delimiter names the sign between cells, or leave it out"
    if not shown:
        return f"its first line has {hidden} cells and looks like no header: add one that names the columns"
    if not hidden:
        return f"the columns there are: {', '.join(shown)}"
    why = "" if header else ", not shown here: a first line with blanks in its cells may be text"
    return f"the columns there are: {', '.join(shown[:SHOWN])} and {hidden} more{why}"


def _plain(name: str) -> str:
    """Return a name as names are compared: in small letters, without what stands between words."""
    return _BETWEEN.sub("", name).casefold()


def shown_name(name: str) -> str:
    """A name in a message: printable, on one line, of bounded length."""
    line = "".join(one if one.isprintable() else "\ufffd" for one in name)
    return line if len(line) <= WIDEST else f"{line[:WIDEST]}..."


def missing(cell: Any) -> bool:
    """Whether a cell holds nothing: null, NaN as a number, or no more than blanks. The text "nan" is a text."""
    if isinstance(cell, str):
        return not cell.strip()
    return cell is None or (isinstance(cell, float | Decimal) and math.isnan(cell))


def text_of(place: Place, row: Row, column: str) -> str:
    """A cell that must hold text. Raises CodecError, EmptyText."""
    if column not in row:
        raise CodecError(f"{place} has no {column}", columns_there(list(row), (column,)))
    value = row[column]
    if missing(value):
        raise EmptyText(f"{place} has an empty {column}", "fill it")
    if not isinstance(value, str):
        raise CodecError(f"{place} has a {column} that is not a string", "give a string")
    return value

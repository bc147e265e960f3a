"""Where a row is and what its columns are, for messages.

A message names the file, the line and the column, and never a cell's content: it may be private. Names of columns are
shown only where they look like names, since the first line of a file without a header is text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milkglass.errors import CodecError, EmptyText

SHOWN = 20  # column names in a message
FIRST = 3  # places in a message

_NAME = re.compile(r"[A-Za-z_#][\w#.-]{0,31}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row is: "line 7 of dev.tsv".

    Attributes:
        number: from 1.
    """

    file: str
    number: int
    noun: str = "line"

    def __str__(self) -> str:
        return f"{self.noun} {self.number} of {self.file}"


Row = Mapping[str, Any]
Rows = Iterator[tuple[Place, Row]]


def listed(places: Sequence[Place]) -> str:
    """ "line 7", "lines 7, 9 and 12", "lines 7, 9, 12 and 4 more", of one file."""
    first = [str(one.number) for one in places[:FIRST]]
    more = len(places) - len(first)
    if len(places) == 1:
        return f"{places[0].noun} {first[0]}"
    nouns = "entries" if places[0].noun == "entry" else f"{places[0].noun}s"
    last = f"{more:,} more" if more else first.pop()
    return f"{nouns} {', '.join(first)} and {last}"


def require_columns(file: str, names: Sequence[str], needed: Sequence[str], texts: Sequence[str] = ()) -> None:
    """texts: columns of which one must be there. Raises CodecError for a header that lacks a column or has one
    twice."""
    if texts and not {*texts} & {*names}:
        raise CodecError(
            f"the header of {file} names no column {' or '.join(texts[:2])}",
            f"{columns_there(names)}; --text-column names the column of texts",
        )
    if lost := [name for name in needed if name not in names]:
        raise CodecError(f"the header of {file} names no column {lost[0]}", columns_there(names, needed))
    if twice := [name for name in needed if names.count(name) > 1]:
        raise CodecError(f"the header of {file} names the column {twice[0]} twice", "rename one of them")


def columns_there(names: Collection[str], known: Collection[str] = ()) -> str:
    """ "the columns there are: id, text". What does not look like a name is counted and not shown."""
    shown = [name for name in names if name in known or _NAME.fullmatch(name)]
    hidden = len(names) - len(shown[:SHOWN])
    if len(names) == 1 and not shown:
        return "its first line is one cell: --delimiter names the sign between cells, or leave it out"
    if not shown:
        return f"its first line has {hidden} cells and looks like no header: add one that names the columns"
    return f"the columns there are: {', '.join(shown[:SHOWN])}" + (f" and {hidden} more" if hidden else "")


def text_of(place: Place, row: Row, column: str) -> str:
    """A cell that must hold text. Raises CodecError, EmptyText."""
    if column not in row:
        raise CodecError(f"{place} has no {column}", columns_there(list(row)))
    value = row[column]
    if not isinstance(value, str):
        raise CodecError(f"{place} has a {column} that is not a string", "give a string")
    if not value.strip():
        raise EmptyText(f"{place} has an empty {column}", "leave the row out")
    return value

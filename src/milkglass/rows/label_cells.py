"""Reads a cell of labels as the label's name, by one rule for CSV, TSV, JSON Lines, JSON lists and Parquet.

If each cell of a column is a whole number or the text of one, as pandas writes whole numbers with gaps, the names are
whole numbers: 3, 3.0 and "3.0" are "3", and "nan" or "None" is a missing label. If some numbers of a column have a
fraction, "nan" is missing too; these are numbers of a regression (`dataset.require_classes`). In every other column a
text is a name unchanged, and a float stays one: "3.0". A truth value, or the text of one, is "true" or "false" in any
column, since JSON, Parquet and CSV write it in three ways.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from milkglass.errors import CodecError, EmptyText
from milkglass.rows.label_scale import score_of
from milkglass.rows.place import Place, missing

GAPS = frozenset({"nan", "none", "null", "na", "n/a", "<na>", "nat"})  # missing, in a column of numbers
EXACT = 1 << 53  # above it a float stands for no single whole number
_WHOLE = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class LabelCells:
    """How the cells of one column of labels are read.

    Attributes:
        numbers: whether each cell is a whole number, or missing.
        fractions: whether each cell is a number, or missing, and some have a fraction.
        scores: whether the cells are the numbers of a regression.
    """

    numbers: bool = False
    fractions: bool = False
    scores: bool = False

    @classmethod
    def of(cls, cells: Iterable[Any]) -> LabelCells:
        """Decides how cells are read from all cells of the column."""
        some = fractions = False
        for cell in cells:
            if missing(cell) or _is_gap(cell):
                continue
            if has_fraction(cell):
                fractions = True
            elif isinstance(cell, bool) or (_whole(cell) is None and not _is_digits(cell)):
                return cls()
            some = True
        return cls(numbers=some and not fractions, fractions=fractions)

    def read(self, place: Place, column: str, cell: Any) -> str:
        """Returns the label's name, or a regression's score as text. Raises EmptyText if it is missing, CodecError."""
        if missing(cell) or ((self.numbers or self.fractions or self.scores) and _is_gap(cell)):
            raise EmptyText(f"{place} has an empty {column}", "fill it")
        if self.scores:
            return repr(score_of(str(place), cell))
        if isinstance(cell, bool) or (isinstance(cell, str) and cell.strip().lower() in ("true", "false")):
            return str(cell).strip().lower()
        whole = _whole(cell)
        if isinstance(cell, str):
            return cell.strip() if whole is None or not self.numbers else str(whole)
        if isinstance(cell, int):
            return str(cell)
        if whole is None and not has_fraction(cell):
            raise CodecError(
                f"{place} has a {column} that is neither a name nor a number",
                "give a name such as billing, or a whole number",
            )
        return str(whole) if self.numbers else str(float(cell))


def _whole(cell: Any) -> int | None:
    """Returns the whole number that a float, a decimal or the text of a float stands for, or None."""
    if isinstance(cell, str) and _FLOAT.fullmatch(cell.strip()):
        cell = float(cell)
    if isinstance(cell, Decimal) and cell.is_finite():
        cell = float(cell)
    if not isinstance(cell, float) or not math.isfinite(cell) or abs(cell) >= EXACT or not cell.is_integer():
        return None
    return int(cell)


def has_fraction(cell: Any) -> bool:
    """Returns whether a cell, or a label's name, is a number that is not whole."""
    if isinstance(cell, str):
        cell = float(cell) if _NUMBER.fullmatch(cell.strip()) else None
    if isinstance(cell, Decimal):
        cell = float(cell)
    return isinstance(cell, float) and math.isfinite(cell) and not cell.is_integer()


def is_number(name: str) -> bool:
    return _NUMBER.fullmatch(name) is not None


def _is_digits(cell: Any) -> bool:
    return isinstance(cell, int) or (isinstance(cell, str) and _WHOLE.fullmatch(cell.strip()) is not None)


def _is_gap(cell: Any) -> bool:
    return isinstance(cell, str) and cell.strip().casefold() in GAPS

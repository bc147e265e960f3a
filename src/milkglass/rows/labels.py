"""Reads labels: names of classes, and the scores of a regression.

A cell is read by one rule for CSV, TSV, JSON Lines, JSON lists and Parquet. If each cell of a column is a whole number
or the text of one, as pandas writes whole numbers with gaps, the names are whole numbers: 3, 3.0 and "3.0" are "3", and
"nan" or "None" is a missing label. If some numbers of a column have a fraction, "nan" is missing too; these are numbers
of a regression (`examples.require_classes`). In every other column a text is a name unchanged, and a float stays one:
"3.0". A truth value, or the text of one, is "true" or "false" in any column, since JSON, Parquet and CSV write it in
three ways.

Scores are standardised: the server sees mean 0 and spread 1.

    sent = (score - mean) / spread,  read = mean + spread * answer

The mean and spread of the training data stay sealed in the key, so the server learns neither the unit nor the range of
the scores. It learns their order, the shape of their distribution, and which row has which: labels are not scrambled,
and a score tells more of a row than a class does. Standardised scores also train in fewer steps, since a new head
starts near 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from milkglass.errors import CodecError, EmptyText
from milkglass.rows.place import Place, is_missing

MISSING_WORDS = frozenset({"nan", "none", "null", "na", "n/a", "<na>", "nat"})  # missing, in a column of numbers
MAX_EXACT_NUMBER = 1 << 53  # above it a float stands for no single whole number
_WHOLE_PATTERN = re.compile(r"[+-]?[0-9]+")
_FLOAT_PATTERN = re.compile(r"[+-]?[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?")
_NUMBER_PATTERN = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class LabelCells:
    """Reads the cells of one column of labels, by one rule for all of them.

    Attributes:
        are_whole: whether each cell is a whole number, or missing.
        have_fractions: whether each cell is a number, or missing, and some have a fraction.
        are_scores: whether the cells are the numbers of a regression.
    """

    are_whole: bool = False
    have_fractions: bool = False
    are_scores: bool = False

    @classmethod
    def of(cls, cells: Iterable[Any]) -> LabelCells:
        """Decides by all cells of a column how each of them is read."""
        has_cells = have_fractions = False
        for cell in cells:
            if is_missing(cell) or _is_missing_word(cell):
                continue
            if has_fraction(cell):
                have_fractions = True
            elif isinstance(cell, bool) or (_whole_number(cell) is None and not _is_integer(cell)):
                return cls()
            has_cells = True
        return cls(are_whole=has_cells and not have_fractions, have_fractions=have_fractions)

    def read(self, place: Place, column: str, cell: Any) -> str:
        """Returns the label's name, or a regression's score as text.

        Args:
            place: the row's place, for messages.
            column: the column's name, for messages.
            cell: the cell of the row.

        Raises:
            EmptyText: the label is missing.
            CodecError: the label is neither a name nor a number, or a score is not a number.
        """
        if is_missing(cell) or ((self.are_whole or self.have_fractions or self.are_scores) and _is_missing_word(cell)):
            raise EmptyText(f"{place} has an empty {column}", "fill it")
        if self.are_scores:
            return repr(read_score(str(place), cell))
        if isinstance(cell, bool) or (isinstance(cell, str) and cell.strip().lower() in ("true", "false")):
            return str(cell).strip().lower()
        number = _whole_number(cell)
        if isinstance(cell, str):
            return cell.strip() if number is None or not self.are_whole else str(number)
        if isinstance(cell, int):
            return str(cell)
        if number is None and not has_fraction(cell):
            raise CodecError(
                f"{place} has a {column} that is neither a name nor a number",
                "give a name such as billing, or a whole number",
            )
        return str(number) if self.are_whole else str(float(cell))


def _whole_number(cell: Any) -> int | None:
    """Returns the whole number that a float, a decimal or the text of a float stands for, or None."""
    if isinstance(cell, str) and _FLOAT_PATTERN.fullmatch(cell.strip()):
        cell = float(cell)
    if isinstance(cell, Decimal) and cell.is_finite():
        cell = float(cell)
    if not isinstance(cell, float) or not math.isfinite(cell) or abs(cell) >= MAX_EXACT_NUMBER or not cell.is_integer():
        return None
    return int(cell)


def has_fraction(cell: Any) -> bool:
    """Returns whether a cell, or a label's name, is a number that is not whole."""
    if isinstance(cell, str):
        cell = float(cell) if _NUMBER_PATTERN.fullmatch(cell.strip()) else None
    if isinstance(cell, Decimal):
        cell = float(cell)
    return isinstance(cell, float) and math.isfinite(cell) and not cell.is_integer()


def is_number(name: str) -> bool:
    """Returns whether a label's name is a number."""
    return _NUMBER_PATTERN.fullmatch(name) is not None


def _is_integer(cell: Any) -> bool:
    """Returns whether a cell is a whole number, or the text of one."""
    return isinstance(cell, int) or (isinstance(cell, str) and _WHOLE_PATTERN.fullmatch(cell.strip()) is not None)


def _is_missing_word(cell: Any) -> bool:
    """Returns whether a cell is a word for a missing number, such as "nan"."""
    return isinstance(cell, str) and cell.strip().casefold() in MISSING_WORDS


# --- scores -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Scale:
    """Standardises scores.

    Attributes:
        mean: the mean of the scores, in the user's unit.
        spread: the standard deviation of the scores, above 0, in the user's unit.
    """

    mean: float
    spread: float

    @classmethod
    def of(cls, scores: Iterable[float]) -> Scale:
        """Returns the scale of scores in one pass (Welford's updates). Raises CodecError if they do not differ."""
        count, mean, squared_deviations = 0, 0.0, 0.0
        for score in scores:
            count += 1
            step = score - mean
            mean += step / count
            squared_deviations += step * (score - mean)
        spread = math.sqrt(squared_deviations / count) if count else 0.0
        if not math.isfinite(spread) or spread <= 1e-9 * max(1.0, abs(mean)):
            raise CodecError(f"the {count} scores do not differ, or are too large", "a regression needs two at least")
        return cls(mean, spread)

    @classmethod
    def from_document(cls, document: Any) -> Scale | None:
        """Returns the scale that the method `document` wrote, or None for None."""
        return None if document is None else cls(float(document[0]), float(document[1]))

    def document(self) -> list[float]:
        """Returns the scale as JSON-like data, which `from_document` reads."""
        return [self.mean, self.spread]

    def standardise(self, score: float) -> float:
        """Returns a score as it is sent to the server."""
        return (score - self.mean) / self.spread

    def restore(self, answer: float) -> float:
        """Returns a standardised score of the server in the user's unit."""
        return self.mean + self.spread * answer

    def suits(self, other: Scale) -> bool:
        """Returns whether data of the scale `other` may be sent by this one.

        A second fine-tune then gets scores like those of the first. This holds if the sent mean is within 1 of 0, and
        the sent spread between 1/2 and 2.
        """
        return abs(self.standardise(other.mean)) <= 1 and 0.5 <= other.spread / self.spread <= 2


def read_score(row_name: str, cell: Any) -> float:
    """Reads the score in a cell.

    Args:
        row_name: the row's place, for messages.
        cell: a number, or the text of one.

    Raises:
        CodecError: the cell is not a finite number.
    """
    try:
        score = math.nan if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise CodecError(f"{row_name} has a label that is not a number", "a regression needs one in every row")
    return score

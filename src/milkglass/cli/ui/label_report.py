"""Formats the figures of a classification: accuracy beside the commonest class's share, and confusions."""

from __future__ import annotations

import math
from typing import Any

from milkglass.cli.ui.terminal import cell_text, table_text
from milkglass.errors import first_few
from milkglass.metrics.confusion import ConfusionMatrix
from milkglass.metrics.percent import percent

MAX_CLASSES = 8  # with more classes, the table does not show which class each was taken for
MAX_MISSED_SHOWN = 3  # classes that a warning names
NOT_BETTER_NOTE = (
    "not shown to be better than naming {name} for every text, by its interval: more rows, more epochs or another rate "
    "may help"
)
UNEVEN_NOTE = (
    "the classes are uneven: {name} has {share:.0f} of 100 rows, and no row of {missed} was recognised; more rows of "
    "these, or fewer of {name}, may help"
)
UNEVEN_SHARE = 0.8  # share from which the commonest of 2 classes dominates; of more classes, twice an even share


def report_lines(confusion: ConfusionMatrix) -> list[str]:
    """Returns the report as lines of text, the last of which is a table with a row for each class."""
    accuracy, (commonest, share) = confusion.accuracy(), confusion.commonest_class
    lines = [
        f"accuracy {accuracy} of {confusion.text_count:,} held-out rows; naming {cell_text(commonest)} for all: "
        f"{100 * share:.1f} %"
    ]
    if accuracy.low <= share:
        lines.append(NOT_BETTER_NOTE.format(name=cell_text(commonest)))
    lines += _uneven_warning(confusion)
    is_wide = len(confusion.names) > MAX_CLASSES
    columns = () if is_wide else [f"as {cell_text(name)}" for name in confusion.names]
    head = ("class", "rows", "precision", "recall", *columns)
    rows = [head]
    for number, name in enumerate(confusion.names):
        counts = () if is_wide else [str(count) for count in confusion.counts[number].tolist()]
        shares = (percent(by_class[number], decimals=1) for by_class in (confusion.precision, confusion.recall))
        rows.append((cell_text(name), str(int(confusion.counts[number].sum())), *shares, *counts))
    return [*lines, table_text(rows)]


def _uneven_warning(confusion: ConfusionMatrix) -> list[str]:
    """Returns a warning if the commonest class dominates and no row of some other class was recognised, or no line."""
    name, share = confusion.commonest_class
    recalls = zip(confusion.names, confusion.recall.tolist(), strict=True)
    missed_names = [label for label, recall in recalls if recall == 0 and label != name]
    if not missed_names or share < min(UNEVEN_SHARE, 2 / len(confusion.names)):
        return []
    listing = first_few([*map(cell_text, missed_names)], MAX_MISSED_SHOWN)
    return [UNEVEN_NOTE.format(name=cell_text(name), share=100 * share, missed=listing)]


def report_document(confusion: ConfusionMatrix) -> dict[str, Any]:
    """Returns the report as a JSON document. `taken_for` says as which classes the rows of a class were classified."""
    accuracy, (name, share) = confusion.accuracy(), confusion.commonest_class
    shares = zip(
        confusion.names, confusion.precision.tolist(), confusion.recall.tolist(), confusion.counts.tolist(), strict=True
    )
    classes = {
        label: {
            "precision": _number_or_none(precision),
            "recall": _number_or_none(recall),
            "taken_for": dict(zip(confusion.names, row, strict=True)),
        }
        for label, precision, recall, row in shares
    }
    return {
        "rows": confusion.text_count, "accuracy": accuracy.value, "interval": [accuracy.low, accuracy.high],
        "commonest": {"label": name, "share": share}, "classes": classes,
    }  # fmt: skip


def _number_or_none(share: float) -> float | None:
    """Returns a share, or None for NaN, which JSON does not have."""
    return None if math.isnan(share) else share

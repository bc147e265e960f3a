"""Formats the figures of a classification: accuracy beside the commonest class's share, and confusions."""

from __future__ import annotations

import math
from typing import Any

from milkglass.cli.ui.terminal import cell, percent, table
from milkglass.metrics.confusion import Confusion

MAX_CLASSES = 8  # with more classes, confusions are not shown
SAME = (
    "not shown to be better than naming {name} for every text, by its interval: more rows, more epochs or another rate "
    "may help"
)
UNEVEN = (
    "the classes are uneven: {name} has {share:.0f} of 100 rows, and no row of {missed} was recognised; more rows of "
    "these, or fewer of {name}, may help"
)
UNEVEN_SHARE = 0.8  # share from which the commonest class dominates; with many classes, twice an even share


def report_lines(confusion: Confusion) -> list[str]:
    """Returns the report as lines of text."""
    accuracy, (name, share) = confusion.accuracy(), confusion.commonest
    lines = [
        f"accuracy {accuracy} of {confusion.rows:,} held-out rows; naming {cell(name)} for all: {100 * share:.1f} %"
    ]
    if accuracy.low <= share:
        lines.append(SAME.format(name=cell(name)))
    lines += _uneven(confusion)
    is_wide = len(confusion.names) > MAX_CLASSES
    columns = () if is_wide else [f"as {cell(one)}" for one in confusion.names]
    head = ("class", "rows", "precision", "recall", *columns)
    rows = [head]
    for number, name in enumerate(confusion.names):
        counts = () if is_wide else [str(count) for count in confusion.counts[number].tolist()]
        shares = (percent(confusion.precision[number]), percent(confusion.recall[number]))
        rows.append((cell(name), str(int(confusion.counts[number].sum())), *shares, *counts))
    return [*lines, table(rows)]


def _uneven(confusion: Confusion) -> list[str]:
    """Returns a warning if the commonest class dominates and no row of some other class was recognised."""
    name, share = confusion.commonest
    recalls = zip(confusion.names, confusion.recall.tolist(), strict=True)
    missed = [label for label, recall in recalls if recall == 0 and label != name]
    if not missed or share < min(UNEVEN_SHARE, 2 / len(confusion.names)):
        return []
    listing = ", ".join(map(cell, missed[:3]))
    listing += f" and {len(missed) - 3} more" if len(missed) > 3 else ""
    return [UNEVEN.format(name=cell(name), share=100 * share, missed=listing)]


def document(confusion: Confusion) -> dict[str, Any]:
    """Returns the report as JSON."""
    accuracy, (name, share) = confusion.accuracy(), confusion.commonest
    shares = zip(
        confusion.names, confusion.precision.tolist(), confusion.recall.tolist(), confusion.counts.tolist(), strict=True
    )
    classes = {
        label: {
            "precision": _number(precision),
            "recall": _number(recall),
            "taken_for": dict(zip(confusion.names, row, strict=True)),
        }
        for label, precision, recall, row in shares
    }
    return {
        "rows": confusion.rows, "accuracy": accuracy.value, "interval": [accuracy.low, accuracy.high],
        "commonest": {"label": name, "share": share}, "classes": classes,
    }  # fmt: skip


def _number(share: float) -> float | None:
    return None if math.isnan(share) else share

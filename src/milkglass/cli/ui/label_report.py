"""Prints the figures of a classification: accuracy beside the commonest class's share, and each class's confusions."""

from __future__ import annotations

import math
from typing import Any

from milkglass.cli.ui.terminal import cell, percent, table
from milkglass.metrics.confusion import Confusion

MOST = 8  # the most classes whose counts are shown
NEAR = "not better than naming {name} for every text, by its interval: more rows, more epochs or another rate may help"
UNEVEN = (
    "the classes are uneven: {name} has {share:.0f} of 100 rows, and no row of {missed} was recognised; more rows of "
    "these, or fewer of {name}, may help"
)
SHARE = 0.8  # of the rows, or twice its even part, from which on the commonest class makes the classes uneven


def report_lines(found: Confusion) -> list[str]:
    """Returns the report as lines of text."""
    accuracy, (name, least) = found.accuracy(), found.commonest
    lines = [f"accuracy {accuracy} of {found.rows:,} held-out rows; naming {cell(name)} for all: {100 * least:.1f} %"]
    if accuracy.low <= least:
        lines.append(NEAR.format(name=cell(name)))
    lines += _uneven(found)
    wide = len(found.names) > MOST
    head = ("class", "rows", "precision", "recall", *(() if wide else [f"as {cell(one)}" for one in found.names]))
    rows = [head]
    for number, name in enumerate(found.names):
        counts = () if wide else [str(one) for one in found.counts[number].tolist()]
        shares = (percent(found.precision[number]), percent(found.recall[number]))
        rows.append((cell(name), str(int(found.counts[number].sum())), *shares, *counts))
    return [*lines, table(rows)]


def _uneven(found: Confusion) -> list[str]:
    """Returns a warning if one class has most rows and no row of some rare class was recognised."""
    name, share = found.commonest
    missed = [one for one, seen in zip(found.names, found.recall.tolist(), strict=True) if seen == 0 and one != name]
    if not missed or share < min(SHARE, 2 / len(found.names)):
        return []
    shown = ", ".join(cell(one) for one in missed[:3]) + (f" and {len(missed) - 3} more" if len(missed) > 3 else "")
    return [UNEVEN.format(name=cell(name), share=100 * share, missed=shown)]


def document(found: Confusion) -> dict[str, Any]:
    """Returns the report as JSON."""
    accuracy, (name, least) = found.accuracy(), found.commonest
    shares = zip(found.names, found.precision.tolist(), found.recall.tolist(), found.counts.tolist(), strict=True)
    classes = {
        one: {
            "precision": _number(right),
            "recall": _number(seen),
            "taken_for": dict(zip(found.names, row, strict=True)),
        }
        for one, right, seen, row in shares
    }
    return {
        "rows": found.rows, "accuracy": accuracy.value, "interval": [accuracy.low, accuracy.high],
        "commonest": {"label": name, "share": least}, "classes": classes,
    }  # fmt: skip


def _number(share: float) -> float | None:
    return None if math.isnan(share) else share

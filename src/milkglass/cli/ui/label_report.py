"""A classification's result as a person reads it: beside the commonest class, class by class, with what was mistaken.

Out of scope: scores of a regression; probabilities.
"""

from __future__ import annotations

import math
from typing import Any

from milkglass.cli.ui.terminal import cell, percent, table
from milkglass.metrics.confusion import Confusion

MOST = 8  # classes whose counts are shown beside each other
NEAR = "not better than naming {name} for every text, by its interval: more rows, more epochs or another rate may help"


def words(found: Confusion) -> list[str]:
    """Lines of text."""
    accuracy, (name, least) = found.accuracy(), found.commonest
    lines = [f"accuracy {accuracy} of {found.rows:,} held-out rows; naming {cell(name)} for all: {100 * least:.1f} %"]
    if accuracy.low <= least:
        lines.append(NEAR.format(name=cell(name)))
    wide = len(found.names) > MOST
    head = ("class", "rows", "precision", "recall", *(() if wide else [f"as {cell(one)}" for one in found.names]))
    rows = [head]
    for number, name in enumerate(found.names):
        counts = () if wide else [str(one) for one in found.counts[number].tolist()]
        shares = (percent(found.precision[number]), percent(found.recall[number]))
        rows.append((cell(name), str(int(found.counts[number].sum())), *shares, *counts))
    return [*lines, table(rows)]


def document(found: Confusion) -> dict[str, Any]:
    """For JSON."""
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

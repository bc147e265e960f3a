"""How a bench that measures one thing shows its result, and keeps it as a file of recipes/results."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milkglass.experiments.runs import code_version


def listed(figures: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of figures by name, each with "measured" and more (milkglass/experiments/record.py)."""
    return [
        {"measure": name, "value": one["measured"]} | {word: value for word, value in one.items() if word != "measured"}
        for name, one in figures.items()
    ]


def show(
    recipe: str, about: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]], started: float, out: Path | None
) -> None:
    """Print a result as JSON, and write it where a place is given.

    Args:
        recipe: The bench's name, which is that of its file of results.
        about: What was measured: the paper, and the settings.
        figures: By name.
        started: When, by `time.monotonic`.
        out: The file.
    """
    seconds = round(time.monotonic() - started)
    text = json.dumps(
        {"recipe": recipe, **about, "made": code_version(), "seconds": seconds, "figures": listed(figures)}, indent=1
    )
    print(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")

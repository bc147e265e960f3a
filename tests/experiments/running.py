"""A recipe run as `milkglass reproduce` runs it, and its table on stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milkglass.experiments.record import read_records
from milkglass.experiments.report import table
from milkglass.experiments.reproduce import reproduce


def run(path: Path, data: Path, out: Path, at_once: int, quick: bool = False) -> int:
    result = reproduce(path, data, out, quick, at_once, lambda words: None)
    print(table.terminal_text(table.result_table(json.loads(result.read_text("utf-8")))))
    return 0


def figures(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every number of a result by its name: "measured", and what the recipe says of it."""
    found: dict[str, dict[str, Any]] = {}
    for one in read_records(result):
        recipes = {"published": one.published, "asked": one.asked, "why": one.why}
        found |= {name: {"measured": value} for name, value in one.numbers.items()}
        if one.name in found:
            found[one.name] |= {word: value for word, value in recipes.items() if value not in (None, "")}
    return found

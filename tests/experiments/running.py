"""A recipe run as `milkglass reproduce` runs it, and its table on stdout."""

from __future__ import annotations

import json
from pathlib import Path

from milkglass.experiments.report import table
from milkglass.experiments.reproduce import reproduce


def run(path: Path, data: Path, out: Path, at_once: int, quick: bool = False) -> int:
    result = reproduce(path, data, out, quick, at_once, lambda words: None)
    print(table.words(table.read(json.loads(result.read_text("utf-8")))))
    return 0

"""`python -m milkglass.experiments RECIPE.toml --data FOLDER --out RUN_FOLDER`: what `milkglass reproduce` runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from milkglass.errors import MilkglassError
from milkglass.experiments.report import table
from milkglass.experiments.reproduce import reproduce


def main() -> int:
    parser = argparse.ArgumentParser(description="run a recipe; a stopped run goes on")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder that the recipe's data paths start from")
    parser.add_argument("--out", type=Path, required=True, help="the run folder")
    parser.add_argument("--quick", action="store_true", help="the recipe's [quick] settings: minutes, other figures")
    parser.add_argument("--at-once", type=int, default=2, help="variants trained side by side, sharing the cores")
    arguments = parser.parse_args()
    try:
        return run(arguments.recipe, arguments.data, arguments.out, arguments.at_once, arguments.quick)
    except MilkglassError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(path: Path, data: Path, out: Path, at_once: int, quick: bool = False) -> int:
    result = reproduce(path, data, out, quick, at_once, lambda words: print(words, file=sys.stderr, flush=True))
    print(table.words(table.read(json.loads(result.read_text("utf-8")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

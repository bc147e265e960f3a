"""`python -m milkglass.experiments RECIPE.toml --data FOLDER --out RUN_FOLDER`"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from pathlib import Path

from milkglass.errors import MilkglassError
from milkglass.experiments import recipe as recipes


def main() -> int:
    parser = argparse.ArgumentParser(description="run a recipe; a stopped run goes on")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder that the recipe's data paths start from")
    parser.add_argument("--out", type=Path, required=True, help="the run folder")
    parser.add_argument("--at-once", type=int, default=2, help="variants trained side by side, sharing the cores")
    arguments = parser.parse_args()
    try:
        return run(arguments.recipe, arguments.data, arguments.out, arguments.at_once)
    except MilkglassError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(path: Path, data: Path, out: Path, at_once: int) -> int:
    kind = tomllib.loads(path.read_text("utf-8")).get("kind")
    result = attack(path, data, out) if kind == "attacks" else train(path, data, out, at_once)
    for name, row in json.loads(result.read_text("utf-8"))["figures"].items():
        print(
            f"{name:48} {row['measured']:10.4f}   paper {row.get('published', '-')!s:8} asked {row.get('asked', '-')}"
        )
    return 0


def attack(path: Path, data: Path, out: Path) -> Path:
    from milkglass.experiments import attacks

    recipe = attacks.AttackRecipe.read(path)
    return attacks.write_result(recipe, out, attacks.measure(recipe, data, out))


def train(path: Path, data: Path, out: Path, at_once: int) -> Path:
    from milkglass.experiments import classification, generation

    recipe = recipes.Recipe.read(path)
    threads = max(1, (os.cpu_count() or 1) // at_once)
    base, variants = recipes.prepare(recipe, data, out, threads)
    statuses = recipes.train(variants, at_once)
    if recipe.kind == "classification":
        measured = classification.measure(base, variants, statuses)
    else:
        measured = generation.measure(recipe, base, variants, data)
    return recipes.write_result(recipe, out, measured)


if __name__ == "__main__":
    sys.exit(main())

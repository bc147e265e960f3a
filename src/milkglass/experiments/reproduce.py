"""Run a recipe: train or attack, measure, and write the figures with their tables. A run that was stopped goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from milkglass.errors import UsageError
from milkglass.experiments import recipe as recipes
from milkglass.experiments import table
from milkglass.experiments.settings import settings

Tell = Callable[[str], None]
TRAININGS = ("classification", "generation")


def reproduce(
    path: Path, data: Path, out: Path, quick: bool = False, at_once: int = 2, tell: Tell = lambda words: None
) -> Path:
    """RUN/NAME.json, with NAME.md and NAME.html beside it; of a quick run NAME.quick.json and so on.

    at_once: variants trained side by side, sharing the cores. Raises UsageError for a recipe, data or folder that
    cannot be, JobFailed for a training that failed.
    """
    kind = settings(path, quick).get("kind")
    if kind not in ("attacks", *TRAININGS):
        raise UsageError(f"{path.name} is of the kind {kind!r}", f"known: attacks, {', '.join(TRAININGS)}")
    if not data.is_dir():
        raise UsageError(f"there is no folder {data}", "give --data the folder that the recipe's data paths start from")
    result = (
        _attack(path, data, out, quick, tell) if kind == "attacks" else _train(path, data, out, quick, at_once, tell)
    )
    table.write(result)
    return result


def _attack(path: Path, data: Path, out: Path, quick: bool, tell: Tell) -> Path:
    from milkglass.experiments import attacks

    recipe = attacks.AttackRecipe.read(path, quick)
    return attacks.write_result(recipe, out, attacks.measure(recipe, data, out, tell))


def _train(path: Path, data: Path, out: Path, quick: bool, at_once: int, tell: Tell) -> Path:
    recipe = recipes.Recipe.read(path, quick)
    threads = max(1, (os.cpu_count() or 1) // at_once)
    base, variants = recipes.prepare(recipe, data, out, threads, tell)
    statuses = recipes.train(variants, at_once, tell)
    if recipe.kind == "classification":
        from milkglass.experiments import classification

        measured = classification.measure(base, variants, statuses)
        measured |= classification.more(recipe, variants)
    else:
        from milkglass.experiments import generation

        measured = generation.measure(recipe, base, variants, data, out, tell)
    return recipes.write_result(recipe, out, measured)

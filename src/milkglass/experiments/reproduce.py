"""Runs a recipe: trains or attacks, measures, and writes the figures with their tables. A stopped run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from milkglass.errors import UsageError
from milkglass.experiments.kinds.attacks import AttackRecipe
from milkglass.experiments.kinds.bilstm import BiLSTMRecipe
from milkglass.experiments.kinds.classification import ClassificationRecipe
from milkglass.experiments.kinds.comparison import ComparisonRecipe
from milkglass.experiments.kinds.generation import GenerationRecipe
from milkglass.experiments.kinds.gradients import GradientRecipe
from milkglass.experiments.kinds.overhead import OverheadRecipe
from milkglass.experiments.kinds.sanitized_generation import SanitizedGenerationRecipe
from milkglass.experiments.kinds.shared_training import SharedTrainingRecipe
from milkglass.experiments.kinds.symbol_generation import SymbolGenerationRecipe
from milkglass.experiments.needs import RecipeNeeds, note_usage
from milkglass.experiments.recipe import Recipe, from_entries, read_settings
from milkglass.experiments.report import table
from milkglass.experiments.runs import RunContext
from milkglass.progress import Log, no_log

# The class of each `kind` that a recipe's file names
RECIPE_CLASSES: Mapping[str, type[Recipe]] = {
    "attacks": AttackRecipe,
    "bilstm": BiLSTMRecipe,
    "overhead": OverheadRecipe,
    "classification": ClassificationRecipe,
    "generation": GenerationRecipe,
    "sanitized-generation": SanitizedGenerationRecipe,
    "symbol-generation": SymbolGenerationRecipe,
    "comparison": ComparisonRecipe,
    "gradients": GradientRecipe,
    "shared-training": SharedTrainingRecipe,
}


def reproduce(
    path: Path, data: Path, out: Path, quick: bool = False, at_once: int = 2, log: Log = no_log,
    cache: Path | None = None,
) -> Path:  # fmt: skip
    """Runs a recipe, and writes NAME.json, NAME.md and NAME.html; for a quick run NAME.quick.json and so on.

    Args:
        path: the recipe.
        data: the folder in which the recipe's data paths start; the command has checked that it exists.
        out: the run folder, where the files are written.
        quick: whether the recipe's table [quick] is applied.
        at_once: how many variants are trained side by side, sharing the cores; fewer where memory is short.
        log: receives lines for the user.
        cache: a folder for what takes longest, shared by recipes: the trained cells of comparisons, the shadows and
            models of shared training. None: the run folder.

    Returns:
        The JSON file.

    Raises:
        UsageError: the recipe, the data or a folder cannot be used, or the machine has less than the recipe needs.
        JobFailed: a training failed.
    """
    kind = read_settings(path, quick).get("kind")
    recipe_class = RECIPE_CLASSES.get(kind) if isinstance(kind, str) else None
    if recipe_class is None:
        raise UsageError(f"{path.name} is of the kind {kind!r}", f"known: {', '.join(RECIPE_CLASSES)}")
    if cache is not None and not recipe_class.is_cacheable:
        raise UsageError(f"{path.name} has nothing to share: it is of the kind {kind}", "leave out --cache")
    recipe = recipe_class.read(path, quick)
    needs = from_entries(RecipeNeeds, recipe.needs)
    needs.check(recipe.name, log)
    at_once = needs.trainings_at_once(at_once, log)
    with note_usage(out):
        result_path = recipe.reproduce(RunContext(data, out, at_once, log, cache))
    table.write_pages(result_path)
    return result_path

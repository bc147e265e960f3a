"""Run a recipe: train or attack, measure, and write the figures with their tables. A run that was stopped goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from milkglass.errors import UsageError
from milkglass.experiments.kinds.attacks import AttackRecipe
from milkglass.experiments.kinds.bilstm import BiLSTMRecipe
from milkglass.experiments.kinds.classification import ClassificationRecipe
from milkglass.experiments.kinds.comparison import Comparison
from milkglass.experiments.kinds.generation import GenerationRecipe
from milkglass.experiments.kinds.gradients import GradientRecipe
from milkglass.experiments.kinds.overhead import OverheadRecipe
from milkglass.experiments.kinds.sanitized_generation import SanitizedGeneration
from milkglass.experiments.kinds.shared_training import SharedTraining
from milkglass.experiments.kinds.symbol_generation import SymbolGeneration
from milkglass.experiments.recipe import Recipe
from milkglass.experiments.recipe_file import settings
from milkglass.experiments.report import table
from milkglass.experiments.runs import RunFolder
from milkglass.progress import Log, no_log

# By the entry `kind` of a recipe's file.
KINDS: Mapping[str, type[Recipe]] = {
    "attacks": AttackRecipe,
    "bilstm": BiLSTMRecipe,
    "overhead": OverheadRecipe,
    "classification": ClassificationRecipe,
    "generation": GenerationRecipe,
    "sanitized-generation": SanitizedGeneration,
    "symbol-generation": SymbolGeneration,
    "comparison": Comparison,
    "gradients": GradientRecipe,
    "shared-training": SharedTraining,
}


def reproduce(
    path: Path, data: Path, out: Path, quick: bool = False, at_once: int = 2, progress: Log = no_log,
    cache: Path | None = None,
) -> Path:  # fmt: skip
    """RUN/NAME.json, with NAME.md and NAME.html beside it; of a quick run NAME.quick.json and so on.

    Args:
        path: of the recipe.
        data: the folder that the recipe's data paths start from; the command has checked that it is there.
        out: the run folder.
        quick: whether the recipe's table [quick] is laid over it.
        at_once: variants trained side by side, sharing the cores.
        cache: a folder for what takes longest, for several recipes: the trained cells of comparisons, the shadows and
            models of shared training. None: in the run folder.

    Raises:
        UsageError: a recipe, data or folder that cannot be.
        JobFailed: a training that failed.
    """
    name = settings(path, quick).get("kind")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UsageError(f"{path.name} is of the kind {name!r}", f"known: {', '.join(KINDS)}")
    if cache is not None and not kind.cached:
        raise UsageError(f"{path.name} has nothing to share: it is of the kind {name}", "leave out --cache")
    result = kind.read(path, quick).reproduce(RunFolder(data, out, at_once, progress, cache))
    table.write(result)
    return result

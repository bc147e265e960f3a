"""Run a recipe: train or attack, measure, and write the figures with their tables. A run that was stopped goes on."""

from __future__ import annotations

from pathlib import Path

from milkglass.errors import UsageError
from milkglass.experiments import runs as recipes
from milkglass.experiments.recipe_file import settings
from milkglass.experiments.report import table
from milkglass.progress import Log, no_log
from milkglass.system import cores

TRAININGS = ("classification", "generation")
CACHED = ("comparison", "gradients", "shared-training")


def reproduce(
    path: Path,
    data: Path,
    out: Path,
    quick: bool = False,
    at_once: int = 2,
    progress: Log = no_log,
    cache: Path | None = None,
) -> Path:
    """RUN/NAME.json, with NAME.md and NAME.html beside it; of a quick run NAME.quick.json and so on.

    at_once: variants trained side by side, sharing the cores. cache: where what takes longest lies, for several
    recipes: the trained cells of comparisons, the shadows and models of shared training; None: in the run folder.
    Raises UsageError for a recipe, data or folder that cannot be, JobFailed for a training that failed.
    """
    kind = settings(path, quick).get("kind")
    known = (*ALONE, *TRAININGS, *CACHED)
    if kind not in known:
        raise UsageError(f"{path.name} is of the kind {kind!r}", f"known: {', '.join(known)}")
    if cache is not None and kind not in CACHED:
        raise UsageError(f"{path.name} has nothing to share: it is of the kind {kind}", "leave out --cache")
    if not data.is_dir():
        raise UsageError(f"there is no folder {data}", "give --data the folder that the recipe's data paths start from")
    if kind in ALONE:
        result = ALONE[kind](path, data, out, quick, progress)
    elif kind == "comparison":
        result = _compare(path, data, out, quick, at_once, progress, cache)
    elif kind in CACHED:
        result = (_gradients if kind == "gradients" else _shared)(path, data, out, quick, progress, cache)
    else:
        result = _train(path, data, out, quick, at_once, progress)
    table.write(result)
    return result


def _attack(path: Path, data: Path, out: Path, quick: bool, progress: Log) -> Path:
    from milkglass.experiments.kinds import attacks

    recipe = attacks.AttackRecipe.read(path, quick)
    return attacks.write_result(recipe, out, attacks.measure(recipe, data, out, progress))


def _bilstm(path: Path, data: Path, out: Path, quick: bool, progress: Log) -> Path:
    from milkglass.experiments.kinds import bilstm

    recipe = bilstm.BiLSTMRecipe.read(path, quick)
    return bilstm.write_result(recipe, out, bilstm.measure(recipe, data, out, progress))


def _overhead(path: Path, data: Path, out: Path, quick: bool, progress: Log) -> Path:
    from milkglass.experiments.kinds import overhead

    recipe = overhead.OverheadRecipe.read(path, quick)
    return overhead.write_result(recipe, out, overhead.measure(recipe, data, out, progress))


def _compare(path: Path, data: Path, out: Path, quick: bool, at_once: int, progress: Log, cache: Path | None) -> Path:
    from milkglass.experiments.kinds import comparison

    recipe = comparison.Comparison.read(path, quick)
    result, cells = comparison.measure(recipe, data, out, cache, at_once, progress)
    return comparison.write_result(recipe, out, result, cells)


def _gradients(path: Path, data: Path, out: Path, quick: bool, progress: Log, cache: Path | None) -> Path:
    from milkglass.experiments.kinds import gradients

    recipe = gradients.GradientRecipe.read(path, quick)
    return gradients.write_result(recipe, out, gradients.measure(recipe, data, out, progress, cache))


def _shared(path: Path, data: Path, out: Path, quick: bool, progress: Log, cache: Path | None) -> Path:
    from milkglass.experiments.kinds import shared_training

    recipe = shared_training.SharedTraining.read(path, quick)
    return shared_training.write_result(recipe, out, shared_training.measure(recipe, data, out, progress, cache))


ALONE = {"attacks": _attack, "bilstm": _bilstm, "overhead": _overhead}  # one process, one thing after the other


def _train(path: Path, data: Path, out: Path, quick: bool, at_once: int, progress: Log) -> Path:
    recipe = recipes.Recipe.read(path, quick)
    threads = max(1, cores() // at_once)
    base, variants = recipes.prepare(recipe, data, out, threads, progress)
    statuses = recipes.train(variants, at_once, progress)
    if recipe.kind == "classification":
        from milkglass.experiments.kinds import classification

        measured = classification.measure(base, variants, statuses)
        measured |= classification.more(recipe, variants)
    else:
        from milkglass.experiments.kinds import generation

        measured = generation.measure(recipe, base, variants, data, out, progress)
    return recipes.write_result(recipe, out, measured)

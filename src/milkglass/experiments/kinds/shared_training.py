"""Recipes of kind "shared-training": what defences of shared gradients cost (GHOST, Tables 1, 2, 4 and 7, section 5.2).

    data = "sst2:train"                  rows are drawn from it, alike many of each class
    [training]                           experiments/procedures/local_training.py: rows, held_out of them (a fifth of
    each class), epochs and others [defences.ghost]                     experiments/procedures/private_rows.py
    [evaluation]                         theory = 1: section 5.2 too (experiments/procedures/theory.py), on so many rows

One client's FedSGD (experiments/procedures/local_training.py). The paper stops a training early, without saying by
which texts; here all epochs are run, so that the held-out texts decide nothing. They are never put through GHOST: the
model is to work on real ones. "shadow rouge-1, DEFENCE" compares the rows that are trained with to their texts (Table
1). "f1, one class for all" is what an answer without a model has.

What this module does not know: attacks.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from milkglass.audit.resume import private_folder, write_private
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.cache import ArtifactCache
from milkglass.experiments.partial_results import PartialResults
from milkglass.experiments.procedures import theory
from milkglass.experiments.procedures.local_training import LocalTraining, constant, fit, utility
from milkglass.experiments.procedures.private_rows import (
    DefenceSpec,
    PrivateRows,
    RowFilter,
    about_of,
    classes_of,
    level,
    rows_of,
    shadowed,
    written,
)
from milkglass.experiments.recipe_file import made_of, settings
from milkglass.experiments.report import theory_plots
from milkglass.experiments.runs import require_same_run
from milkglass.gradient_defences.defence import GradientDefence
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.models.tokenizer import load_tokenizer
from milkglass.progress import Log, no_log
from milkglass.sequences import Ids
from milkglass.signature import signature
from milkglass.threat.training_step import SharedStep, Task

THEORY = "theory.json"  # of each pair what Figures 3 and 4 are drawn from, as they are in theory.svg


@dataclass(frozen=True)
class SharedTraining:
    """evaluation: theory, rows of section 5.2's figures; 0 or absent: none."""

    name: str
    paper: str
    model: str
    seed: int
    data: str
    defences: Mapping[str, Mapping[str, Any]]
    training: Mapping[str, Any]
    task: Task = "classification"
    lora: int | None = None
    evaluation: Mapping[str, int] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)  # see experiments/figures.py
    quick: Mapping[str, Any] | None = None  # see experiments/recipe_file.py

    @classmethod
    def read(cls, path: Path, quick: bool = False) -> SharedTraining:
        raw = settings(path, quick)
        raw.pop("kind", None)
        recipe = made_of(cls, raw)
        made_of(LocalTraining, recipe.training)  # before anything is run
        for name, entry in recipe.defences.items():
            if name in ("untrained", "one class for all", "theory") or "/" in name:
                raise UsageError(f"{name!r} cannot be a defence's name", "take another")
            DefenceSpec.of(name, entry)
        if strange := sorted(set(recipe.evaluation) - {"theory"}):
            raise UsageError(f"evaluation has no {strange[0]}", "it has: theory")
        return recipe


@dataclass(frozen=True, eq=False)
class TrainingSite:
    """Who trains: the rows, and the model before. out: a private folder, for the figures. kept: for the shadows and the
    trained models."""

    base: Checkpoint
    recipe: SharedTraining
    train: PrivateRows
    held_out: PrivateRows
    classes: int
    tokenizer: Any
    out: Path
    kept: ArtifactCache
    progress: Log

    @property
    def chosen(self) -> LocalTraining:
        return made_of(LocalTraining, self.recipe.training)

    @property
    def pad(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

    def step(self) -> SharedStep:
        """The model before."""
        recipe = self.recipe
        return SharedStep.open(self.base.folder, recipe.task, self.classes, recipe.seed, recipe.lora)

    def rows(self, name: str, guard: DefenceSpec) -> PrivateRows:
        """The rows as they are trained with."""
        info = lambda words: self.progress(f"{name}: {words}")  # noqa: E731
        sent = shadowed(self.base, self.train.ids, guard, self.recipe.seed, self.kept, info)
        return PrivateRows(sent, self.train.labels)

    def trained(self, name: str, guard: DefenceSpec) -> SharedStep:
        """The model after, whose weights are kept: they are made once."""
        step, rows = self.step(), self.rows(name, guard)
        path = self.kept.place("trained", f"{self._digest(rows, guard.shield)}.safetensors")
        if path.is_file():
            tensors = load_file(path)
            if tensors.keys() != {*step.names}:
                raise CorruptCheckpoint(f"{path.name} is not of this model", f"remove {path}: it is made again")
            step.module.load_state_dict(tensors, strict=False)  # what is not trained is as it was
            return step
        info = lambda words: self.progress(f"{name}: {words}")  # noqa: E731
        fit(step, rows, guard.shield, self.chosen, self.recipe.seed, self.pad, info)
        part = path.with_suffix(f".{secrets.token_hex(4)}.part")
        save_file({n: one.detach().clone() for n, one in step.module.named_parameters() if n in step.names}, part)
        self.kept.wrote(path)
        part.replace(path)
        return step

    def _digest(self, rows: PrivateRows, shield: GradientDefence) -> str:
        """Of all that decides a trained model but the code."""
        recipe = self.recipe
        about = [
            self.base.digest(),
            self.base.config,
            recipe.task,
            recipe.lora,
            self.classes,
            recipe.seed,
            asdict(self.chosen),
        ]
        whole = hashlib.sha256(json.dumps([*about, signature(shield)], sort_keys=True).encode())
        for one in (rows.ids.ids, rows.ids.lengths, *([] if rows.labels is None else [rows.labels])):
            whole.update(one.astype("<i8").tobytes())
        return whole.hexdigest()[:16]

    def figures(self, name: str, guard: DefenceSpec) -> dict[str, float]:
        result = utility(self.trained(name, guard), self.held_out, self.pad, self.recipe.seed)
        if guard.ghost is not None:
            result |= level(self.train.ids, self.rows(name, guard).ids, self._read)
        return result

    def _read(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def measure(
    recipe: SharedTraining, data: Path, out: Path, progress: Log = no_log, cache: Path | None = None
) -> dict[str, float]:
    """The figures by name: "MEASURE, DEFENCE"; "untrained" stands for the model before. cache: where shadows and
    trained models lie, for several recipes."""
    base = Checkpoint.open(resolve(recipe.model))
    private_folder(out)
    require_same_run(out, {**_about(recipe), "base": base.digest(), "sums": data_refs.sums(data, [recipe.data])})
    tokenizer = load_tokenizer(base.folder)
    owner = TrainingSite(
        base, recipe, *_rows(recipe, tokenizer, data), tokenizer, out, ArtifactCache(cache or out, out), progress
    )
    parts, result = PartialResults(out / "figures.json"), dict[str, float]()
    work = {"untrained": lambda: utility(owner.step(), owner.held_out, owner.pad, recipe.seed)}
    if (labels := owner.held_out.labels) is not None:
        work["one class for all"] = partial(constant, labels, recipe.seed)
    for name, entry in recipe.defences.items():
        work[name] = partial(owner.figures, name, DefenceSpec.of(name, entry))
    if recipe.evaluation.get("theory"):
        work["theory"] = partial(_theory, owner)
    for name, one in work.items():
        part = parts.get(name, one)
        progress(f"{name}: " + ", ".join(f"{measure} {value:.3f}" for measure, value in part.items()))
        result |= {f"{measure}, {name}": value for measure, value in part.items()}
    return result


def _theory(owner: TrainingSite) -> dict[str, float]:
    """Section 5.2 of the first defence that is none and the first that is GHOST."""
    guards = {name: DefenceSpec.of(name, entry) for name, entry in owner.recipe.defences.items()}
    plain = next((name for name, entry in owner.recipe.defences.items() if not entry), None)
    ghost = next((name for name, guard in guards.items() if guard.ghost is not None), None)
    if plain is None or ghost is None:
        raise UsageError("theory needs a defence that is none and one that is ghost", "see the recipe")
    part = np.arange(min(owner.recipe.evaluation["theory"], len(owner.train)))
    pair = (owner.train.part(part), owner.rows(ghost, guards[ghost]).part(part))
    models = owner.step(), owner.trained(plain, guards[plain]), owner.trained(ghost, guards[ghost])
    result = theory.check(*models, *pair)
    write_private(owner.out / THEORY, json.dumps(result.to_json(), allow_nan=False) + "\n")
    write_private((owner.out / THEORY).with_suffix(".svg"), theory_plots.drawn(result.to_json()))
    return result.figures


def _rows(recipe: SharedTraining, tokenizer: Any, data: Path) -> tuple[PrivateRows, PrivateRows, int]:
    """Rows to train with, rows that are held out, and how many classes there are."""
    selected = made_of(LocalTraining, recipe.training)
    examples, numbers = data_refs.examples(data, recipe.data), None
    if recipe.task == "classification":
        numbers = classes_of(recipe.data, examples)
    expected = RowFilter(selected.rows, 1, selected.words, selected.longest)
    rows = rows_of(tokenizer, examples, numbers, expected, np.random.default_rng(recipe.seed))
    out = held_out(rows.labels, len(rows), selected.share)
    return rows.part(np.flatnonzero(~out)), rows.part(np.flatnonzero(out)), 2 if numbers is None else len(numbers)


def held_out(labels: Ids | None, count: int, share: float) -> NDArray[np.bool_]:
    """(count,) which rows are held out: of each class its share, by largest remainder, and the first of them: rows come
    in an order that was drawn. Raises UsageError where a class would have none, or none left."""
    kinds = np.zeros(count, np.int64) if labels is None else labels
    classes, sizes = np.unique(kinds, return_counts=True)
    quotas = sizes * round(share * count) / count
    parts = np.floor(quotas).astype(np.int64)
    parts[np.argsort(parts - quotas, kind="stable")[: round(share * count) - int(parts.sum())]] += 1
    if (parts < 1).any() or (parts >= sizes).any():
        raise UsageError(
            f"{round(share * count)} of {count} rows are held out: of a class none, or all",
            "take more rows, or hold out another number",
        )
    result = np.zeros(count, np.bool_)
    for one, part in zip(classes, parts, strict=True):
        result[np.flatnonzero(kinds == one)[:part]] = True
    return result


def _about(recipe: SharedTraining) -> dict[str, Any]:
    return about_of(recipe) | {"training": dict(recipe.training), "evaluation": dict(recipe.evaluation)}


def write_result(recipe: SharedTraining, out: Path, measured: Mapping[str, float]) -> Path:
    """RUN/RECIPE.json. "untold": figures that cannot be told, each null with a reason."""
    about, path = _about(recipe), out / THEORY
    if recipe.evaluation.get("theory"):
        reasons = json.loads(path.read_text("utf-8"))["untold"]
        about["untold"] = {f"{name}, theory": {"measured": None, "why": why} for name, why in reasons.items()}
    return written(recipe, about, out, measured, 4)

"""Recipes of kind "shared-training": what defences of shared gradients cost (GHOST, Tables 1, 2, 4 and 7, section 5.2).

    data = "sst2:train"                  rows are drawn from it, alike many of each class
    [training]                           fitting.py: rows, held_out of them (a fifth of each class), epochs and others
    [defences.ghost]                     owner.py
    [evaluation]                         theory = 1: section 5.2 too (theory.py), on so many rows

One client's FedSGD (fitting.py). The paper stops a training early, without saying by which texts; here all epochs are
run, so that the held-out texts decide nothing. They are never put through GHOST: the model is to work on real ones.
"shadow rouge-1, DEFENCE" compares the rows that are trained with to their texts (Table 1). "f1, one class for all" is
what an answer without a model has.

What this module does not know: attacks.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from milkglass.audit.work import private_folder, write_private
from milkglass.checkpoint import Checkpoint
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.experiments import sources, theory, theory_plots
from milkglass.experiments.fitting import Training, constant, fit, utility
from milkglass.experiments.kept import Kept
from milkglass.experiments.owner import (
    Guard,
    Rows,
    Wanted,
    about_of,
    classes_of,
    level,
    rows_of,
    shadowed,
    written,
)
from milkglass.experiments.parts import Parts
from milkglass.experiments.recipe import require_same_run
from milkglass.experiments.settings import made_of, settings
from milkglass.gradients.shield import Shield
from milkglass.models import resolve
from milkglass.sequences import Ids
from milkglass.shared_step import SharedStep, Task
from milkglass.tokenizer import load_tokenizer

Tell = Callable[[str], None]
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
    why: Mapping[str, str] = field(default_factory=dict)  # see result.py
    quick: Mapping[str, Any] | None = None  # see settings.py

    @classmethod
    def read(cls, path: Path, quick: bool = False) -> SharedTraining:
        raw = settings(path, quick)
        raw.pop("kind", None)
        recipe = made_of(cls, raw)
        made_of(Training, recipe.training)  # before anything is run
        for name, entry in recipe.defences.items():
            if name in ("untrained", "one class for all", "theory") or "/" in name:
                raise UsageError(f"{name!r} cannot be a defence's name", "take another")
            Guard.of(name, entry)
        if strange := sorted(set(recipe.evaluation) - {"theory"}):
            raise UsageError(f"evaluation has no {strange[0]}", "it has: theory")
        return recipe


@dataclass(frozen=True, eq=False)
class Owner:
    """Who trains: the rows, and the model before. out: a private folder, for the figures. kept: for the shadows and the
    trained models."""

    base: Checkpoint
    recipe: SharedTraining
    train: Rows
    held_out: Rows
    classes: int
    tokenizer: Any
    out: Path
    kept: Kept
    tell: Tell

    @property
    def chosen(self) -> Training:
        return made_of(Training, self.recipe.training)

    @property
    def pad(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

    def step(self) -> SharedStep:
        """The model before."""
        recipe = self.recipe
        return SharedStep.open(self.base.folder, recipe.task, self.classes, recipe.seed, recipe.lora)

    def rows(self, name: str, guard: Guard) -> Rows:
        """The rows as they are trained with."""
        told = lambda said: self.tell(f"{name}: {said}")  # noqa: E731
        sent = shadowed(self.base, self.train.ids, guard, self.recipe.seed, self.kept, told)
        return Rows(sent, self.train.labels)

    def trained(self, name: str, guard: Guard) -> SharedStep:
        """The model after, whose weights are kept: they are made once."""
        step, rows = self.step(), self.rows(name, guard)
        path = self.kept.place("trained", f"{self._digest(rows, guard.shield)}.safetensors")
        if path.is_file():
            tensors = load_file(path)
            if tensors.keys() != {*step.names}:
                raise CorruptCheckpoint(f"{path.name} is not of this model", f"remove {path}: it is made again")
            step.module.load_state_dict(tensors, strict=False)  # what is not trained is as it was
            return step
        told = lambda said: self.tell(f"{name}: {said}")  # noqa: E731
        fit(step, rows, guard.shield, self.chosen, self.recipe.seed, self.pad, told)
        part = path.with_suffix(f".{secrets.token_hex(4)}.part")
        save_file({n: one.detach().clone() for n, one in step.module.named_parameters() if n in step.names}, part)
        self.kept.wrote(path)
        part.replace(path)
        return step

    def _digest(self, rows: Rows, shield: Shield) -> str:
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
        whole = hashlib.sha256(json.dumps([*about, repr(shield)], sort_keys=True).encode())
        for one in (rows.ids.ids, rows.ids.lengths, *([] if rows.labels is None else [rows.labels])):
            whole.update(one.astype("<i8").tobytes())
        return whole.hexdigest()[:16]

    def figures(self, name: str, guard: Guard) -> dict[str, float]:
        found = utility(self.trained(name, guard), self.held_out, self.pad, self.recipe.seed)
        if guard.ghost is not None:
            found |= level(self.train.ids, self.rows(name, guard).ids, self._read)
        return found

    def _read(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def measure(
    recipe: SharedTraining, data: Path, out: Path, tell: Tell = lambda words: None, cache: Path | None = None
) -> dict[str, float]:
    """The figures by name: "MEASURE, DEFENCE"; "untrained" stands for the model before. cache: where shadows and
    trained models lie, for several recipes."""
    base = Checkpoint.open(resolve(recipe.model))
    private_folder(out)
    require_same_run(out, {**_about(recipe), "base": base.digest(), "sums": sources.sums(data, [recipe.data])})
    tokenizer = load_tokenizer(base.folder)
    owner = Owner(base, recipe, *_rows(recipe, tokenizer, data), tokenizer, out, Kept(cache or out, out), tell)
    parts, found = Parts(out / "figures.json"), dict[str, float]()
    work = {"untrained": lambda: utility(owner.step(), owner.held_out, owner.pad, recipe.seed)}
    if (labels := owner.held_out.labels) is not None:
        work["one class for all"] = partial(constant, labels, recipe.seed)
    for name, entry in recipe.defences.items():
        work[name] = partial(owner.figures, name, Guard.of(name, entry))
    if recipe.evaluation.get("theory"):
        work["theory"] = partial(_theory, owner)
    for name, one in work.items():
        part = parts.get(name, one)
        tell(f"{name}: " + ", ".join(f"{measure} {value:.3f}" for measure, value in part.items()))
        found |= {f"{measure}, {name}": value for measure, value in part.items()}
    return found


def _theory(owner: Owner) -> dict[str, float]:
    """Section 5.2 of the first defence that is none and the first that is GHOST."""
    guards = {name: Guard.of(name, entry) for name, entry in owner.recipe.defences.items()}
    plain = next((name for name, entry in owner.recipe.defences.items() if not entry), None)
    ghost = next((name for name, guard in guards.items() if guard.ghost is not None), None)
    if plain is None or ghost is None:
        raise UsageError("theory needs a defence that is none and one that is ghost", "see the recipe")
    some = np.arange(min(owner.recipe.evaluation["theory"], len(owner.train)))
    pair = (owner.train.part(some), owner.rows(ghost, guards[ghost]).part(some))
    models = owner.step(), owner.trained(plain, guards[plain]), owner.trained(ghost, guards[ghost])
    found = theory.check(*models, *pair)
    write_private(owner.out / THEORY, json.dumps(found.to_json(), allow_nan=False) + "\n")
    write_private((owner.out / THEORY).with_suffix(".svg"), theory_plots.drawn(found.to_json()))
    return found.figures


def _rows(recipe: SharedTraining, tokenizer: Any, data: Path) -> tuple[Rows, Rows, int]:
    """Rows to train with, rows that are held out, and how many classes there are."""
    chosen = made_of(Training, recipe.training)
    examples, numbers = sources.examples(data, recipe.data), None
    if recipe.task == "classification":
        numbers = classes_of(recipe.data, examples)
    wanted = Wanted(chosen.rows, 1, chosen.words, chosen.longest)
    rows = rows_of(tokenizer, examples, numbers, wanted, np.random.default_rng(recipe.seed))
    out = held_out(rows.labels, len(rows), chosen.share)
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
    found = np.zeros(count, np.bool_)
    for one, part in zip(classes, parts, strict=True):
        found[np.flatnonzero(kinds == one)[:part]] = True
    return found


def _about(recipe: SharedTraining) -> dict[str, Any]:
    return about_of(recipe) | {"training": dict(recipe.training), "evaluation": dict(recipe.evaluation)}


def write_result(recipe: SharedTraining, out: Path, measured: Mapping[str, float]) -> Path:
    """RUN/RECIPE.json. "untold": figures that cannot be told, each null with a reason."""
    about, path = _about(recipe), out / THEORY
    if recipe.evaluation.get("theory"):
        reasons = json.loads(path.read_text("utf-8"))["untold"]
        about["untold"] = {f"{name}, theory": {"measured": None, "why": why} for name, why in reasons.items()}
    return written(recipe, about, out, measured, 4)

"""Recipes of kind "comparison": defences x data x seeds, each trained, and attacks on what each of them sends.

    [data.sst2]
    train = "sst2/train.tsv"         a file or a data set by name (experiments/data_refs.py); held_out: what utility is
    measured on held_out = "sst2/dev.tsv" rows = 8000                      of train, drawn by the seed; left out: all

    [defences."custext+"]            see milkglass/defences.py; an empty one is no defence
    [attacked]                       rows: private ones, of train; public: how many others an attacker has

A defence's entry may lay tables `training` and `attacked` of its own over these: with a key for each job, `rows` are
what one key hides.

Figures are called "MEASURE, DATA, DEFENCE" and "MEASURE, ATTACK, ATTACKER, DATA, DEFENCE"; with several seeds they are
means, and "..., sd" is the standard deviation of the seeds. Cells are shared by recipes that are given one --cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.client.data.dataset import Example
from milkglass.defences.catalogue import defence_of
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments import figures as result
from milkglass.experiments.attack_specs import Entries, attacks_of
from milkglass.experiments.entries import hyperparameters, require_data, require_defence
from milkglass.experiments.procedures.leakage import LeakageTexts, leakage
from milkglass.experiments.procedures.trials import TrainedHalves, TrialData, trained
from milkglass.experiments.recipe_file import made_of, settings, table_of
from milkglass.experiments.runs import made, require_same_run
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.mechanism import HalvesTraining
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.progress import Log, no_log
from milkglass.server.spec import Hyperparameters
from milkglass.system import cores
from milkglass.threat.defence import Defence, LabelledTexts

Place = tuple[str, str, int]  # data, defence, seed


@dataclass(frozen=True)
class Comparison:
    """training, attacked: of every cell; a defence's entry may lay tables of these names over them."""

    name: str
    paper: str
    model: str
    seeds: Sequence[int]
    data: Mapping[str, Mapping[str, Any]]
    defences: Mapping[str, Mapping[str, Any]]
    training: Mapping[str, Any]
    attacks: Entries
    attacked: Mapping[str, Any]
    published: Mapping[str, float]
    asked: Mapping[str, str]
    why: Mapping[str, str] = field(default_factory=dict)  # see experiments/figures.py
    quick: Mapping[str, Any] | None = None  # see experiments/recipe_file.py

    @classmethod
    def read(cls, path: Path, quick: bool = False) -> Comparison:
        empty: dict[str, Any] = {name: {} for name in ("published", "asked", "training")}
        none = {"attacks": [], "attacked": {"rows": 0, "public": 0}}
        raw = {**empty, **none, "seeds": [1], **settings(path, quick)}
        raw.pop("kind", None)
        recipe = made_of(cls, raw)
        attacks_of(recipe.attacks)  # before anything is run
        for name, defence in recipe.defences.items():
            recipe.attacked_of(defence)
            recipe.settings_of(defence, {"num_labels": 2})
            require_defence(name, _bare(defence))
        for name, entry in recipe.data.items():
            require_data(name, entry)
        return recipe

    def attacked_of(self, entry: Mapping[str, Any]) -> LeakageTexts:
        return made_of(LeakageTexts, {**self.attacked, **table_of(entry, "attacked")})

    def hyperparameters(self, problem: TrialData, entry: Mapping[str, Any], seed: int) -> Hyperparameters:
        task = {"task": "regression"} if problem.classes == 1 else {"num_labels": problem.classes}
        return self.settings_of(entry, {"seed": seed, **task})

    def settings_of(self, entry: Mapping[str, Any], more: Mapping[str, Any]) -> Hyperparameters:
        """Of a defence's entry; the recipe's own settings stand above `more`."""
        return hyperparameters({**more, **self.training, **table_of(entry, "training")})


def measure(
    recipe: Comparison, data: Path, out: Path, cache: Path | None, at_once: int, progress: Log = no_log
) -> tuple[dict[str, float], list[Mapping[str, Any]]]:
    """The figures by name, and by which code the cells were made."""
    base = Checkpoint.open(resolve(recipe.model))
    digest = base.digest()
    threads = max(1, cores() // at_once)
    places = list(product(recipe.data, recipe.defences, recipe.seeds))
    spare = max(recipe.attacked_of(one).public for one in recipe.defences.values()) if recipe.attacks else 0
    problems = {(name, seed): problem(name, recipe.data[name], data, seed, spare) for name, _, seed in places}
    splits = {name: defence_of(_bare(entry), data) for name, entry in recipe.defences.items()}
    for name, defence, seed in places:
        recipe.hyperparameters(problems[name, seed], recipe.defences[defence], seed)
    require_same_run(out, {**_about(recipe), "base": digest})  # nothing is written before all of it can be

    def train(place: Place) -> TrainedHalves:
        name, defence, seed = place
        one = problems[name, seed]
        selected = recipe.hyperparameters(one, recipe.defences[defence], seed)
        words = f"{name}, {defence}" + (f", seed {seed}" if len(recipe.seeds) > 1 else "")
        split = with_training(splits[defence], selected)
        return trained(
            base, digest, one, split, selected, seed, cache or out / "cells", threads,
            lambda text: progress(f"{words}: {text}"),
        )  # fmt: skip

    with ThreadPoolExecutor(at_once) as pool:
        cells = dict(zip(places, pool.map(train, places), strict=True))
    results: dict[Place, dict[str, float]] = {place: dict(cell.figures) for place, cell in cells.items()}
    if recipe.attacks:
        for place, cell in cells.items():
            progress(f"{', '.join(map(str, place))}: attacks")
            one = problems[place[0], place[2]]
            folder = out / "attacks" / "-".join(map(str, place))
            attacked = recipe.attacked_of(recipe.defences[place[1]])
            about = {"cell": cell.name, "attacked": asdict(attacked)}
            results[place] |= leakage(recipe.attacks, attacked, base, one, cell, about, folder, progress)
    return _named(recipe, results), [cell.made for cell in cells.values()]


def _bare(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A defence's entry without the tables that are laid over the recipe's."""
    return {key: value for key, value in entry.items() if key not in ("training", "attacked")}


def with_training(defence: Defence, chosen: Hyperparameters) -> Defence:
    """An encoder is trained where it is split, with the same settings; the others are by a server."""
    if not isinstance(defence, HiddenStateDefence):
        return defence
    how = HalvesTraining(
        chosen.learning_rate, chosen.batch_size, math.ceil(chosen.n_epochs), chosen.max_steps, chosen.max_length,
        chosen.weight_decay,
    )  # fmt: skip
    return replace(defence, training=how)


def problem(name: str, entry: Mapping[str, Any], data: Path, seed: int, spare: int = 0) -> TrialData:
    """The training rows are drawn by the seed, in its order. spare: rows that are kept out of training, an attacker's.
    Raises UsageError for data that has no labels, or fewer rows than asked for."""
    about = data_refs.named(entry["train"])
    whole = data_refs.examples(data, entry["train"])
    order = [whole[i] for i in np.random.default_rng(seed).permutation(len(whole))]
    rows = entry.get("rows", len(whole) - spare)
    if not 0 < rows <= len(whole) - spare:
        raise UsageError(
            f"{rows} rows are asked for, {entry['train']} has {len(whole)}"
            + (f", of which {spare} are an attacker's" if spare else ""),
            "lower rows",
        )
    held_out = data_refs.examples(data, entry["held_out"])
    regression = about is not None and about[0].task == "regression"
    numbers = about[0].numbers if about else _numbered(whole)
    return TrialData(
        name,
        _labelled(order[:rows], numbers, regression),
        _labelled(held_out, numbers, regression),
        _labelled(order[rows:], numbers, regression),
        about[0].metrics if about else ("accuracy",),
        1 if regression else len(numbers),
        {**data_refs.sums(data, [entry["train"], entry["held_out"]]), "rows": rows, "seed": seed},
    )


def _numbered(rows: Sequence[Example]) -> dict[str, int]:
    names = {one.label for one in rows if one.label is not None}
    numeric = all(name.isascii() and name.isdigit() for name in names)
    return {name: i for i, name in enumerate(sorted(names, key=lambda n: (int(n) if numeric else 0, n)))}


def _labelled(rows: Sequence[Example], numbers: Mapping[str, int], regression: bool) -> LabelledTexts:
    if any(one.label is None or not (regression or one.label in numbers) for one in rows):
        raise UsageError("some rows have no label, or one that the training rows have not", "give labelled data")
    texts = [one.text for one in rows]
    pairs = [one.pair or "" for one in rows] if rows and rows[0].pair is not None else None
    if regression:
        return LabelledTexts(texts, [float(one.label or 0) for one in rows], pairs)
    return LabelledTexts(texts, [numbers[one.label or ""] for one in rows], pairs)


def _named(recipe: Comparison, found: Mapping[Place, Mapping[str, float]]) -> dict[str, float]:
    """Means over the seeds, and what a defence costs beside none."""
    figures: dict[str, float] = {}
    for data, defence in product(recipe.data, recipe.defences):
        each = [found[data, defence, seed] for seed in recipe.seeds]
        for name in each[0]:
            values = np.array([one[name] for one in each])
            figures[f"{name}, {data}, {defence}"] = float(values.mean())
            if len(values) > 1:
                figures[f"{name}, {data}, {defence}, sd"] = float(values.std(ddof=1))
    plain = next((name for name, entry in recipe.defences.items() if not entry), None)
    for data, defence in product(recipe.data, recipe.defences):
        main = next(iter(found[data, defence, recipe.seeds[0]]))
        if plain is not None and defence != plain:
            figures[f"{main} loss, {data}, {defence}"] = (
                figures[f"{main}, {data}, {plain}"] - figures[f"{main}, {data}, {defence}"]
            )
    return figures


def _about(recipe: Comparison) -> dict[str, Any]:
    return {
        "recipe": recipe.name, "paper": recipe.paper, "model": recipe.model, "seeds": list(recipe.seeds),
        "data": {name: dict(one) for name, one in recipe.data.items()},
        "variants": {name: dict(one) for name, one in recipe.defences.items()},
        "training": dict(recipe.training), "attacked": dict(recipe.attacked),
        **({} if recipe.quick is None else {"quick": dict(recipe.quick)}),
    }  # fmt: skip


def write_result(
    recipe: Comparison, out: Path, measured: Mapping[str, float], cells: Sequence[Mapping[str, Any]]
) -> Path:
    """RUN/RECIPE.json, with the code that each cell was made by where it is not the code that wrote this."""
    about = {
        **_about(recipe),
        "attacks": recipe.attacks,
        "made": made(out, [str(one.get("begun", one)["commit"]) for one in cells]),
        "figures": result.figures(recipe, measured, 2),
    }
    path = out / f"{recipe.name}.json"
    path.write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    return path

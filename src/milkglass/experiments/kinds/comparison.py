"""Recipes of kind "comparison": defences x data x seeds, each trained, and attacks on what each of them sends.

    [data.sst2]
    train = "sst2/train.tsv"         a file or a data set by name (experiments/data_refs.py)
    held_out = "sst2/dev.tsv"        what utility is measured on
    rows = 8000                      of train, drawn by the seed; left out: all
    training = { n_epochs = 4 }      laid over the table [training]
    [defences."custext+"]            see defences/catalogue.py; {} is no defence, with which
                                     the others are compared
    [attacked]                       rows: private ones, of train; public: how many others an attacker has

A defence's entry may override both tables by its own `training` and `attacked`. Each training has a key of its own, so
that `rows` is also how many rows one key hides.

With several seeds figures are means, with the standard deviation "sd" and with "median", "least" and "most", since a
seed is also a key, on which some figures depend. Beside the defences there are these variants and measures:

    variant "commonest class"                     the class most frequent in the first seed's training rows, for all
    variant "client alone", note MODEL            what the client does by itself in seconds (client/alone.py)
    MEASURE with own model                        the server's answers combined with the client's own model

Recipes and calls of `milkglass compare` with the same --cache share the cells whose rows and settings are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.defences.catalogue import defence_of
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.entries import (
    AttackEntries,
    attacks_of,
    parse_hyperparameters,
    require_data_entry,
    require_defence_entry,
)
from milkglass.experiments.procedures.cells import (
    LINEAR_MODEL,
    CellData,
    GradedCell,
    TrainedCell,
    client_alone_figures,
    commonest_class_figures,
    fit_own_model,
    graded_cell,
    pooled_figures,
    train_cell,
)
from milkglass.experiments.procedures.leakage import LeakageSettings, leakage
from milkglass.experiments.recipe import Recipe, from_entries, table_of
from milkglass.experiments.record import (
    CLIENT_ALONE,
    COMMONEST_CLASS,
    POOLED_SUFFIX,
    ResultRecord,
    Statistic,
    make_records,
    merge_records,
)
from milkglass.experiments.runs import RunContext, claim_run_folder, commits_of, pack_answers
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.mechanism import HalvesTraining
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.progress import Log
from milkglass.server.spec import Hyperparameters
from milkglass.threat.defence import Defence

CellKey = tuple[str, str, int]  # data, defence, seed

BATCH_ORDER_WARNING = (
    "warning: {}: trained in batches of a random order, the others in batches of like lengths: say "
    "group_by_length = false in the training to compare them"
)


@dataclass(frozen=True, kw_only=True)
class ComparisonRecipe(Recipe):
    """Trains and attacks cells, one for each data set, defence and seed.

    Attributes:
        seeds: decide the rows that are drawn, the keys and the trainings.
        data: the data sets, as the module describes.
        defences: the defences, as the module describes.
        training: the settings of every training; a data set's or a defence's entry may override them.
        attacks: the attacks (entries.py).
        attacked: which rows are attacked (procedures/leakage.py); a defence's entry may override it.
    """

    data: Mapping[str, Mapping[str, Any]]
    defences: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int] = (1,)
    training: Mapping[str, Any] = field(default_factory=dict)
    attacks: AttackEntries = field(default_factory=list)
    attacked: Mapping[str, Any] = field(default_factory=lambda: {"rows": 0, "public": 0})

    is_cacheable = True

    def check(self) -> None:
        attacks_of(self.attacks)
        for name in (COMMONEST_CLASS, CLIENT_ALONE, f"{CLIENT_ALONE}, {LINEAR_MODEL}"):
            if name in self.defences:
                raise UsageError(f"{name!r} is the name of a row of its own", "give the defence another name")
        for name, entry in self.data.items():
            require_data_entry(name, entry)
        for name, defence in self.defences.items():
            self.attacked_of(defence)
            require_defence_entry(name, _without_tables(defence))
            for data in self.data:
                settings = self.settings_of(data, defence, {"num_labels": 2})
                if "encoder" in defence:
                    halves_training(settings)

    def attacked_of(self, entry: Mapping[str, Any]) -> LeakageSettings:
        """Returns which rows of a defence are attacked: by the table [attacked], under the defence's own."""
        return from_entries(LeakageSettings, {**self.attacked, **table_of(entry, "attacked")})

    def hyperparameters(self, cell_data: CellData, entry: Mapping[str, Any], seed: int) -> Hyperparameters:
        """Returns the settings of the training of one cell."""
        task = {"task": "regression"} if cell_data.class_count == 1 else {"num_labels": cell_data.class_count}
        return self.settings_of(cell_data.name, entry, {"seed": seed, **task})

    def settings_of(self, data: str, entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> Hyperparameters:
        """Returns the settings of a defence on a data set.

        `defaults` hold where neither the recipe, the data set nor the defence sets a value.
        """
        data_training = table_of(self.data[data], "training")
        return parse_hyperparameters({**defaults, **self.training, **data_training, **table_of(entry, "training")})

    def about(self) -> dict[str, Any]:
        return {
            **self.head,
            "seeds": list(self.seeds),
            "data": self.data,
            "variants": self.defences,
            "training": self.training,
            "attacked": self.attacked,
            **self.quick_entry,
        }

    def result(self) -> dict[str, Any]:
        return {**self.about(), "attacks": self.attacks}

    @property
    def cell_keys(self) -> list[CellKey]:
        """Returns the key of every cell, in order."""
        return list(product(self.data, self.defences, self.seeds))

    def measure(self, run: RunContext) -> list[ResultRecord]:
        """Trains, grades and attacks all cells, and returns their figures. Nothing is written before all is read."""
        trainer = CellTrainer.of(self, run.data, self.cell_keys)
        base, cell_data = trainer.base, trainer.cell_data
        claim_run_folder(run.out, {**self.about(), "base": trainer.digest})
        halves_names = [name for name, entry in self.defences.items() if "encoder" in entry]
        whole_model_settings = (settings for key, settings in trainer.settings.items() if key[1] not in halves_names)
        if halves_names and any(settings.group_by_length for settings in whole_model_settings):
            run.log(BATCH_ORDER_WARNING.format(", ".join(halves_names)))
        with ThreadPoolExecutor(run.parallel_trainings) as pool:
            graded_cells = pool.map(lambda key: trainer.grade(key, run), self.cell_keys)
            cells = dict(zip(self.cell_keys, graded_cells, strict=True))
        run.commits.extend(commit for cell in cells.values() for commit in commits_of(cell.provenance))
        run.predictions.update({", ".join(map(str, key)): cell.packed_predictions for key, cell in cells.items()})
        results: dict[CellKey, list[ResultRecord]] = {key: make_records(cell.figures) for key, cell in cells.items()}
        own_models = {data_and_seed: fit_own_model(rows) for data_and_seed, rows in cell_data.items()}
        for (name, defence, seed), cell in cells.items():
            if pooled := pooled_figures(cell, cell_data[name, seed], own_models[name, seed], seed):
                results[name, defence, seed] += make_records(pooled[0])
                run.predictions[f"{name}, {defence}, {seed}{POOLED_SUFFIX}"] = pack_answers(pooled[1])
        for key, cell in cells.items() if self.attacks else ():
            assert isinstance(cell, TrainedCell)
            run.log(f"{', '.join(map(str, key))}: attacks")
            folder = run.out / "attacks" / "-".join(map(str, key))
            name, defence, seed = key
            attacked = self.attacked_of(self.defences[defence])
            about = {"cell": cell.name, "attacked": asdict(attacked)}
            results[key] += leakage(self.attacks, attacked, base, cell_data[name, seed], cell, about, folder, run.log)
        undefended_records: list[ResultRecord] = []
        first_seed = self.seeds[0]
        for name in self.data:
            data_of_seed, own_model = cell_data[name, first_seed], own_models[name, first_seed]
            undefended_records += make_records(
                commonest_class_figures(data_of_seed, first_seed), data=name, variant=COMMONEST_CLASS
            )
            values = client_alone_figures(data_of_seed, own_model, first_seed)
            undefended_records += make_records(values, data=name, variant=CLIENT_ALONE, note=LINEAR_MODEL)
        return _mean_figures(self, results) + undefended_records


@dataclass(frozen=True, eq=False)
class CellTrainer:
    """Trains and grades the cells of a comparison, all or one by one, into one cache.

    Attributes:
        recipe: the recipe of the comparison.
        base: the model that all cells start from.
        digest: the digest of the base model.
        cell_data: the rows of each data set and seed.
        defences: the defences by name.
        settings: the training of each cell.
    """

    recipe: ComparisonRecipe
    base: Checkpoint
    digest: str
    cell_data: Mapping[tuple[str, int], CellData]
    defences: Mapping[str, Defence]
    settings: Mapping[CellKey, Hyperparameters]

    @classmethod
    def of(cls, recipe: ComparisonRecipe, data: Path, keys: Sequence[CellKey]) -> CellTrainer:
        """Reads what these cells are trained from. Raises UsageError if data are missing, or a defence is refused."""
        base = Checkpoint.open(resolve_model(recipe.model))
        entries = recipe.defences
        spare_rows = max(recipe.attacked_of(entry).spare_rows for entry in entries.values()) if recipe.attacks else 0
        cell_data = {
            (name, seed): load_cell_data(name, recipe.data[name], data, seed, spare_rows) for name, _, seed in keys
        }
        defences = {
            name: defence_of(_without_tables(entries[name]), data)
            for name in dict.fromkeys(defence for _, defence, _ in keys)
        }
        settings = {
            (name, defence, seed): recipe.hyperparameters(cell_data[name, seed], entries[defence], seed)
            for name, defence, seed in keys
        }
        return cls(recipe, base, base.digest(), cell_data, defences, settings)

    def train(self, key: CellKey, run: RunContext) -> TrainedCell:
        """Returns a cell with its model, trained if it is not in the run's cache. Raises what `train_cell` raises."""
        name, defence, seed = key
        title = f"{name}, {defence}" + (f", seed {seed}" if len(self.recipe.seeds) > 1 else "")
        log: Log = lambda text: run.log(f"{title}: {text}")  # noqa: E731
        return train_cell(self.base, *self._identity(key), _cells_folder(run), run.threads, log)

    def grade(self, key: CellKey, run: RunContext) -> GradedCell:
        """Returns a cell, trained if the run's cache has no answers of it, or if its model is to be attacked."""
        stored_cell = None if self.recipe.attacks else graded_cell(*self._identity(key), _cells_folder(run))
        return stored_cell or self.train(key, run)

    def _identity(self, key: CellKey) -> tuple[str, CellData, Defence, Hyperparameters, int]:
        """Returns all that decides a cell, in the order that cells.py takes it."""
        name, defence, seed = key
        trained_defence = with_training(self.defences[defence], self.settings[key])
        return self.digest, self.cell_data[name, seed], trained_defence, self.settings[key], seed


def _cells_folder(run: RunContext) -> Path:
    """Returns the folder with the cells of a run."""
    return run.cache or run.out / "cells"


def _without_tables(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a defence's entry without the tables that override the recipe's."""
    return {key: value for key, value in entry.items() if key not in ("training", "attacked")}


def with_training(defence: Defence, settings: Hyperparameters) -> Defence:
    """Returns the defence, with these settings if its two halves are trained together. A server trains the others."""
    return replace(defence, training=halves_training(settings)) if isinstance(defence, HiddenStateDefence) else defence


def with_defence_dtype(settings: Hyperparameters, defence: Defence) -> Hyperparameters:
    """Returns the settings for a training of the defence: two halves are trained together in fp32 only."""
    return settings.model_copy(update={"dtype": "float32"}) if isinstance(defence, HiddenStateDefence) else settings


def halves_training(settings: Hyperparameters) -> HalvesTraining:
    """Returns the settings for a model in two halves, whose batches always have a random order.

    Raises:
        UsageError: a setting does not exist for this training, so that its cell could not be compared.
    """
    whole_epochs = settings.max_steps is not None or float(settings.n_epochs).is_integer()
    unsupported = [
        name
        for name in ("early_stopping", "dtype", "adam_beta2")
        if getattr(settings, name) != Hyperparameters.model_fields[name].default
    ]
    unsupported += [] if whole_epochs else ["n_epochs"]
    unsupported += [] if settings.chosen_method == "full" else ["method"]
    if unsupported:
        raise UsageError(
            f"{unsupported[0]} = {getattr(settings, unsupported[0])!r} is not built for a model in two halves",
            f"leave {unsupported[0]} out of the training, or the defence with an encoder",
        )
    return HalvesTraining(
        settings.learning_rate, settings.batch_size, math.ceil(settings.n_epochs), settings.max_steps,
        settings.max_length, settings.weight_decay, settings.warmup_ratio,
    )  # fmt: skip


def load_cell_data(name: str, entry: Mapping[str, Any], data_folder: Path, seed: int, spare_rows: int = 0) -> CellData:
    """Returns one data set of the comparison, with training rows in the seed's order.

    Args:
        spare_rows: how many rows are kept out of training, for attackers.

    Raises:
        UsageError: the data has no labels, or too few rows.
    """
    data_set = data_refs.parse_named_split(entry["train"])
    examples = data_refs.load_examples(data_folder, entry["train"])
    order = [examples[i] for i in np.random.default_rng(seed).permutation(len(examples))]
    rows = entry.get("rows", len(examples) - spare_rows)
    if not 0 < rows <= len(examples) - spare_rows:
        raise UsageError(
            f"{rows} rows are needed, {entry['train']} has {len(examples)}"
            + (f", of which {spare_rows} are an attacker's" if spare_rows else ""),
            "lower rows",
        )
    held_out = data_refs.load_examples(data_folder, entry["held_out"])
    is_regression = data_set is not None and data_set[0].task == "regression"
    numbers = data_refs.class_numbers(entry["train"], examples)
    return CellData(
        name,
        data_refs.labelled_texts(order[:rows], numbers, is_regression),
        data_refs.labelled_texts(held_out, numbers, is_regression),
        data_refs.labelled_texts(order[rows:], numbers, is_regression),
        data_set[0].metrics if data_set else ("accuracy",),
        1 if is_regression else len(numbers),
    )


SEED_STATISTICS: Mapping[str, Statistic] = {
    "sd": partial(np.std, ddof=1), "median": np.median, "least": np.min, "most": np.max
}  # fmt: skip


def _mean_figures(recipe: ComparisonRecipe, measured: Mapping[CellKey, Sequence[ResultRecord]]) -> list[ResultRecord]:
    """Returns the means over the seeds, and how much utility each defence costs, compared with none."""
    figures: dict[tuple[str, str], list[ResultRecord]] = {}
    for data, defence in product(recipe.data, recipe.defences):
        means = merge_records(
            [measured[data, defence, seed] for seed in recipe.seeds], np.mean, SEED_STATISTICS, "seeds"
        )
        figures[data, defence] = [replace(record, data=data, variant=defence) for record in means]
    merged = [record for records in figures.values() for record in records]
    plain = next((name for name, entry in recipe.defences.items() if not entry), None)
    for (data, defence), (utility, *_) in figures.items():
        if plain is not None and defence != plain:
            loss = figures[data, plain][0].value - utility.value
            merged.append(ResultRecord(measure=f"{utility.measure} loss", value=loss, data=data, variant=defence))
    return merged

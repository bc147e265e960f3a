"""Recipes of kind "shared-training": what defences of shared gradients cost (GHOST, Tables 1, 2, 4, 7, section 5.2).

    data = "sst2:train"                  rows are drawn from it, the same number of each class
    [training]                           experiments/procedures/local_training.py: rows, held_out of them (a fifth of
                                         each class), epochs and others
    [defences.ghost]                     experiments/procedures/private_rows.py
    [evaluation]                         theory = 1: section 5.2 too (experiments/procedures/theory.py), on so many rows

It is one client's FedSGD (experiments/procedures/local_training.py). The paper stops a training early, without saying
by which texts; here all epochs run, so that the held-out texts decide nothing. They are never put through GHOST, since
the model is to work on real texts. "shadow rouge-1, DEFENCE" compares the training rows with their texts (Table 1).
"f1, one class for all" is the value of an answer without a model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from milkglass import files
from milkglass.catalogue import signature
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.cache import ArtifactCache, PartialResults
from milkglass.experiments.procedures import theory
from milkglass.experiments.procedures.local_training import LocalTraining, constant_answer_figures, fit, model_quality
from milkglass.experiments.procedures.private_rows import (
    DefenceSpec,
    PrivateRows,
    RowFilter,
    SharedStepRecipe,
    choose_rows,
    shadow_likeness,
    shadow_rows,
)
from milkglass.experiments.recipe import from_entries
from milkglass.experiments.record import ResultRecord, make_records
from milkglass.experiments.report import theory_plots
from milkglass.experiments.runs import RunContext, claim_run_folder
from milkglass.gradient_defences.defence import GradientDefence
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer
from milkglass.progress import Log
from milkglass.sequences import Ids
from milkglass.threat.training_step import SharedStep

ROWS_KEY = "rows"  # the entry of a measured part with the packed values by row (`ModelQuality`)
THEORY_FILE = "theory.json"  # the values of each pair from which theory.svg, with Figures 3 and 4, is drawn


@dataclass(frozen=True, kw_only=True)
class SharedTrainingRecipe(SharedStepRecipe):
    """Trains a client's model behind each defence, and measures how good the model is.

    Attributes:
        training: fields of `LocalTraining`.
        evaluation: `theory`, the number of rows for section 5.2's figures; 0 or absent: none.
    """

    training: Mapping[str, Any]
    evaluation: Mapping[str, int] = field(default_factory=dict)

    decimals = 4

    def check(self) -> None:
        from_entries(LocalTraining, self.training)
        for name, entry in self.defences.items():
            if name in ("untrained", "one class for all", "theory") or "/" in name:
                raise UsageError(f"{name!r} cannot be a defence's name", "take another")
            DefenceSpec.of(name, entry)
        if unknown := sorted(set(self.evaluation) - {"theory"}):
            raise UsageError(f"evaluation has no {unknown[0]}", "it has: theory")

    def about(self) -> dict[str, Any]:
        return super().about() | {"training": self.training, "evaluation": self.evaluation}

    def measure(self, run: RunContext) -> list[ResultRecord]:
        """Returns the figures of each defence; "untrained" is the model before training."""
        base = Checkpoint.open(resolve_model(self.model))
        data_digests = data_refs.file_digests(run.data, [self.data])
        claim_run_folder(run.out, {**self.about(), "base": base.digest(), "sums": data_digests})
        tokenizer, cache = load_tokenizer(base.folder), ArtifactCache(run.cache or run.out, run.out)
        rows_and_class_count = _split_rows(self, tokenizer, run.data)
        site = TrainingSite(base, self, *rows_and_class_count, tokenizer, run.out, cache, run.log)
        parts_to_measure: dict[str, Callable[[], dict[str, Any]]] = {
            "untrained": lambda: site.step_figures(site.step())
        }
        if (labels := site.held_out.labels) is not None:
            parts_to_measure["one class for all"] = partial(constant_answer_figures, labels, self.seed)
        for name, entry in self.defences.items():
            parts_to_measure[name] = partial(site.figures, name, DefenceSpec.of(name, entry))
        if self.evaluation.get("theory"):
            parts_to_measure["theory"] = partial(_theory_figures, site)
        parts, figure_records = PartialResults(run.out / "figures.json"), list[ResultRecord]()
        for name, measure_part in parts_to_measure.items():
            measured = parts.get_or_compute(name, measure_part)
            packed_rows = measured.pop(ROWS_KEY, {})  # parts that older code measured have none
            run.predictions.update({f"{values}, {name}": packed for values, packed in packed_rows.items()})
            run.log(f"{name}: " + ", ".join(f"{measure} {value:.3f}" for measure, value in measured.items()))
            figure_records += make_records(measured, variant=name)
        if self.evaluation.get("theory"):
            findings = json.loads((run.out / THEORY_FILE).read_text("utf-8"))
            undefined = findings["untold"] if "untold" in findings else findings["undefined"]  # older code: "untold"
            figure_records += [
                ResultRecord(measure=measure, value=math.nan, variant="theory", undefined=reason)
                for measure, reason in undefined.items()
            ]
        return figure_records


@dataclass(frozen=True, eq=False)
class TrainingSite:
    """Trains the client's model behind a defence, and measures it.

    Attributes:
        base: the public model.
        recipe: the recipe that is run.
        train: the rows that are trained with.
        held_out: the rows on which the model is measured.
        class_count: the number of classes.
        tokenizer: the public model's tokenizer.
        out: the run folder.
        cache: keeps the shadows and the trained models.
        log: receives lines for the user.
    """

    base: Checkpoint
    recipe: SharedTrainingRecipe
    train: PrivateRows
    held_out: PrivateRows
    class_count: int
    tokenizer: Any
    out: Path
    cache: ArtifactCache
    log: Log

    @property
    def training(self) -> LocalTraining:
        """Returns the settings of the training."""
        return from_entries(LocalTraining, self.recipe.training)

    @property
    def pad_id(self) -> int:
        """Returns the id with which texts are padded."""
        return int(self.tokenizer.pad_token_id or 0)

    def step(self) -> SharedStep:
        """Returns the model before training."""
        recipe = self.recipe
        return SharedStep.open(self.base.folder, recipe.task, self.class_count, recipe.seed, recipe.lora)

    def log_of(self, name: str) -> Log:
        """Returns what receives lines about the defence of this name."""
        return lambda line: self.log(f"{name}: {line}")

    def defended_rows(self, name: str, defence: DefenceSpec) -> PrivateRows:
        """Returns the training rows, with shadows in place of their texts if the defence has GHOST."""
        sent = shadow_rows(self.base, self.train.ids, defence, self.recipe.seed, self.cache, self.log_of(name))
        return PrivateRows(sent, self.train.labels)

    def trained_step(self, name: str, defence: DefenceSpec) -> SharedStep:
        """Returns the model after training. It is trained once, then read from the cache. Raises CorruptCheckpoint."""
        step, rows = self.step(), self.defended_rows(name, defence)
        path = self.cache.path_of("trained", f"{self._digest(rows, defence.shield)}.safetensors")
        if path.is_file():
            tensors = load_file(path)
            if tensors.keys() != {*step.parameter_names}:
                raise CorruptCheckpoint(f"{path.name} is not of this model", f"remove {path}: it is trained again")
            step.module.load_state_dict(tensors, strict=False)  # what is not trained is unchanged
            return step
        fit(step, rows, defence.shield, self.training, self.recipe.seed, self.pad_id, self.log_of(name))
        tensors = {name: weight.detach().cpu().clone() for name, weight in step.parameters.items()}
        with files.atomic_path(path) as partial_path:
            save_file(tensors, partial_path)
            self.cache.record_writer(path)
        return step

    def _digest(self, rows: PrivateRows, shield: GradientDefence) -> str:
        """Returns a digest of all that decides a trained model, except code."""
        recipe = self.recipe
        identity = [self.base.digest(), self.base.config, recipe.task, recipe.lora, self.class_count, recipe.seed]
        identity += [asdict(self.training), signature(shield)]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
        for array in (rows.ids.ids, rows.ids.lengths, *([] if rows.labels is None else [rows.labels])):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def step_figures(self, step: SharedStep) -> dict[str, Any]:
        """Returns the model's figures, and under `ROWS_KEY` the rows from which they follow."""
        measured = model_quality(step, self.held_out, self.pad_id, self.recipe.seed)
        return {**measured.figures, ROWS_KEY: measured.packed_rows}

    def figures(self, name: str, defence: DefenceSpec) -> dict[str, Any]:
        """Returns the figures of the model that was trained behind a defence, and how similar its shadows are."""
        figures = self.step_figures(self.trained_step(name, defence))
        if defence.ghost is not None:
            shadows = self.defended_rows(name, defence).ids
            figures |= shadow_likeness(self.train.ids, shadows, self._read, self.recipe.seed)
        return figures

    def _read(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _theory_figures(site: TrainingSite) -> dict[str, float]:
    """Returns the figures of section 5.2 for the first empty defence and the first with GHOST. Raises UsageError."""
    specs = {name: DefenceSpec.of(name, entry) for name, entry in site.recipe.defences.items()}
    plain = next((name for name, entry in site.recipe.defences.items() if not entry), None)
    ghost = next((name for name, defence in specs.items() if defence.ghost is not None), None)
    if plain is None or ghost is None:
        raise UsageError("theory needs an empty defence and one with ghost", "see the recipe")
    first_rows = np.arange(min(site.recipe.evaluation["theory"], len(site.train)))
    texts_and_shadows = (site.train.select(first_rows), site.defended_rows(ghost, specs[ghost]).select(first_rows))
    models = site.step(), site.trained_step(plain, specs[plain]), site.trained_step(ghost, specs[ghost])
    findings = theory.measure_theory(*models, *texts_and_shadows)
    files.write(site.out / THEORY_FILE, json.dumps(findings.to_json(), allow_nan=False) + "\n")
    files.write((site.out / THEORY_FILE).with_suffix(".svg"), theory_plots.theory_svg(findings.to_json()))
    return findings.figures


def _split_rows(
    recipe: SharedTrainingRecipe, tokenizer: Any, data_folder: Path
) -> tuple[PrivateRows, PrivateRows, int]:
    """Returns the training rows, the held-out rows, and the number of classes."""
    training = from_entries(LocalTraining, recipe.training)
    examples = data_refs.load_examples(data_folder, recipe.data)
    numbers = data_refs.class_numbers(recipe.data, examples) if recipe.task == "classification" else None
    row_filter = RowFilter(training.rows, 1, training.words, training.longest)
    rows = choose_rows(tokenizer, examples, numbers, row_filter, np.random.default_rng(recipe.seed))
    is_held_out = held_out_mask(rows.labels, len(rows), training.share)
    train, held_out = rows.select(np.flatnonzero(~is_held_out)), rows.select(np.flatnonzero(is_held_out))
    return train, held_out, (2 if numbers is None else len(numbers))


def held_out_mask(labels: Ids | None, count: int, share: float) -> NDArray[np.bool_]:
    """Returns (count,) whether each row is held out: the first rows of each class, by the largest remainder method.

    Args:
        labels: (count,) the class of each row. None: all rows are of one class.
        count: the number of rows, which come in random order.
        share: the share of each class that is held out.

    Raises:
        UsageError: a class would have no row held out, or none left.
    """
    class_of_row = np.zeros(count, np.int64) if labels is None else labels
    classes, sizes = np.unique(class_of_row, return_counts=True)
    quotas = sizes * round(share * count) / count
    counts = np.floor(quotas).astype(np.int64)
    counts[np.argsort(counts - quotas, kind="stable")[: round(share * count) - int(counts.sum())]] += 1
    if (counts < 1).any() or (counts >= sizes).any():
        raise UsageError(
            f"{round(share * count)} of {count} rows are held out: of a class none, or all",
            "take more rows, or hold out another number",
        )
    is_held_out = np.zeros(count, np.bool_)
    for class_number, held_out_count in zip(classes, counts, strict=True):
        is_held_out[np.flatnonzero(class_of_row == class_number)[:held_out_count]] = True
    return is_held_out

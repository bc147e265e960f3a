"""Recipes of accuracy with and without obfuscation, and of nearest-neighbour recovery (ObfusLM, Tables 2 and 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification

from milkglass import device
from milkglass.attacks.embeddings.knn import nearest
from milkglass.client.special_tokens import reserved_ids
from milkglass.experiments import data_refs
from milkglass.experiments.kinds.fine_tuning import FineTuningRecipe
from milkglass.experiments.record import ResultRecord, make_records
from milkglass.experiments.runs import RunContext, TrainedVariant, pack_answers
from milkglass.metrics.glue import MEASURES
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.resolve import resolve_model
from milkglass.models.torch_model import MODEL_LOAD_LOCK
from milkglass.server.jobs.data import PaddingCollator, TrainingDataset
from milkglass.server.spec import Status
from milkglass.server.storage.training_rows import TrainingRows


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(FineTuningRecipe):
    """Fine-tunes classifiers: measures their accuracy, and what nearest neighbours read of the uploaded table."""

    task = "classification"

    def grade_variants(
        self, run: RunContext, base: Checkpoint, variants: list[TrainedVariant], statuses: Mapping[str, Status]
    ) -> list[ResultRecord]:
        """Returns accuracies and a named data set's own measures in percent, and recovery as shares."""
        data_set = data_refs.parse_named_split(self.data["validation"])
        measures = [name for name in data_set[0].metrics if name != "accuracy"] if data_set else []
        own_figures = figures_by_measure(variants, measures, self.training.max_length, self.seed, run.predictions)
        return recovery_figures(base, variants, statuses) + own_figures


def recovery_figures(
    base: Checkpoint, variants: list[TrainedVariant], statuses: Mapping[str, Status]
) -> list[ResultRecord]:
    """Returns accuracies and their losses in percent, and top-1 and top-3 recovery as shares.

    Shares are of the whole vocabulary, and of the running tokens of the training data, as the paper's tables count. The
    latter are left out if an id names a cluster.
    """
    accuracy = {variant.name: 100 * statuses[variant.name].metrics["accuracy"] for variant in variants}
    records = [ResultRecord(measure="accuracy", value=value, variant=name) for name, value in accuracy.items()]
    plain = next(variant for variant in variants if variant.is_plain)
    table = base.read(architecture_of(base).table)
    for variant in variants:
        if variant.is_plain:
            continue
        name = "" if len(variants) == 2 else variant.name
        scrambled = Checkpoint.open(variant.model_folder)
        hits = (
            nearest(scrambled.read(architecture_of(scrambled).table), table, 3)
            == torch.from_numpy(variant.key.inverse)[:, None]
        )
        values = {
            "accuracy loss": accuracy[plain.name] - accuracy[variant.name],
            "knn top-1": float(hits[:, 0].float().mean()),
            "knn top-3": float(hits.any(1).float().mean()),
        }
        if not variant.key.has_shared_ids:  # an id of a cluster does not say how often each token was sent
            counts = occurrence_counts(variant)
            for measure, hit in (("knn running top-1", hits[:, 0]), ("knn running top-3", hits.any(1))):
                values[measure] = float((hit * counts).sum() / counts.sum())
        records += make_records(values, variant=name)
    return records


def occurrence_counts(variant: TrainedVariant) -> torch.Tensor:
    """Returns (ids,) how often each scrambled id occurs in the training data, without special tokens."""
    ids = TrainingRows.open(variant.job_folder / "train.safetensors").map_tensor("input_ids")
    counts = np.bincount(ids, minlength=len(variant.key.sigma))
    special = reserved_ids(Checkpoint.open(resolve_model(variant.key.info.model)), len(variant.key.first_ids))
    counts[variant.key.first_ids[special]] = 0
    return torch.from_numpy(counts)


BATCH_TEXTS = 64  # texts that are classified at a time


@torch.inference_mode()
def predicted_classes(
    model_folder: Path, held_out_file: Path, max_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (rows,) the class that the model predicts for each row, and (rows,) the row's own."""
    with MODEL_LOAD_LOCK:
        net: Any = AutoModelForSequenceClassification.from_pretrained(model_folder, dtype=torch.float32).eval()
    device.move(net)
    rows = TrainingDataset(held_out_file, "classification", max_length)
    collate = PaddingCollator(net.config.pad_token_id or 0)
    predicted_batches, true_batches = [], []
    for start in range(0, len(rows), BATCH_TEXTS):
        batch = collate([rows[i] for i in range(start, min(start + BATCH_TEXTS, len(rows)))])
        true_batches.append(batch.pop("labels").numpy())
        logits = net(**{name: device.move(tensor) for name, tensor in batch.items()}).logits
        predicted_batches.append(device.array(logits.argmax(-1)))
    return np.concatenate(predicted_batches), np.concatenate(true_batches)


def figures_by_measure(
    variants: Sequence[TrainedVariant],
    measures: Sequence[str],
    max_length: int,
    seed: int,
    packed_answers: dict[str, str],
) -> list[ResultRecord]:
    """Returns each measure of each variant in percent. `packed_answers` receives each variant's answers."""
    records: list[ResultRecord] = []
    for variant in variants:
        predicted, truth = predicted_classes(
            variant.job_folder / "result", variant.job_folder / "validation.safetensors", max_length
        )
        packed_answers[variant.name] = pack_answers(predicted)
        for name in measures:
            value = MEASURES[name](predicted, truth, np.random.default_rng(seed)).value
            records.append(ResultRecord(measure=name, value=100 * value, variant=variant.name))
    return records

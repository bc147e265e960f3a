"""Accuracy with and without obfuscation, and nearest-neighbour recovery over the table (ObfusLM, Tables 2 and 10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
import torch

from milkglass.attacks.embeddings.knn import nearest
from milkglass.client.key.generate import reserved_ids
from milkglass.experiments import data_refs
from milkglass.experiments.kinds.fine_tuning import FineTuning
from milkglass.experiments.procedures import predictions
from milkglass.experiments.runs import RunFolder, Variant
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import of
from milkglass.models.resolve import resolve
from milkglass.server.spec import Status


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(FineTuning):
    """Fine-tuned classifiers: accuracy, and what nearest neighbours read of the table as it was uploaded."""

    task = "classification"

    def graded(
        self, run: RunFolder, base: Checkpoint, variants: list[Variant], statuses: Mapping[str, Status]
    ) -> dict[str, float]:
        """Percent; and of a data set by name its measures beside accuracy, such as Matthews' correlation of CoLA."""
        data_set = data_refs.named(self.data["validation"])
        metrics = [name for name in data_set[0].metrics if name != "accuracy"] if data_set else []
        more = predictions.measure(variants, metrics, self.training.max_length, self.seed, run.predictions)
        return recovery(base, variants, statuses) | more


def recovery(base: Checkpoint, variants: list[Variant], statuses: Mapping[str, Status]) -> dict[str, float]:
    """Accuracies in percent. Top-1 and top-3 as shares of the whole vocabulary, and of the running tokens of the
    training data, which is what the paper's tables count.
    """
    result = {f"accuracy, {v.name}": 100 * statuses[v.name].metrics["accuracy"] for v in variants}
    plain = next(v for v in variants if v.plain)
    table = base.read(of(base).table)
    for variant in variants:
        if variant.plain:
            continue
        suffix = "" if len(variants) == 2 else f", {variant.name}"
        loss = result[f"accuracy, {plain.name}"] - result[f"accuracy, {variant.name}"]
        scrambled = Checkpoint.open(variant.model)
        hits = nearest(scrambled.read(of(scrambled).table), table, 3) == torch.from_numpy(variant.key.inverse)[:, None]
        result |= {
            f"accuracy loss{suffix}": loss,
            f"knn top-1{suffix}": float(hits[:, 0].float().mean()),
            f"knn top-3{suffix}": float(hits.any(1).float().mean()),
        }
        if variant.key.shares:
            continue  # an id stands for a cluster, so the training data doesn't say how often each token was sent
        counts = running_counts(variant)
        for name, hit in (("knn running top-1", hits[:, 0]), ("knn running top-3", hits.any(1))):
            result[f"{name}{suffix}"] = float((hit * counts).sum() / counts.sum())
    return result


def running_counts(variant: Variant) -> torch.Tensor:
    """(n',) how often each scrambled id occurs in the training data, special tokens left out."""
    column = pq.read_table(variant.job / "train.parquet", columns=["input_ids"])["input_ids"]
    counts = np.bincount(column.combine_chunks().values.to_numpy(), minlength=len(variant.key.sigma))
    special = reserved_ids(Checkpoint.open(resolve(variant.key.info.model)), len(variant.key.first))
    counts[variant.key.first[special]] = 0
    return torch.from_numpy(counts)

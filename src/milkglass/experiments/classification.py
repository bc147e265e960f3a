"""Accuracy with and without obfuscation, and nearest-neighbour recovery over the table (ObfusLM, Tables 2 and 10)."""

from __future__ import annotations

import torch

from milkglass.architectures import of
from milkglass.attacks.embedding.knn import nearest
from milkglass.checkpoint import Checkpoint
from milkglass.experiments.recipe import Variant
from milkglass.server.spec import Status


def measure(base: Checkpoint, variants: list[Variant], statuses: dict[str, Status]) -> dict[str, float]:
    """Accuracies in percent; top-1 and top-3 as shares of the whole vocabulary, before any training."""
    found = {f"accuracy, {v.name}": 100 * statuses[v.name].metrics["accuracy"] for v in variants}
    plain = next(v for v in variants if v.plain)
    table = base.read(of(base).table)
    for variant in variants:
        if variant.plain:
            continue
        suffix = "" if len(variants) == 2 else f", {variant.name}"
        loss = found[f"accuracy, {plain.name}"] - found[f"accuracy, {variant.name}"]
        scrambled = Checkpoint.open(variant.model)
        guesses = nearest(scrambled.read(of(scrambled).table), table, 3)[torch.from_numpy(variant.key.sigma).long()]
        hits = guesses == torch.arange(len(table))[:, None]
        found |= {
            f"accuracy loss{suffix}": loss,
            f"knn top-1{suffix}": float(hits[:, 0].float().mean()),
            f"knn top-3{suffix}": float(hits.any(1).float().mean()),
        }
    return found

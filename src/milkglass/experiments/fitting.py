"""One client's training on what it shares, and what the model is worth after.

Each step's gradient is taken by `gradients.share`, so that a shield changes it as it changes what is sent, and AdamW
takes it from there. "f1" is class 1's for two classes, the mean over classes for more.

What this module does not know: recipes, where rows come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from milkglass.experiments.owner import Rows
from milkglass.gradients.shield import Shield, share
from milkglass.sequences import Ids
from milkglass.shared_step import SharedStep, batch

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Training:
    """rows: a fifth of them held out. longest: tokens of a text, with its special ones. words: of a text, at most."""

    rows: int = 1000
    epochs: int = 10
    batch: int = 32
    learning_rate: float = 1e-5
    longest: int = 128
    words: int = 1000


def fit(step: SharedStep, rows: Rows, shield: Shield, chosen: Training, seed: int, pad: int, tell: Tell) -> None:
    """Changes the step's model. The order of the rows and a shield's noise come from the seed."""
    rng, parameters = np.random.default_rng(seed), dict(step.module.named_parameters())
    optimizer = torch.optim.AdamW([parameters[name] for name in step.names], lr=chosen.learning_rate)
    count = 0
    for epoch in range(chosen.epochs):
        order = rng.permutation(len(rows))
        for start in range(0, len(order), chosen.batch):
            ids, mask, targets = _given(rows.part(order[start : start + chosen.batch]), pad)
            seen = share(step, ids, mask, targets, shield, count, rng)
            optimizer.zero_grad(set_to_none=True)
            for name, gradient in seen.tensors.items():
                parameters[name].grad = gradient
            optimizer.step()
            count += 1
        tell(f"epoch {epoch + 1} of {chosen.epochs}")


def _given(rows: Rows, pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    ids, mask = batch([one.tolist() for one in rows.ids], pad)
    return ids, mask, None if rows.labels is None else torch.from_numpy(rows.labels)


@torch.no_grad()
def utility(step: SharedStep, rows: Rows, pad: int, size: int = 32) -> dict[str, float]:
    """ "accuracy" and "f1", or "loss" (nats, the mean over all predicted tokens) and "perplexity"."""
    order = np.argsort(rows.ids.lengths, kind="stable")  # so that little is padding
    guesses, total, tokens = np.empty(len(rows), np.int64), 0.0, 0
    for start in range(0, len(order), size):
        some = order[start : start + size]
        ids, mask, targets = _given(rows.part(some), pad)
        if step.task == "classification":
            guesses[some] = step.logits(step.embedded(ids), mask).argmax(-1).numpy()
        else:
            predicted = int(mask[:, 1:].sum())
            total += float(step.loss(step.embedded(ids), mask, ids)) * predicted
            tokens += predicted
    if step.task == "next-token":
        return {"loss": total / tokens, "perplexity": math.exp(total / tokens)}
    assert rows.labels is not None
    return {"accuracy": float((guesses == rows.labels).mean()), "f1": f1(guesses, rows.labels)}


def f1(guesses: Ids, labels: Ids) -> float:
    """Of class 1 where there are two, else the mean over the classes that occur; 0 where a class is never named."""
    classes = [1] if set(labels.tolist()) <= {0, 1} else sorted(set(labels.tolist()))
    values = []
    for one in classes:
        named, there = guesses == one, labels == one
        values.append(2 * float((named & there).sum()) / max(1, int(named.sum() + there.sum())))
    return float(np.mean(values))

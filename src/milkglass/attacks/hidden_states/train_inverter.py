"""Train a model that turns hidden states into tokens, for the attacks that do so (invbert.py, state_inversion.py)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from milkglass.attacks.forward import batches, places, stacked
from milkglass.sequences import Sequences
from milkglass.threat.attack import Budget


class InverterSettings(Protocol):
    """The attack's own parameters."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def epochs(self) -> int: ...


def train(
    inverter: torch.nn.Module,
    states: torch.Tensor,
    corpus: Sequences,
    settings: InverterSettings,
    budget: Budget,
    rng: np.random.Generator,
    clip: float | None = None,
) -> None:
    """Until the epochs are done or the budget is spent, whichever is first.

    Args:
        states: (total, d), one for each id of `corpus`.
        clip: the greatest norm of a step's gradient.
    """
    optimiser = torch.optim.AdamW(inverter.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    groups = [g for part in batches(corpus) for g in np.array_split(part, -(-len(part) // settings.batch_size))]
    steps, done = settings.epochs * len(groups), 0
    inverter.train()
    for _ in range(settings.epochs):
        for number in rng.permutation(len(groups)).tolist():
            if budget.left() <= 0:
                return
            expected = stacked(corpus, groups[number])
            provided = states[torch.from_numpy(places(corpus, groups[number]))].reshape(*expected.shape, -1)
            loss = torch.nn.functional.cross_entropy(inverter(provided).flatten(0, 1), expected.flatten())
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(inverter.parameters(), clip)
            optimiser.step()
            done += 1
            budget.progress(done / steps)

"""What the four attacks by optimisation have in common: what they refuse, and one loop down the distance.

Embeddings are moved by Adam against the gradient of the distance between the gradients that they give and those that
were shared; the best seen on the way is kept.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from milkglass.attacks.gradients.inversion import Inversion, SharedBatch
from milkglass.attacks.gradients.optimisation.problem import Frame, Problem, misfit
from milkglass.errors import UsageError
from milkglass.sequences import Ids, batched
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Gradients, Transcript


@dataclass(frozen=True)
class AdamSchedule:
    """How embeddings are moved.

    Attributes:
        steps, rate: of Adam.
        decay, every: the rate is multiplied by `decay` every `every` steps.
        pull: the weight of the squared difference between the mean length of the embeddings and that of the table's
            (LAMP's regulariser).
    """

    steps: int
    rate: float
    decay: float = 1.0
    every: int = 50
    pull: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.every < 1 or self.rate <= 0:
            raise UsageError(f"{self.steps} steps at rate {self.rate}", "give at least 0 steps and a rate above 0")


class Descent:
    """x: (b, t, d) the embeddings now. best: the best so far, of the distance and the regulariser."""

    def __init__(self, problem: Problem, start: torch.Tensor, pace: AdamSchedule) -> None:
        self.problem, self.pace = problem, pace
        self.x = problem.pinned(start.clone()).requires_grad_()
        self.best, self.least, self.done = self.x.detach().clone(), float("inf"), 0
        self._adam = torch.optim.Adam([self.x], lr=pace.rate)

    def step(self) -> None:
        """One step; dropout's masks, where they are unknown, are moved too."""
        error = self.problem.loss(self.x)
        if self.pace.pull:
            inside = self.problem.mask.bool()
            error = error + self.pace.pull * (self.x[inside].norm(dim=1).mean() - self.problem.size).square()
        if (value := float(error.detach())) <= self.least:
            self.least, self.best = value, self.x.detach().clone()
        masks = [] if self.problem.masks is None else self.problem.masks.values
        if masks and len(self._adam.param_groups) == 1:  # they are made in the first run
            self._adam.add_param_group({"params": masks})
        unknown = [self.x, *masks]
        for one, grad in zip(unknown, torch.autograd.grad(error, unknown, materialize_grads=True), strict=True):
            one.grad = grad
        for group in self._adam.param_groups:
            group["lr"] = self.pace.rate * self.pace.decay ** (self.done // self.pace.every)
        self._adam.step()
        with torch.no_grad():
            self.x.copy_(self.problem.pinned(self.x.detach().clone()))
        if self.problem.masks is not None:
            self.problem.masks.clamp()
        self.done += 1

    def reorder(self, row: int, order: Ids) -> None:
        """Another order (t,) of one text's places, and of what Adam remembers of them."""
        known = torch.from_numpy(order)
        state = self._adam.state[self.x]
        with torch.no_grad():
            for one in (self.x, state.get("exp_avg"), state.get("exp_avg_sq")):
                if one is not None:
                    one[row] = one[row, known].clone()

    def run(self, budget: Budget, between: Callable[[Descent], None] = lambda descent: None) -> torch.Tensor:
        """All steps, or as many as there is time for, and the best of them.

        Args:
            between: called after each.
        """
        while self.done < self.pace.steps and budget.left() > 0:
            self.step()
            between(self)
        return self.best


def judged(problem: Problem, guesses: Iterable[torch.Tensor], budget: Budget) -> Iterator[tuple[torch.Tensor, float]]:
    """Each guess (b, t, d) with its distance, many judged at once; as many as there is time for, but the first ones."""
    for part in batched(guesses, problem.together):
        yield from zip(part, problem.judged(torch.stack(part)).tolist(), strict=True)
        if budget.left() <= 0:
            return


def lowest(problem: Problem, guesses: Iterable[torch.Tensor], budget: Budget) -> torch.Tensor:
    """The guess with the smallest distance, of those that there is time for."""
    return min(judged(problem, guesses, budget), key=lambda pair: pair[1])[0]


@dataclass(frozen=True)
class Optimising(Inversion):
    """An attack that moves embeddings until their gradients are those that were shared. Authors write `solve`.

    Attributes:
        first, last: the ids that begin and end every text, such as [CLS] and [SEP], by the public tokenizer; None: what
            the public text shows, else every place is free.
    """

    first: int | None = None
    last: int | None = None

    assumes = frozenset({"step", "lengths"})
    uses = frozenset({"corpus"})

    @abc.abstractmethod
    def solve(self, batch: SharedBatch, frame: Frame, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        """The texts of a batch, in its order."""

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        frame = Frame.of(self.first, self.last, batch.corpus, len(batch.step.table))
        return self.solve(batch, frame, budget, rng)

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        step, lengths = required(knowledge.step), required(knowledge.lengths)
        if step.task == "classification" and knowledge.labels is None:
            return "the attacker does not know the labels"
        if len(lengths) and int(lengths.min()) < 1:
            return "a text of no token"
        if step.task == "next-token" and len(lengths) and int(lengths.max()) < 2:
            return "no text has a second token, so that none is predicted"
        for one in transcript.all(Gradients):
            if reason := misfit(step, one.tensors):
                return reason
        return None

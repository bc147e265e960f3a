"""Defines the base of the attacks by optimisation: what they refuse, and one descent.

Adam moves embeddings against the gradient of the distance between their gradients and the shared ones. The best
embeddings are kept.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from milkglass.attacks.gradients.inversion import Inversion, SharedBatch
from milkglass.attacks.gradients.optimisation.problem import Frame, Problem, why_incomparable
from milkglass.errors import UsageError
from milkglass.sequences import Ids, batched
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Gradients, Transcript


@dataclass(frozen=True)
class AdamSchedule:
    """Sets the number of steps of one descent by Adam, and their learning rate.

    Attributes:
        step_count: how many steps are made.
        learning_rate: the rate at first.
        decay, decay_steps: the rate is multiplied by `decay` every `decay_steps` steps.
        norm_weight: the weight of LAMP's regulariser: the squared difference between the mean norm of the embeddings
            and that of the table's.

    Raises:
        UsageError: the number of steps is below 0, `decay_steps` below 1, or the rate not above 0.
    """

    step_count: int
    learning_rate: float
    decay: float = 1.0
    decay_steps: int = 50
    norm_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.step_count < 0 or self.decay_steps < 1 or self.learning_rate <= 0:
            raise UsageError(
                f"{self.step_count} steps at rate {self.learning_rate}", "give at least 0 steps and a rate above 0"
            )


class Descent:
    """Moves the embeddings of a batch so that their gradients approach the shared ones.

    Attributes:
        x: (b, t, d) the current embeddings.
        best: (b, t, d) the embeddings with the smallest sum of distance and regulariser so far.
        least_error: the smallest sum so far.
        steps_done: how many steps were made.
    """

    def __init__(self, problem: Problem, start: torch.Tensor, schedule: AdamSchedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.x = problem.pin(start.clone()).requires_grad_()
        self.best, self.least_error, self.steps_done = self.x.detach().clone(), float("inf"), 0
        self._adam = torch.optim.Adam([self.x], lr=schedule.learning_rate)

    def step(self) -> None:
        """Takes one step, which moves the masks of dropout too if they are unknown."""
        error = self.problem.loss(self.x)
        if self.schedule.norm_weight:
            is_token = self.problem.mask.bool()
            norm_gap = self.x[is_token].norm(dim=1).mean() - self.problem.mean_norm
            error = error + self.schedule.norm_weight * norm_gap.square()
        if (value := float(error.detach())) <= self.least_error:
            self.least_error, self.best = value, self.x.detach().clone()
        masks = [] if self.problem.masks is None else self.problem.masks.values
        if masks and len(self._adam.param_groups) == 1:  # they are made in the first run
            self._adam.add_param_group({"params": masks})
        unknown = [self.x, *masks]
        for variable, grad in zip(unknown, torch.autograd.grad(error, unknown, materialize_grads=True), strict=True):
            variable.grad = grad
        for group in self._adam.param_groups:
            decay_count = self.steps_done // self.schedule.decay_steps
            group["lr"] = self.schedule.learning_rate * self.schedule.decay**decay_count
        self._adam.step()
        with torch.no_grad():
            self.x.copy_(self.problem.pin(self.x.detach().clone()))
        if self.problem.masks is not None:
            self.problem.masks.clamp()
        self.steps_done += 1

    def reorder(self, row: int, order: Ids) -> None:
        """Puts one text's places, and Adam's moments of them, into another order (t,)."""
        index = torch.from_numpy(order)
        state = self._adam.state[self.x]
        with torch.no_grad():
            for moment in (self.x, state.get("exp_avg"), state.get("exp_avg_sq")):
                if moment is not None:
                    moment[row] = moment[row, index].clone()

    def run(self, budget: Budget, after_step: Callable[[Descent], None] = lambda descent: None) -> torch.Tensor:
        """Makes all steps, or as many as time allows, and returns the best embeddings. `after_step` follows each."""
        while self.steps_done < self.schedule.step_count and budget.left() > 0:
            self.step()
            budget.spend(self.problem.work(1, is_differentiated=True))
            after_step(self)
        return self.best


def with_distances(
    problem: Problem, guesses: Iterable[torch.Tensor], budget: Budget
) -> Iterator[tuple[torch.Tensor, float]]:
    """Yields each guess (b, t, d) with its distance while there is time; the first batch of guesses in any case."""
    for guesses_together in batched(guesses, problem.guesses_at_once):
        budget.spend(problem.work(len(guesses_together)))
        yield from zip(guesses_together, problem.distances(torch.stack(guesses_together)).tolist(), strict=True)
        if budget.left() <= 0:
            return


def nearest_guess(problem: Problem, guesses: Iterable[torch.Tensor], budget: Budget) -> torch.Tensor:
    """Returns the guess with the smallest distance, of those for which there is time."""
    return min(with_distances(problem, guesses, budget), key=lambda pair: pair[1])[0]


@dataclass(frozen=True)
class OptimisationAttack(Inversion):
    """Moves embeddings until their gradients equal the shared ones. Subclasses implement `solve`.

    Attributes:
        first, last: the ids with which every text begins and ends, such as [CLS] and [SEP], by the public tokenizer.
            None: the id that the public text shows, if it shows one. Without an id every place is free.
    """

    first: int | None = None
    last: int | None = None

    assumes = frozenset({"step", "lengths"})
    uses = frozenset({"corpus"})

    @abc.abstractmethod
    def solve(self, batch: SharedBatch, frame: Frame, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        """Returns the texts of a batch, in its order."""

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        frame = Frame.of(self.first, self.last, batch.corpus, len(batch.step.table))
        return self.solve(batch, frame, budget, rng)

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        step, lengths = require_known(knowledge.step), require_known(knowledge.lengths)
        if step.task == "classification" and knowledge.labels is None:
            return "the attacker does not know the labels"
        if len(lengths) and int(lengths.min()) < 1:
            return "a text of no token"
        if step.task == "next-token" and len(lengths) and int(lengths.max()) < 2:
            return "no text has a second token, so that none is predicted"
        for gradients in transcript.all(Gradients):
            if reason := why_incomparable(step, gradients.tensors):
                return reason
        return None

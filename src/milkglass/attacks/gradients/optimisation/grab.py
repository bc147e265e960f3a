"""GRAB (Feng et al. 2024): matching gradients and dropout together, then a search among the tokens that were met.

1. Starts as in LAMP, then Adam on the sum of the differences' norms (not squared) + 0.01 L1. Where the client's step
   drops (dropout), its masks are unknown too, and found with the embeddings (dropout.py).
2. The tokens that were nearest at any place, every `watch` steps, are kept; the `pool` that were so most often go on.
3. Beam search: place by place, each of the `beam` best texts with each of these tokens there, or with one from another
   of its places, judged by the distance of its gradient; `sweeps` times over, or until nothing changes.
4. The next of `rounds` begins at the embeddings of what was found.

Where the client drops, of models with 32 dimensions no more came back with masks than without: they are many unknowns
beside few numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from milkglass import papers
from milkglass.attacks.gradients.inversion import SharedBatch
from milkglass.attacks.gradients.optimisation.distance import Distance
from milkglass.attacks.gradients.optimisation.dropout import Masks
from milkglass.attacks.gradients.optimisation.lamp import begun, scaled
from milkglass.attacks.gradients.optimisation.optimising import AdamSchedule, Descent, Optimising
from milkglass.attacks.gradients.optimisation.problem import Frame, Problem
from milkglass.errors import UsageError
from milkglass.sequences import Ids, batched
from milkglass.threat.budget import Budget


@dataclass(frozen=True)
class GRAB(Optimising):
    """GRAB (Feng et al. 2024): matching gradients and dropout together, then a search among the tokens that were met.

    Attributes:
        starts, permutations: draws, and orders of the best one.
        steps, rate, decay: of Adam; the rate is multiplied by `decay` every 50 steps.
        l1: the weight of absolute differences.
        watch, pool, beam, sweeps, rounds: as above.
        first, last: see `Optimising`.
    """

    starts: int = 200
    permutations: int = 200
    steps: int = 1000
    rate: float = 0.01
    decay: float = 0.89
    l1: float = 0.01
    watch: int = 10
    pool: int = 40
    beam: int = 4
    sweeps: int = 2
    rounds: int = 1

    name = "grab"
    title = "Hybrid optimisation"
    paper = papers.GRAB.but(
        "Cut for a processor without a GPU: 200 orders of one start, 1,000 steps, one solution, two sweeps and one "
        "round, where the code has up to five of each.",
        "The search tries the 40 tokens that were nearest most often, not all that ever were.",
        "Starts and texts of the search are judged by the linear layers' gradients, without L1, and once each.",
        "A token of another place is also exchanged with the one that stands there, or put before it: by "
        "substitutions alone a wrong order is seldom left.",
        "Masks of dropout begin where the model is without dropout, and attention's own dropout is masked too.",
        "For the next token, which the paper does not attack, soft labels are worked out from the embeddings.",
    )

    def __post_init__(self) -> None:
        for name in ("starts", "permutations", "watch", "pool", "beam", "rounds"):
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"{name} is {value}", "give at least 1, or leave the default")

    def solve(self, batch: SharedBatch, frame: Frame, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        masks = Masks(batch.size) if batch.step.dropout else None
        problem = Problem(batch, Distance("norms", self.l1), frame, masks)
        x = scaled(problem, begun(problem, self.starts, self.permutations, budget.part(0.1), rng))
        met: Counter[int] = Counter()
        ids = problem.nearest(x)
        for number in range(self.rounds):
            turn = budget.part(1 / (self.rounds - number))
            x, met = self.descended(problem, x, met, turn.part(0.6))
            pool = [one for one, _ in met.most_common(self.pool)]
            ids = self.searched(problem, problem.nearest(x), pool, turn)
            x = problem.embeddings[torch.from_numpy(ids)]
        return problem.texts(ids)

    def descended(
        self, problem: Problem, start: torch.Tensor, met: Counter[int], budget: Budget
    ) -> tuple[torch.Tensor, Counter[int]]:
        """The best embeddings, and how often each token was nearest at a free place, those met before counted."""
        counts = met.copy()

        def between(descent: Descent) -> None:
            if descent.done % self.watch == 0:
                counts.update(_words(problem, problem.nearest(descent.x)))

        result = Descent(problem, start, AdamSchedule(self.steps, self.rate, self.decay)).run(budget, between)
        counts.update(_words(problem, problem.nearest(result)))
        return result, counts

    def searched(self, problem: Problem, ids: Ids, pool: list[int], budget: Budget) -> Ids:
        """(b, t): the best of the beam after all sweeps, or when there is no more time."""
        judged = {ids.tobytes(): float(problem.judged_ids(ids[None])[0])}
        beam = [ids]
        for _ in range(self.sweeps):
            before = beam[0].tobytes()
            for row in range(len(ids)):
                for place in problem.places(row).tolist():
                    beam = self.widened(problem, beam, (row, place), pool, judged, budget)
            if beam[0].tobytes() == before or budget.left() <= 0:
                break
        return beam[0]

    def widened(
        self,
        problem: Problem,
        beam: list[Ids],
        at: tuple[int, int],
        pool: list[int],
        judged: dict[bytes, float],
        budget: Budget,
    ) -> list[Ids]:
        """The best of the beam's texts and of those with another token at that place, best first."""
        every = {one.tobytes(): one for one in beam}
        for text in beam:
            for other in neighbours(text, at, problem.places(at[0]), pool):
                every[other.tobytes()] = other
        for part in batched([key for key in every if key not in judged], problem.together):
            if budget.left() <= 0:
                break
            values = problem.judged_ids(np.stack([every[key] for key in part]))
            judged.update(zip(part, values.tolist(), strict=True))
        known = [one for key, one in every.items() if key in judged]
        return sorted(known, key=lambda one: judged[one.tobytes()])[: self.beam]


def neighbours(text: Ids, at: tuple[int, int], places: Ids, pool: list[int]) -> Iterator[Ids]:
    """The texts (b, t) with another token at that place: from the pool, or from another place of the same text,
    exchanged with it or put before it."""
    row, place = at
    for token in pool:
        other = text.copy()
        other[at] = token
        yield other
    here = int(np.flatnonzero(places == place)[0])
    for there in range(len(places)):
        exchanged, moved = text.copy(), text.copy()
        exchanged[row, [place, places[there]]] = text[row, [places[there], place]]
        words = text[row, places]
        moved[row, places] = np.insert(np.delete(words, there), here, words[there])
        yield exchanged
        yield moved


def _words(problem: Problem, ids: Ids) -> list[int]:
    return [int(ids[row, place]) for row in range(len(ids)) for place in problem.places(row)]

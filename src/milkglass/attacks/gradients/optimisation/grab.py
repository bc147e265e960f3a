"""Matches gradients and dropout together, then searches among the tokens that were nearest: GRAB (Feng et al. 2024).

1. Start as in LAMP, then run Adam on the sum of the differences' norms (not squared) + 0.01 L1. If the client's step
   uses dropout, its masks are unknown too and are found with the embeddings (`Masks`).
2. Every `watch` steps, note the nearest token of each place. The `pool` most frequent ones are searched.
3. Beam search, place by place: put each of these tokens there, or one from another of the text's places, into each of
   the `beam` best texts, and keep the texts with the nearest gradients. Repeat `sweeps` times or until nothing changes.
4. Each further one of `rounds` rounds repeats this, from the embeddings of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from milkglass import papers
from milkglass.attacks.gradients.inversion import SharedBatch, require_positive
from milkglass.attacks.gradients.optimisation.descent import AdamSchedule, Descent, OptimisationAttack
from milkglass.attacks.gradients.optimisation.distance import Distance
from milkglass.attacks.gradients.optimisation.lamp import best_start, scale_to_mean_norm
from milkglass.attacks.gradients.optimisation.problem import Frame, Masks, Problem
from milkglass.sequences import Ids, batched
from milkglass.threat.budget import Budget


@dataclass(frozen=True)
class GRAB(OptimisationAttack):
    """Matches gradients with embeddings and dropout's masks, then searches among the tokens that were often nearest.

    Attributes:
        starts: the number of draws to begin with.
        permutations: the number of random orders of the best draw.
        steps: the number of steps of Adam.
        rate: Adam's learning rate at first.
        decay: what the rate is multiplied by every 50 steps.
        l1: the weight of the sum of absolute differences.
        watch: the nearest tokens are counted every so many steps.
        pool: how many tokens are tried at each place.
        beam: how many texts the search keeps.
        sweeps: how often the search goes through all places.
        rounds: how many descents are made, each with its search.
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
    paper = papers.GRAB.with_deviations(
        "Cut for a CPU: 200 orders of one start, 1,000 steps, one solution, two sweeps and one "
        "round, where the code has up to five of each.",
        "The search tries the 40 tokens that were nearest most often, not all that ever were.",
        "Starts and texts of the search are judged by the linear layers' gradients, without L1, and once each.",
        "A token of another place is also exchanged with the one that stands there, or moved to its place: by "
        "substitutions alone a wrong order is seldom left.",
        "Masks of dropout begin where the model is without dropout, and attention's own dropout is masked too.",
        "For the next token, which the paper does not attack, soft labels are worked out from the embeddings.",
    )

    def __post_init__(self) -> None:
        require_positive(self, "starts", "permutations", "watch", "pool", "beam", "rounds")

    def solve(self, batch: SharedBatch, frame: Frame, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        masks = Masks(batch.size) if batch.step.uses_dropout else None
        problem = Problem(batch, Distance("norms", self.l1), frame, masks)
        x = scale_to_mean_norm(problem, best_start(problem, self.starts, self.permutations, budget.part(0.1), rng))
        nearest_counts: Counter[int] = Counter()
        ids = problem.nearest(x)
        for index in range(self.rounds):
            round_budget = budget.part(1 / (self.rounds - index))
            x, nearest_counts = self.descend(problem, x, nearest_counts, round_budget.part(0.6))
            pool = [token for token, _ in nearest_counts.most_common(self.pool)]
            ids = self.search(problem, problem.nearest(x), pool, round_budget)
            x = problem.embeddings[torch.from_numpy(ids)]
        return problem.texts(ids)

    def descend(
        self, problem: Problem, start: torch.Tensor, nearest_counts: Counter[int], budget: Budget
    ) -> tuple[torch.Tensor, Counter[int]]:
        """Returns the best embeddings, and `nearest_counts` with how often each token was nearest at a free place.

        Args:
            problem: the gradients that are matched.
            start: (b, t, d) the embeddings to begin from.
            nearest_counts: how often each token was nearest in earlier rounds; it is not changed.
            budget: ends the descent.
        """
        counts = nearest_counts.copy()

        def count_tokens(descent: Descent) -> None:
            if descent.steps_done % self.watch == 0:
                counts.update(_tokens_at_free_places(problem, problem.nearest(descent.x)))

        embeddings = Descent(problem, start, AdamSchedule(self.steps, self.rate, self.decay)).run(budget, count_tokens)
        counts.update(_tokens_at_free_places(problem, problem.nearest(embeddings)))
        return embeddings, counts

    def search(self, problem: Problem, ids: Ids, pool: list[int], budget: Budget) -> Ids:
        """Returns (b, t) the ids of the beam with the nearest gradients, after all sweeps or when the budget is spent.

        Args:
            problem: the gradients that are matched.
            ids: (b, t) the texts to begin from.
            pool: the tokens that are tried at each place.
            budget: ends the search.
        """
        distances_by_batch = {ids.tobytes(): float(problem.distances_of_ids(ids[None])[0])}
        beam = [ids]
        for _ in range(self.sweeps):
            previous_best = beam[0].tobytes()
            for row in range(len(ids)):
                for place in problem.free_places(row).tolist():
                    beam = self.improve_beam(problem, beam, (row, place), pool, distances_by_batch, budget)
            if beam[0].tobytes() == previous_best or budget.left() <= 0:
                break
        return beam[0]

    def improve_beam(
        self,
        problem: Problem,
        beam: list[Ids],
        row_and_place: tuple[int, int],
        pool: list[int],
        distances_by_batch: dict[bytes, float],
        budget: Budget,
    ) -> list[Ids]:
        """Returns the beam after trying other tokens at one place, best first.

        Args:
            problem: the gradients that are matched.
            beam: the batches of texts (b, t) to change.
            row_and_place: which place of which text.
            pool: the tokens that are tried there.
            distances_by_batch: the distances known so far, by the bytes of the ids; new ones are added.
            budget: ends the search.
        """
        candidates = {ids.tobytes(): ids for ids in beam}
        for ids in beam:
            for neighbour in neighbours(ids, row_and_place, problem.free_places(row_and_place[0]), pool):
                candidates[neighbour.tobytes()] = neighbour
        for keys in batched([key for key in candidates if key not in distances_by_batch], problem.guesses_at_once):
            if budget.left() <= 0:
                break
            budget.spend(problem.work(len(keys)))
            distances = problem.distances_of_ids(np.stack([candidates[key] for key in keys]))
            distances_by_batch.update(zip(keys, distances.tolist(), strict=True))
        compared = [ids for key, ids in candidates.items() if key in distances_by_batch]
        return sorted(compared, key=lambda ids: distances_by_batch[ids.tobytes()])[: self.beam]


def neighbours(ids: Ids, row_and_place: tuple[int, int], free_places: Ids, pool: list[int]) -> Iterator[Ids]:
    """Yields copies of a batch of texts with another token at one place.

    The token comes from the pool, or from another place of the same text: then the two are exchanged, or it is moved
    here.

    Args:
        ids: (b, t) the texts of a batch.
        row_and_place: which place of which of them.
        free_places: the places of this text that are guessed.
        pool: the tokens that are tried.
    """
    row, place = row_and_place
    for token in pool:
        substituted = ids.copy()
        substituted[row_and_place] = token
        yield substituted
    index = int(np.flatnonzero(free_places == place)[0])
    for other_index in range(len(free_places)):
        exchanged, moved = ids.copy(), ids.copy()
        exchanged[row, [place, free_places[other_index]]] = ids[row, [free_places[other_index], place]]
        tokens = ids[row, free_places]
        moved[row, free_places] = np.insert(np.delete(tokens, other_index), index, tokens[other_index])
        yield exchanged
        yield moved


def _tokens_at_free_places(problem: Problem, ids: Ids) -> list[int]:
    """Returns the ids (b, t) at the places that are to be found, over all texts."""
    return [int(ids[row, place]) for row in range(len(ids)) for place in problem.free_places(row)]

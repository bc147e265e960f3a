"""The annealed mean field inside groups of candidates, where every id receives messages from its neighbours.

decipherment.py has the formula. All that does not change between sweeps is computed once: the public bigrams that a
scrambled one could be, and their counts over what chance would give. A sweep is then two `bincount`s and a logarithm
for each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.attacks.token_ids.decipherment.bigrams import Bigrams, Floats, PublicBigrams, summed
from milkglass.attacks.token_ids.decipherment.block_assignment import BigramJoin, BlockAssignment
from milkglass.attacks.token_ids.decipherment.profiles import Ratios

Between = tuple[float, float]  # at the first sweep and at the last, geometric in between


@dataclass(frozen=True)
class Schedule:
    """The annealing.

    Attributes:
        sweeps: their number.
        doubt: rho, the share of neighbours that are misread.
        temperature: of the soft assignment.
        inertia: the weight of the last sweep's belief.
    """

    sweeps: int
    doubt: Between
    temperature: Between
    inertia: float


def between(pair: Between, share: float) -> float:
    return float(pair[0] * (pair[1] / pair[0]) ** share)


class Message:
    """What the neighbours at one distance and side say about each reading.

    Attributes:
        slot, neighbour, strength: for each hit its slot, the neighbour's cell, and its strength.
        cell, counted, base, floor: for each slot, see `evidence`.
    """

    def __init__(
        self,
        blocks: BlockAssignment,
        join: BigramJoin,
        side: int,
        public: PublicBigrams,
        alpha: float,
        ratios: Ratios | None,
        weight: float,
    ) -> None:
        other = 1 - side
        self.slot, self.neighbour = join.hit_slot[side], join.hit_cell[other]
        self.strength = join.hit_count / (alpha * public.share[blocks.member[self.neighbour]])
        self.cell, self.counted = join.slot_cell[side], join.count[join.slot_edge[side]]
        self.counted *= weight
        self.base = public.counts[blocks.member[self.cell]]
        self.base += alpha
        np.divide(alpha, self.base, out=self.base)
        self.floor: NDArray[np.float32] | float = 1.0
        if ratios is not None:
            next_to = blocks.group[join.ends[other]][join.slot_edge[side]]
            self.floor = ratios.at(blocks.member[self.cell], next_to)

    def evidence(self, belief: Floats, doubt: float) -> Floats:
        """Returns (cells,) the evidence of the neighbours for each reading.

        It is the sum over neighbours of count * log(rho + (1 - rho) P(neighbour | reading) / P(neighbour)).
        Works in place, since a long text has ten million slots.
        """
        ratio = summed(self.slot, belief[self.neighbour] * self.strength, len(self.cell))
        ratio += self.floor
        ratio *= self.base
        ratio *= 1 - doubt
        ratio += doubt
        evidence = np.log(ratio, out=ratio)
        evidence *= self.counted
        return summed(self.cell, evidence, len(belief))


def messages_of(
    blocks: BlockAssignment,
    texts: Mapping[int, Bigrams],
    public: PublicBigrams,
    alpha: float,
    weights: Mapping[int, float],
    ratios: Mapping[tuple[int, int], Ratios],
) -> list[Message]:
    """Returns two messages for each distance, one from either side.

    Args:
        texts: the scrambled bigrams by distance.
        weights: of each distance.
    """
    result = []
    for distance, weight in weights.items():
        if weight:
            join = BigramJoin(blocks, texts[distance], public.bigrams[distance])
            result += [
                Message(blocks, join, side, public, alpha, ratios.get((distance, side)), weight) for side in (0, 1)
            ]
    return result


def settle(
    blocks: BlockAssignment,
    prior: Floats,
    messages: list[Message],
    patience: Floats,
    schedule: Schedule,
    step: Callable[[float], bool],
) -> Floats:
    """Returns (cells,) the final scores.

    Args:
        prior: (cells,) log-likelihoods from other sources.
        patience: (cells,) the factor that damps the evidence.
        step: receives the share that is done, returns whether to go on.
    """
    scores = prior
    belief = blocks.balanced(prior, schedule.temperature[0])
    for sweep in range(schedule.sweeps):
        share = sweep / max(schedule.sweeps - 1, 1)
        doubt = between(schedule.doubt, share)
        evidence = np.zeros(len(prior))
        for message in messages:
            evidence += message.evidence(belief, doubt)
        scores = prior + patience * evidence
        fresh = blocks.balanced(scores, between(schedule.temperature, share))
        belief = schedule.inertia * belief + (1 - schedule.inertia) * fresh
        if not step((sweep + 1) / schedule.sweeps):
            break
    return scores

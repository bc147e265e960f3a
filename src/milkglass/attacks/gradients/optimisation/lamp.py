"""LAMP (Balunovic et al. 2022): alternates matching gradients and reordering tokens, with a model of the language.

1. Take the draw from N(0, 1) with the smallest distance of `starts`, then the best of as many random orders of its
   places. Scale every place to the mean length of the table's embeddings.
2. Adam on the distance (cosine, section 4.1; or squares + 0.01 L1) plus a pull to that mean length, at a falling rate.
3. After a tenth of the steps, every `every` steps, try `proposals` other orders of each text (section 4.2: swap two
   tokens, move one, move a span, put a prefix at the end; special tokens and padding stay). Take the one with the least
   distance + language x mean negative log-likelihood of the nearest tokens (`Prior`).
4. Return the nearest tokens by cosine of the best embeddings seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import papers
from milkglass.attacks.gradients.inversion import SharedBatch
from milkglass.attacks.gradients.optimisation.distance import Distance
from milkglass.attacks.gradients.optimisation.optimising import AdamSchedule, Descent, Optimising, judged, nearest_guess
from milkglass.attacks.gradients.optimisation.problem import Frame, Problem
from milkglass.errors import UsageError
from milkglass.sequences import Ids, Sequences, looked_up
from milkglass.threat.budget import Budget

Floats = NDArray[np.float64]
NGRAM_ORDER = 3
BURN_IN = 0.1  # of the steps, before which no order is tried
PULL = {"cosine": 1.0, "squares": 25.0}  # LAMP's weights of the regulariser and of the language model, by distance
LANGUAGE = {"cosine": 0.2, "squares": 60.0}


class RunCounts:
    """How often each run of k ids occurs in a text.

    Attributes:
        keys: the runs as sorted numbers.
        times: how often each occurs.
        heads, after, kinds: the runs without their last id, how often they went on, and with how many different ids.
    """

    def __init__(self, runs: Ids, size: int) -> None:
        self.keys, self.times = np.unique(runs, return_counts=True)
        self.heads, head_of_run, self.kinds = np.unique(self.keys // size, return_inverse=True, return_counts=True)
        self.after = np.bincount(head_of_run, self.times, len(self.heads)).astype(np.int64)

    def probabilities(self, runs: Ids, size: int, lower: Floats) -> Floats:
        """Returns the probability of each run's last id, from the probabilities `lower` by shorter runs."""
        times = looked_up(self.keys, self.times, runs)
        after, kinds = (looked_up(self.heads, values, runs // size) for values in (self.after, self.kinds))
        return np.where(kinds > 0, (times + kinds * lower) / np.maximum(after + kinds, 1), lower)


class Prior:
    """The likelihood of a text in the attacker's language: a trigram model of public ids.

        p(c | a b) = (count(a b c) + kinds(a b) p(c | b)) / (count(a b) + kinds(a b))

    p(c | b) comes from p(c), and p(c) from 1/v, in the same way (Witten and Bell's interpolation): kinds(h) is the
    number of different ids seen after h. It has no parameters, and no text is impossible.

    Attributes:
        levels: the counts for runs of 1, 2 and 3 ids.
    """

    def __init__(self, corpus: Sequences, size: int) -> None:
        """Counts the runs of public ids below `size`."""
        self.levels, self.size = [RunCounts(_runs(corpus, k, size), size) for k in range(1, NGRAM_ORDER + 1)], size

    def cost(self, ids: Ids) -> float:
        """Returns the mean negative log-likelihood (nats) of a text's tokens; 0 for an empty text."""
        if not len(ids):
            return 0.0
        text = Sequences(ids, np.array([len(ids)]))
        p = np.full(len(ids), 1 / self.size)
        for k, level in enumerate(self.levels, start=1):
            p[k - 1 :] = level.probabilities(_runs(text, k, self.size), self.size, p[k - 1 :])
        return float(-np.log(p).mean())


def _runs(texts: Sequences, k: int, size: int) -> Ids:
    """Returns every run of k ids within one text as one number, (((a v) + b) v) + c."""
    ids, owner = texts.ids, texts.owner
    count = max(0, len(ids) - k + 1)
    runs = np.zeros(count, np.int64)
    for offset in range(k):
        runs = runs * size + ids[offset : offset + count]
    return np.asarray(runs[owner[:count] == owner[k - 1 : k - 1 + count]])


@dataclass(frozen=True)
class LAMP(Optimising):
    """The LAMP attack.

    Attributes:
        kind: "cosine", or "squares" with L1 (the paper's LAMP_cos and LAMP_L2+L1).
        starts: the number of draws, and of orders of the best one.
        steps, rate, decay: of Adam; the rate is multiplied by `decay` every 50 steps.
        every: steps between reorderings.
        proposals: orders that are tried for each text.
    """

    kind: Literal["cosine", "squares"] = "cosine"
    starts: int = 500
    steps: int = 2000
    rate: float = 0.01
    decay: float = 0.89
    every: int = 75
    proposals: int = 200

    name = "lamp"
    title = "Language model priors"
    paper = papers.LAMP.but(
        "The language model is an interpolated trigram of the attacker's public text, where the paper has a GPT-2; "
        "without public text there is none.",
        "Embeddings are pulled to the table's own mean length, which is 1.4 for the paper's model.",
        "Adam's moments move with the places that a proposal moves, which the code forgets.",
        "Each text of a batch keeps its own best proposal, where the code goes on from the text before.",
        "A rotation leaves padding where it is, which the code moves.",
        "Starts and orders are judged by the gradients of the linear layers, without L1, and the same order once.",
        "Ids of a tokenizer that stand for nothing are candidates too, which the code lists for BERT.",
        "For the next token, which the paper does not attack, soft labels are worked out from the embeddings.",
    )

    def __post_init__(self) -> None:
        if self.kind not in PULL:
            raise UsageError(f"the distance is {self.kind!r}", "cosine or squares")
        if min(self.starts, self.every) < 1:
            raise UsageError(f"{self.starts} starts, orders every {self.every} steps", "give at least 1 of each")

    def solve(self, batch: SharedBatch, frame: Frame, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        problem = Problem(batch, Distance(self.kind, 0.01 if self.kind == "squares" else 0.0), frame)
        prior = None if batch.corpus is None else Prior(batch.corpus, len(problem.embeddings))
        start = scaled(problem, best_start(problem, self.starts, self.starts, budget.part(0.2), rng))
        schedule = AdamSchedule(self.steps, self.rate, self.decay, pull=PULL[self.kind])

        def between(descent: Descent) -> None:
            if descent.steps_done >= BURN_IN * self.steps and descent.steps_done % self.every == 1 % self.every:
                self.reorder_texts(descent, prior, budget, rng)

        embeddings = Descent(problem, start, schedule).run(budget, between)
        return problem.texts(problem.nearest(embeddings))

    def reorder_texts(self, descent: Descent, prior: Prior | None, budget: Budget, rng: np.random.Generator) -> None:
        """Puts each text into the best of the proposed orders or its own."""
        problem = descent.problem
        for row, length in enumerate(problem.lengths):
            places, token_ids = problem.places(row), problem.nearest(descent.x)[row]
            orders = [np.arange(len(token_ids))]
            for free_order in proposals(len(places), self.proposals, rng):
                orders.append(orders[0].copy())
                orders[-1][places] = places[free_order]
            moved = (_reordered(descent.x.detach(), row, order) for order in orders)
            costs = [value for _, value in judged(problem, moved, budget)]
            if prior is not None:
                language_costs = [prior.cost(token_ids[order][:length]) for order in orders[: len(costs)]]
                costs = (np.array(costs) + LANGUAGE[self.kind] * np.array(language_costs)).tolist()
            descent.reorder(row, orders[int(np.argmin(costs))])


def _reordered(x: torch.Tensor, row: int, order: Ids) -> torch.Tensor:
    """Returns the embeddings with one text's places in another order."""
    moved = x.clone()
    moved[row] = x[row, torch.from_numpy(order)]
    return moved


def best_start(problem: Problem, starts: int, orders: int, budget: Budget, rng: np.random.Generator) -> torch.Tensor:
    """Returns the best of `starts` draws, then of `orders` random orders of its places, of all texts together."""
    best = nearest_guess(problem, (problem.noise(rng) for _ in range(starts)), budget.part(0.5))
    free_places = [problem.places(row) for row in range(len(best))]
    return nearest_guess(problem, [best, *(_shuffled(best, free_places, rng) for _ in range(orders))], budget)


def _shuffled(x: torch.Tensor, free_places: list[Ids], rng: np.random.Generator) -> torch.Tensor:
    """Returns the embeddings with the places of every text in a random order."""
    mixed = x.clone()
    for row, places_of_text in enumerate(free_places):
        mixed[row, places_of_text] = x[row, rng.permutation(places_of_text)]
    return mixed


def scaled(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """Returns the embeddings with every place at the mean length of the table's embeddings."""
    return x / x.norm(dim=2, keepdim=True).clamp_min(1e-12) * problem.mean_length


def swapped(count: int, rng: np.random.Generator) -> Ids:
    """Returns (count,) the order with two places exchanged."""
    order = np.arange(count)
    i, j = rng.choice(count, 2, replace=False)
    order[[i, j]] = order[[j, i]]
    return order


def span_moved(count: int, rng: np.random.Generator, longest: int | None = None) -> Ids:
    """Returns (count,) the order with a span of at most `longest` places, and fewer than all, moved elsewhere."""
    width = int(rng.integers(1, min(count - 1, longest or count - 1) + 1))
    start = int(rng.integers(count - width + 1))
    remaining = np.delete(np.arange(count), np.s_[start : start + width])
    target = int(rng.choice(np.delete(np.arange(len(remaining) + 1), start)))  # not where it was
    return np.insert(remaining, target, np.arange(start, start + width))


def rotated(count: int, rng: np.random.Generator) -> Ids:
    """Returns (count,) the order with a prefix put at the end."""
    return np.roll(np.arange(count), -int(rng.integers(1, count)))


token_moved = partial(span_moved, longest=1)  # one place put elsewhere
MOVES = (swapped, token_moved, span_moved, rotated)


def proposals(count: int, expected: int, rng: np.random.Generator) -> list[Ids]:
    """Returns at most `expected` different orders of `count` places but the identity, by all four moves in turn."""
    if count < 2:
        return []
    orders = [MOVES[number % len(MOVES)](count, rng) for number in range(expected)]
    return list({one.tobytes(): one for one in orders}.values())

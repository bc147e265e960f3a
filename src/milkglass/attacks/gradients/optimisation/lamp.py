"""Matches gradients and reorders tokens by a language model, in turn: LAMP (Balunovic et al. 2022).

1. Of `starts` draws from N(0, 1) take the one with the smallest distance, then the best of as many random orders of its
   places. Scale every place to the mean norm of the table's embeddings.
2. Adam on the distance (cosine, section 4.1; or squares + 0.01 L1) plus a pull to that mean norm, at a falling rate.
3. After a tenth of the steps, every `every` steps, try `proposals` other orders of each text (section 4.2: swap two
   tokens, move one, move a span, put a prefix at the end; special tokens and padding stay). Take the one with the least
   distance + LANGUAGE_WEIGHTS x mean negative log-likelihood of the nearest tokens (`LanguagePrior`).
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
from milkglass.attacks.gradients.optimisation.descent import (
    AdamSchedule,
    Descent,
    OptimisationAttack,
    nearest_guess,
    with_distances,
)
from milkglass.attacks.gradients.optimisation.distance import Distance
from milkglass.attacks.gradients.optimisation.problem import Frame, Problem
from milkglass.errors import UsageError
from milkglass.sequences import Ids, Sequences, look_up
from milkglass.threat.budget import Budget

Floats = NDArray[np.float64]
NGRAM_ORDER = 3  # ids of the longest n-gram
BURN_IN_SHARE = 0.1  # share of the steps before which no order is tried
NORM_WEIGHTS = {"cosine": 1.0, "squares": 25.0}  # LAMP's weight of the pull to the mean norm, by distance
LANGUAGE_WEIGHTS = {"cosine": 0.2, "squares": 60.0}  # LAMP's weight of the language model, by distance


class NgramCounts:
    """Counts how often each n-gram of one length occurs in a text. An n-gram is one number, as `_ngrams` makes it.

    Attributes:
        ngrams: the n-grams that occur, sorted.
        counts: how often each occurs.
        contexts: the n-grams without their last id, sorted.
        context_counts: how often each context occurs before some id.
        followers: how many different ids follow each context.
    """

    def __init__(self, ngrams: Ids, vocabulary: int) -> None:
        """Counts n-grams of ids below `vocabulary`."""
        self.ngrams, self.counts = np.unique(ngrams, return_counts=True)
        self.contexts, context_of_ngram, self.followers = np.unique(
            self.ngrams // vocabulary, return_inverse=True, return_counts=True
        )
        self.context_counts = np.bincount(context_of_ngram, self.counts, len(self.contexts)).astype(np.int64)

    def probabilities(self, ngrams: Ids, vocabulary: int, shorter_probabilities: Floats) -> Floats:
        """Returns (n,) the probability of the last id of each n-gram, given the ids before it.

        Args:
            ngrams: (n,) n-grams of this length.
            vocabulary: the number of ids.
            shorter_probabilities: (n,) the probabilities of the same ids, given one id fewer before them.
        """
        counts = look_up(self.ngrams, self.counts, ngrams)
        context_counts, followers = (
            look_up(self.contexts, values, ngrams // vocabulary) for values in (self.context_counts, self.followers)
        )
        interpolated = (counts + followers * shorter_probabilities) / np.maximum(context_counts + followers, 1)
        return np.where(followers > 0, interpolated, shorter_probabilities)


class LanguagePrior:
    """Measures how likely a text is in the attacker's language, by a trigram model of public ids.

        p(c | a b) = (count(a b c) + followers(a b) p(c | b)) / (count(a b) + followers(a b))

    p(c | b) comes from p(c), and p(c) from 1/v, in the same way (Witten and Bell's interpolation): followers(h) is the
    number of different ids seen after h. The model has no parameters, and no text is impossible.

    Attributes:
        counts_by_length: the counts of n-grams of 1, 2 and 3 ids.
        vocabulary: v, the number of ids.
    """

    def __init__(self, corpus: Sequences, vocabulary: int) -> None:
        """Counts the n-grams of a public text, whose ids are below `vocabulary`."""
        self.vocabulary = vocabulary
        self.counts_by_length = [
            NgramCounts(_ngrams(corpus, length, vocabulary), vocabulary) for length in range(1, NGRAM_ORDER + 1)
        ]

    def mean_negative_log_likelihood(self, ids: Ids) -> float:
        """Returns the mean negative log-likelihood (nats) of a text's tokens; 0 for an empty text."""
        if not len(ids):
            return 0.0
        text = Sequences(ids, np.array([len(ids)]))
        p = np.full(len(ids), 1 / self.vocabulary)
        for length, counts in enumerate(self.counts_by_length, start=1):
            ngrams = _ngrams(text, length, self.vocabulary)
            p[length - 1 :] = counts.probabilities(ngrams, self.vocabulary, p[length - 1 :])
        return float(-np.log(p).mean())


def _ngrams(texts: Sequences, length: int, vocabulary: int) -> Ids:
    """Returns every n-gram of `length` ids within one text as one number, (((a v) + b) v) + c for v = `vocabulary`."""
    ids, text_of_id = texts.ids, texts.sequence_indices
    count = max(0, len(ids) - length + 1)
    ngrams = np.zeros(count, np.int64)
    for offset in range(length):
        ngrams = ngrams * vocabulary + ids[offset : offset + count]
    is_within_one_text = text_of_id[:count] == text_of_id[length - 1 : length - 1 + count]
    return np.asarray(ngrams[is_within_one_text])


@dataclass(frozen=True)
class LAMP(OptimisationAttack):
    """Moves embeddings toward the shared gradients, and reorders tokens by a language model and the gradients.

    Attributes:
        kind: the distance between gradients: "cosine", or "squares" with L1 (the paper's LAMP_cos and LAMP_L2+L1).
        starts: the number of draws to begin with, and of random orders of the best draw.
        steps: the number of steps of Adam.
        rate: Adam's learning rate at first.
        decay: what the rate is multiplied by every 50 steps.
        every: the number of steps between reorderings.
        proposals: how many orders are tried for each text.

    Raises:
        UsageError: there is no such distance, or `starts` or `every` is below 1.
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
    paper = papers.LAMP.with_deviations(
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
        if self.kind not in NORM_WEIGHTS:
            raise UsageError(f"the distance is {self.kind!r}", "cosine or squares")
        if min(self.starts, self.every) < 1:
            raise UsageError(f"{self.starts} starts, orders every {self.every} steps", "give at least 1 of each")

    def solve(self, batch: SharedBatch, frame: Frame, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        problem = Problem(batch, Distance(self.kind, 0.01 if self.kind == "squares" else 0.0), frame)
        prior = None if batch.corpus is None else LanguagePrior(batch.corpus, len(problem.embeddings))
        start = scale_to_mean_norm(problem, best_start(problem, self.starts, self.starts, budget.part(0.2), rng))
        schedule = AdamSchedule(self.steps, self.rate, self.decay, norm_weight=NORM_WEIGHTS[self.kind])

        def reorder_when_due(descent: Descent) -> None:
            if descent.steps_done >= BURN_IN_SHARE * self.steps and descent.steps_done % self.every == 1 % self.every:
                self.reorder_texts(descent, prior, budget, rng)

        embeddings = Descent(problem, start, schedule).run(budget, reorder_when_due)
        return problem.texts(problem.nearest(embeddings))

    def reorder_texts(
        self, descent: Descent, prior: LanguagePrior | None, budget: Budget, rng: np.random.Generator
    ) -> None:
        """Puts each text of a guess into the order with the least cost: its own, or one that was proposed.

        Args:
            descent: the descent whose guess is reordered.
            prior: measures the likelihood of an order, or None if the distance decides alone.
            budget: ends the search.
            rng: draws the orders.
        """
        problem = descent.problem
        for row, length in enumerate(problem.lengths):
            free_places, token_ids = problem.free_places(row), problem.nearest(descent.x)[row]
            orders = [np.arange(len(token_ids))]
            for free_order in propose_orders(len(free_places), self.proposals, rng):
                orders.append(orders[0].copy())
                orders[-1][free_places] = free_places[free_order]
            guesses = (_reorder(descent.x.detach(), row, order) for order in orders)
            costs = [distance for _, distance in with_distances(problem, guesses, budget)]
            if prior is not None:
                language_losses = [
                    prior.mean_negative_log_likelihood(token_ids[order][:length]) for order in orders[: len(costs)]
                ]
                costs = (np.array(costs) + LANGUAGE_WEIGHTS[self.kind] * np.array(language_losses)).tolist()
            descent.reorder(row, orders[int(np.argmin(costs))])


def _reorder(x: torch.Tensor, row: int, order: Ids) -> torch.Tensor:
    """Returns the embeddings with one text's places in another order."""
    reordered = x.clone()
    reordered[row] = x[row, torch.from_numpy(order)]
    return reordered


def best_start(
    problem: Problem, start_count: int, order_count: int, budget: Budget, rng: np.random.Generator
) -> torch.Tensor:
    """Returns the nearest of `start_count` draws of all texts, or a nearer one in another order.

    Of its places, `order_count` random orders are tried.
    """
    best = nearest_guess(problem, (problem.random_embeddings(rng) for _ in range(start_count)), budget.part(0.5))
    free_places = [problem.free_places(row) for row in range(len(best))]
    return nearest_guess(problem, [best, *(_shuffle(best, free_places, rng) for _ in range(order_count))], budget)


def _shuffle(x: torch.Tensor, free_places: list[Ids], rng: np.random.Generator) -> torch.Tensor:
    """Returns the embeddings with the places of every text in a random order."""
    shuffled = x.clone()
    for row, places_of_text in enumerate(free_places):
        shuffled[row, places_of_text] = x[row, rng.permutation(places_of_text)]
    return shuffled


def scale_to_mean_norm(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """Returns the embeddings, each scaled to the mean norm of the table's embeddings."""
    return x / x.norm(dim=2, keepdim=True).clamp_min(1e-12) * problem.mean_norm


def swap_two(count: int, rng: np.random.Generator) -> Ids:
    """Draws a permutation (count,) of at least 2 places with two places exchanged."""
    order = np.arange(count)
    i, j = rng.choice(count, 2, replace=False)
    order[[i, j]] = order[[j, i]]
    return order


def move_span(count: int, rng: np.random.Generator, max_width: int | None = None) -> Ids:
    """Draws a permutation (count,) of at least 2 places with a span of them moved elsewhere.

    The span has at most `max_width` places, and fewer than all.
    """
    width = int(rng.integers(1, min(count - 1, max_width or count - 1) + 1))
    start = int(rng.integers(count - width + 1))
    remaining = np.delete(np.arange(count), np.s_[start : start + width])
    target = int(rng.choice(np.delete(np.arange(len(remaining) + 1), start)))  # not where it was
    return np.insert(remaining, target, np.arange(start, start + width))


def rotate(count: int, rng: np.random.Generator) -> Ids:
    """Draws a permutation (count,) of at least 2 places with a prefix put at the end."""
    return np.roll(np.arange(count), -int(rng.integers(1, count)))


move_token = partial(move_span, max_width=1)  # one place put elsewhere
MOVES = (swap_two, move_token, move_span, rotate)


def propose_orders(count: int, draw_count: int, rng: np.random.Generator) -> list[Ids]:
    """Draws random permutations (count,) of places by all four moves in turn, and returns the distinct ones.

    The identity is not among them.

    Args:
        count: the number of places.
        draw_count: how many permutations are drawn.
        rng: draws the permutations.
    """
    if count < 2:
        return []
    orders = [MOVES[index % len(MOVES)](count, rng) for index in range(draw_count)]
    return list({order.tobytes(): order for order in orders}.values())

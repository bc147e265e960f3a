"""Measures how much of a text an attacker recovered: shares of tokens, likeness of texts, and what guessing gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.metrics import text
from milkglass.metrics.interval import Interval, bootstrap, proportion, ratio
from milkglass.sequences import Ids, Sequences

RANKS = (1, 3, 10)
MAX_SAMPLED_TEXTS = 500  # the most texts compared by ROUGE and METEOR


@dataclass(frozen=True)
class Recovery:
    """Holds what was recovered: each measure with its interval, by name.

    Names are "tokens top-1", "content top-3", "vocabulary top-10", "rouge-1", "exact texts" and so on. A measure that
    the guess does not allow is absent: top-10 if the guess has fewer ids, the vocabulary if it is about places.
    """

    measures: dict[str, Interval]

    def __getitem__(self, name: str) -> Interval:
        return self.measures[name]


def token_accuracies(
    guess: Ids, truth: Sequences, is_counted: NDArray[np.bool_], rng: np.random.Generator
) -> dict[int, Interval]:
    """Returns the top-1, top-3 and top-10 accuracy over the running tokens that count, by the rank 1, 3 or 10.

    Args:
        guess: (total, k) the ids that are guessed for each token, the likeliest first. Ranks above k are left out.
        truth: the ids of the texts.
        is_counted: (total,) whether each token counts.
        rng: draws the bootstrap samples of texts.
    """
    is_right = guess == truth.ids[:, None]
    weights = np.bincount(truth.sequence_indices, weights=is_counted, minlength=len(truth)).astype(np.float64)
    by_rank = {}
    for k in RANKS:
        if k <= guess.shape[1]:
            hits = (is_right[:, :k].any(1) & is_counted).astype(np.float64)
            by_rank[k] = ratio(np.bincount(truth.sequence_indices, hits, len(truth)).astype(np.float64), weights, rng)
    return by_rank


def token_mean(
    values: NDArray[np.float64], truth: Sequences, is_counted: NDArray[np.bool_], rng: np.random.Generator
) -> Interval:
    """Returns the mean of values over the running tokens that count. Texts are resampled.

    Args:
        values: (total,) one for each running token.
        truth: the texts.
        is_counted: (total,) which tokens count.
        rng: draws the bootstrap samples of texts.
    """
    weights = np.bincount(truth.sequence_indices, weights=is_counted, minlength=len(truth)).astype(np.float64)
    sums = np.bincount(truth.sequence_indices, values * is_counted, len(truth)).astype(np.float64)
    nonzero = np.flatnonzero(weights)

    def statistic(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray((counts @ sums[nonzero]) / (counts @ weights[nonzero]))

    return bootstrap(statistic, len(nonzero), rng)


def vocabulary_accuracies(
    guess: Ids, true_ids: Ids, is_counted: NDArray[np.bool_], rng: np.random.Generator
) -> dict[int, Interval]:
    """Returns the top-1, top-3 and top-10 accuracy over the scrambled ids that count, by the rank 1, 3 or 10.

    Args:
        guess: (n, k) the public ids that are guessed for each scrambled id, the likeliest first.
        true_ids: (n,) the true public id of each scrambled id.
        is_counted: (n,) whether each scrambled id counts.
        rng: draws the bootstrap samples of scrambled ids.
    """
    is_right = guess == true_ids[:, None]
    return {k: proportion(is_right[is_counted, :k].any(1), rng) for k in RANKS if k <= guess.shape[1]}


def exact_share(guess: Ids, truth: Sequences, is_counted: NDArray[np.bool_], rng: np.random.Generator) -> Interval:
    """Returns the share of the sequences with counted tokens in which all of these are right.

    `guess` is (total,) the id that is guessed for each token.
    """
    wrong_counts = np.bincount(truth.sequence_indices, weights=(guess != truth.ids) & is_counted, minlength=len(truth))
    has_counted = np.bincount(truth.sequence_indices, weights=is_counted, minlength=len(truth)) > 0
    return proportion((wrong_counts == 0)[has_counted], rng)


def text_similarity(
    guess: Sequences, truth: Sequences, decode: Callable[[Ids], str], rng: np.random.Generator
) -> dict[str, Interval]:
    """Returns the mean ROUGE and METEOR of guessed texts against the true ones, both written by `decode`.

    Texts whose truth is empty are left out. Of more than MAX_SAMPLED_TEXTS texts, a sample from `rng` is compared.
    """
    selected = np.flatnonzero(truth.lengths)
    if len(selected) > MAX_SAMPLED_TEXTS:
        selected = np.sort(rng.choice(selected, MAX_SAMPLED_TEXTS, replace=False))
    guesses, originals = ([decode(ids) for ids in part.select(selected)] for part in (guess, truth))
    return text.mean_similarity(guesses, originals, rng)


def bag_scores(guess: tuple[Ids, ...], truth: Sequences, rng: np.random.Generator) -> dict[str, Interval]:
    """Returns micro-averaged precision, recall and F1 of each text's set of tokens.

    Raises ValueError if there is not one set for each text.

    Args:
        guess: one set of ids for each text.
        truth: the texts.
    """
    if len(guess) != len(truth):
        raise ValueError(f"{len(guess)} bags for {len(truth)} texts")
    sets = [
        (set(guessed_bag.tolist()), set(true_bag.tolist())) for guessed_bag, true_bag in zip(guess, truth, strict=True)
    ]
    common = np.array([len(guessed_bag & true_bag) for guessed_bag, true_bag in sets], np.float64)
    guessed = np.array([len(guessed_bag) for guessed_bag, _ in sets], np.float64)
    true_counts = np.array([len(true_bag) for _, true_bag in sets], np.float64)
    return {
        "bag precision": ratio(common, guessed, rng),
        "bag recall": ratio(common, true_counts, rng),
        "bag f1": ratio(2 * common, guessed + true_counts, rng),
    }


def whole_text_scores(
    guess: Sequences, truth: Sequences, batch_sizes: Ids, decode: Callable[[Ids], str], rng: np.random.Generator
) -> dict[str, Interval]:
    """Returns the recovery of whole texts, which an attacker guesses in any order within their batch.

    Each true text gets one guess of its batch, no guess twice, so that most tokens are shared (Kuhn's assignment). If
    each text could get its best guess, one good guess would be rewarded many times.

    "token recall" is the share of a text's tokens that its guess has, as often as the guess has them, at any place.
    "tokens top-1" is the share at their own place. "tokens named" is the share of a batch's different tokens that any
    of its guesses has: what is known of the batch without knowing which text a token is from.

    Raises ValueError if there is not one guess for each text, or the batch sizes do not add up to the texts.

    Args:
        guess: as many texts for each batch as it has.
        truth: the texts.
        batch_sizes: how many texts each batch has.
        decode: writes ids as text.
    """
    if len(guess) != len(truth) or int(batch_sizes.sum()) != len(truth):
        raise ValueError(f"{len(guess)} guesses for {len(truth)} texts in batches of {int(batch_sizes.sum())}")
    assigned = _assign(guess, truth, batch_sizes)
    shared = np.array([_shared_count(a, b) for a, b in zip(assigned, truth, strict=True)], np.float64)
    in_place = np.array([(a[: len(b)] == b[: len(a)]).sum() for a, b in zip(assigned, truth, strict=True)], np.float64)
    is_exact = [a.tobytes() == b.tobytes() for a, b in zip(assigned, truth, strict=True) if len(b)]
    lengths = truth.lengths.astype(np.float64)
    measures = {
        "token recall": ratio(shared, lengths, rng),
        "tokens top-1": ratio(in_place, lengths, rng),
        "tokens named": _named_share(guess, truth, batch_sizes, rng),
        "exact texts": proportion(np.array(is_exact), rng),
    }
    return measures | text_similarity(assigned, truth, decode, rng)


def _named_share(guess: Sequences, truth: Sequences, batch_sizes: Ids, rng: np.random.Generator) -> Interval:
    """Returns the share of the true texts' different tokens that the guesses of the same batch name."""
    guesses, truths, hits, counts = list(guess), list(truth), list[int](), list[int]()
    for start, size in zip(np.cumsum(batch_sizes) - batch_sizes, batch_sizes, strict=True):
        text_indices = range(int(start), int(start + size))
        true_tokens = {token for i in text_indices for token in truths[i].tolist()}
        hits.append(len(true_tokens & {token for i in text_indices for token in guesses[i].tolist()}))
        counts.append(len(true_tokens))
    return ratio(np.array(hits, np.float64), np.array(counts, np.float64), rng)


def _assign(guess: Sequences, truth: Sequences, batch_sizes: Ids) -> Sequences:
    """Returns the guesses in the order of the true texts that they are assigned to."""
    from scipy.optimize import linear_sum_assignment

    guesses, truths, order = list(guess), list(truth), []
    for start, size in zip(np.cumsum(batch_sizes) - batch_sizes, batch_sizes, strict=True):
        text_indices = range(int(start), int(start + size))
        gain = np.array([[_token_f1(guesses[i], truths[j]) for i in text_indices] for j in text_indices])
        order += [int(start + i) for i in linear_sum_assignment(gain, maximize=True)[1]]
    return guess.select(np.array(order, np.int64))


def _token_f1(first: Ids, second: Ids) -> float:
    """Returns F1 of the tokens that two texts share."""
    return 2 * _shared_count(first, second) / max(1, len(first) + len(second))


def _shared_count(first: Ids, second: Ids) -> int:
    """Returns how many tokens two texts share, each as often as both have it."""
    shared = Counter(first.tolist()) & Counter(second.tolist())
    return sum(shared.values())


def floor_accuracies(
    truth: Sequences, is_counted: NDArray[np.bool_], public: Ids | None, size: int
) -> dict[str, float]:
    """Returns the accuracy of two guesses that cost nothing: a random id of the vocabulary, and the commonest token.

    Args:
        truth: the ids of the texts.
        is_counted: (total,) whether each token counts.
        public: (n,) counts of public text, by which the commonest token is chosen. None takes the truth's own commonest
            token, which no attacker knows, so that the value is an upper bound of this floor.
        size: n, the number of ids of the vocabulary.
    """
    ids = truth.ids[is_counted]
    if not len(ids):
        return {"random guess": float("nan"), "commonest token": float("nan")}
    token_counts = np.bincount(ids)
    commonest = int(np.argmax(token_counts if public is None else public))
    return {"random guess": 1 / size, "commonest token": float((ids == commonest).mean())}


def constant_bag(texts: Sequences, is_counted: NDArray[np.bool_]) -> Ids:
    """Returns the set of ids that has the greatest F1 (`bag_scores`) if it is named for each of these texts.

    Args:
        texts: the texts by which it is chosen.
        is_counted: (n,) whether each id counts.
    """
    counted = texts.keep(is_counted[texts.ids])
    if not len(counted.ids):
        return np.empty(0, np.int64)
    pairs = np.unique(np.stack([counted.sequence_indices, counted.ids]), axis=1)
    text_counts = np.bincount(pairs[1], minlength=len(is_counted))
    order = np.argsort(-text_counts, kind="stable")
    common, named = np.cumsum(text_counts[order]), len(texts) * np.arange(1, len(order) + 1)
    best_size = int(np.argmax(2 * common / (named + pairs.shape[1]))) + 1
    return order[:best_size]


def floor_bag_scores(truth: Sequences, public: Sequences | None, is_counted: NDArray[np.bool_]) -> dict[str, Interval]:
    """Returns `bag_scores` of an attacker who names the same ids for each text, which costs nothing.

    Args:
        truth: the texts.
        public: the attacker's own text, by which these ids are chosen (`constant_bag`). None takes the truth, which no
            attacker knows, so that the values are upper bounds.
        is_counted: (n,) whether each id counts.
    """
    named = constant_bag(truth if public is None else public, is_counted)
    return bag_scores((named,) * len(truth), truth.keep(is_counted[truth.ids]), np.random.default_rng(0))

"""Finds where each token of a text was sent, from many texts and what was sent for each, without the client.

A client may send a text's ids or words in another order. If that order were not found, every token would be compared
with another one's place, and a client that hides nothing would look safe. What is sent for a token is mostly the same
in all texts: an order is better if one half of the texts tells more of what the other half sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from milkglass.sequences import Ids
from milkglass.threat.guess import NO_BELIEF

# The token ids of a text, and the ids that were sent for it
SentText = tuple[Ids, Ids]

MIN_GAIN = 0.1  # of all tokens: an order that predicts fewer more is taken for chance
DECIDING_TEXTS = 400  # at most so many texts decide on the order
MAX_CELLS = 1 << 21  # pairs of a token and a sent id in one text, from which a dictionary is learnt
EM_STEPS = 10
SAME_ID_WEIGHT = 20.0  # how much likelier a token is sent as itself, before anything is learnt
NEW_SAME_ID_SCORE = np.log(0.1)  # of a token and the same id, if the dictionary has no such pair
NO_PAIR_SCORE = np.log(1e-9)
IN_ORDER_BONUS = 1e-3  # decides between places that are equally likely
ROTATIONS = range(-3, 4)  # places by which all tokens may be moved on


def likeliest_places(texts: Sequence[SentText], orders: Sequence[Sequence[Ids]]) -> list[Ids]:
    """Returns where each token of some texts was sent, each an array (tokens,) of places or NO_BELIEF.

    Another order than the first is taken if it predicts MIN_GAIN more of the tokens. Beside the given orders, one is
    learnt for each text from which ids come with which tokens. That one has to predict as much more than it does of
    texts with what was sent for other texts, too.

    Args:
        texts: the tokens of each text, and what was sent for it.
        orders: the places of each text's tokens in each order. The first is the order of the text.
    """
    step = -(-len(texts) // DECIDING_TEXTS)
    sample = texts[::step]
    shares = [_predicted_share(_folds(sample, places[::step])) for places in orders]
    best = int(np.argmax(shares))
    if shares[best] - shares[0] <= MIN_GAIN:
        best = 0
    if shares[best] >= 1 - MIN_GAIN:
        return list(orders[best])
    shuffled = np.random.default_rng(0).permutation(len(sample))
    chance_texts = [(ids, sample[other][1]) for (ids, _), other in zip(sample, shuffled.tolist(), strict=True)]
    learnt_share = _predicted_share(_learnt_folds(sample, sample, orders[0][::step]))
    if learnt_share - shares[best] <= MIN_GAIN:
        return list(orders[best])
    if learnt_share - _predicted_share(_learnt_folds(sample, chance_texts, orders[0][::step])) <= MIN_GAIN:
        return list(orders[best])
    dictionary = _Dictionary.learn(texts)
    return [dictionary.places(*text, places) for text, places in zip(texts, orders[0], strict=True)]


def orders_of(count: int, first: int = 0, behind: int = 0) -> list[Ids]:
    """Returns the places of `count` tokens in their order, and then in others: backwards, moved on, or both.

    Args:
        first: how many tokens in front may have stayed where they are.
        behind: how many tokens at the end may have.
    """
    orders = [np.arange(count)]
    for start, end in ((0, count), (min(first, count), max(min(first, count), count - behind))):
        moved = np.arange(end - start)
        for rotation in ROTATIONS:
            for direction in (moved, moved[::-1]):
                places = np.arange(count)
                places[start:end] = start + (direction + rotation) % max(1, end - start)
                orders.append(places)
    return orders


# For each half of the texts: token ids and sent ids, pair by pair, of the other half; then of the half itself
_Folds = Iterator[tuple[Ids, Ids, Ids, Ids]]


def _folds(texts: Sequence[SentText], places: Sequence[Ids]) -> _Folds:
    pairs = [_pairs(texts[half::2], places[half::2]) for half in (0, 1)]
    yield (*pairs[1], *pairs[0])
    yield (*pairs[0], *pairs[1])


def _learnt_folds(known: Sequence[SentText], asked: Sequence[SentText], in_order: Sequence[Ids]) -> _Folds:
    """Yields the pairs of a half of `known`, then of the other half of `asked`, by a dictionary of the former."""
    for half in (0, 1):
        known_half, asked_half = (known[1 - half :: 2], in_order[1 - half :: 2]), (asked[half::2], in_order[half::2])
        dictionary = _Dictionary.learn(known_half[0])
        known_pairs, asked_pairs = (
            _pairs(texts, [dictionary.places(*text, places) for text, places in zip(texts, orders, strict=True)])
            for texts, orders in (known_half, asked_half)
        )
        yield (*known_pairs, *asked_pairs)


def _pairs(texts: Sequence[SentText], places: Sequence[Ids]) -> tuple[Ids, Ids]:
    """Returns the tokens of all texts and what was sent for each, NO_BELIEF where it was not sent."""
    sent_ids = [
        np.where(one == NO_BELIEF, NO_BELIEF, sent[one]) if len(sent) else np.full(len(one), NO_BELIEF)
        for (_, sent), one in zip(texts, places, strict=True)
    ]
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *(ids for ids, _ in texts)]), np.concatenate([empty, *sent_ids])


def _predicted_share(folds: _Folds) -> float:
    """Returns how well other texts predict tokens from what was sent for them, and the other way round.

    It is the mean of the shares of tokens and of sent ids that are the most frequent partner of the other one.
    """
    right_count = token_count = 0
    for known_tokens, known_sent, tokens, sent in folds:
        is_known, is_sent = known_sent != NO_BELIEF, sent != NO_BELIEF
        known, asked = (known_tokens[is_known], known_sent[is_known]), (tokens[is_sent], sent[is_sent])
        right_count += _predicted_count(*known, *asked) + _predicted_count(*known[::-1], *asked[::-1])
        token_count += len(tokens)
    return right_count / max(1, 2 * token_count)


def _predicted_count(known_values: Ids, known_ids: Ids, values: Ids, ids: Ids) -> int:
    """Returns how many of `values` are the most frequent known value of their id. A new id has itself as its value."""
    size = max(int(numbers.max(initial=0)) for numbers in (known_values, known_ids, values, ids)) + 1
    codes, counts = np.unique(known_ids * size + known_values, return_counts=True)
    by_count = codes[np.argsort(counts, kind="stable")]
    likeliest = np.arange(size)
    likeliest[by_count // size] = by_count % size
    return int(np.count_nonzero(likeliest[ids] == values))


@dataclass(frozen=True, eq=False)
class _Dictionary:
    """Holds how likely each token is sent as each id: model 1 of Brown et al. 1993, learnt in both directions.

    Attributes:
        size: above every id.
        codes: (pairs,) token * size + sent id, ascending.
        scores: (pairs,) the logarithm of the product of both conditional probabilities.
    """

    size: int
    codes: Ids
    scores: NDArray[np.float64]

    @classmethod
    def learn(cls, texts: Sequence[SentText]) -> _Dictionary:
        """Learns from texts in which any token may have come at any place."""
        size = max((int(max(ids.max(initial=0), sent.max(initial=0))) for ids, sent in texts), default=0) + 1
        empty = np.zeros(0, np.int64)
        cells, by_token, by_place = [empty], [empty], [empty]
        cell_count = token_count = place_count = 0
        for ids, sent in texts:
            cells.append((ids[:, None] * size + sent).ravel())
            by_token.append(token_count + np.repeat(np.arange(len(ids)), len(sent)))
            by_place.append(place_count + np.tile(np.arange(len(sent)), len(ids)))
            cell_count, token_count, place_count = (
                cell_count + len(cells[-1]), token_count + len(ids), place_count + len(sent)
            )  # fmt: skip
            if cell_count > MAX_CELLS:
                break
        codes, pair = np.unique(np.concatenate(cells), return_inverse=True)
        token, sent_id = codes // size, codes % size
        start = np.where(token == sent_id, SAME_ID_WEIGHT, 1.0)
        forward = _conditional(start, pair, np.concatenate(by_place), token)
        backward = _conditional(start, pair, np.concatenate(by_token), sent_id)
        return cls(size, codes, np.log(np.maximum(forward * backward, np.exp(NO_PAIR_SCORE))))

    def places(self, token_ids: Ids, sent: Ids, in_order: Ids) -> Ids:
        """Returns (tokens,) where each token was sent: the likeliest places, no two the same.

        Args:
            in_order: (tokens,) the places in the text's order, which decide between places that are equally likely.
        """
        places = np.full(len(token_ids), NO_BELIEF, np.int64)
        if not len(token_ids) or not len(sent):
            return places
        is_same: NDArray[np.bool_] = token_ids[:, None] == sent
        scores = np.full(is_same.shape, NO_PAIR_SCORE)
        scores[is_same] = NEW_SAME_ID_SCORE
        if len(self.codes):
            is_known = (token_ids[:, None] < self.size) & (sent < self.size)
            wanted = np.where(is_known, token_ids[:, None] * self.size + sent, -1)
            index = np.minimum(np.searchsorted(self.codes, wanted), len(self.codes) - 1)
            is_known = self.codes[index] == wanted
            scores[is_known] = self.scores[index][is_known]
        is_in_order = np.zeros(scores.shape, np.bool_)
        kept = np.flatnonzero((in_order != NO_BELIEF) & (in_order < len(sent)))
        is_in_order[kept, in_order[kept]] = True
        tokens, chosen = linear_sum_assignment(-(scores + IN_ORDER_BONUS * is_in_order))
        is_taken = (scores[tokens, chosen] > NO_PAIR_SCORE) | is_in_order[tokens, chosen]
        places[tokens[is_taken]] = chosen[is_taken]
        return places


def _conditional(start: NDArray[np.float64], pair: Ids, group: Ids, given: Ids) -> NDArray[np.float64]:
    """Returns (pairs,) the probability of each pair among those with the same `given` id, by EM.

    Args:
        start: (pairs,) weights to begin with.
        pair: (cells,) the pair of each cell.
        group: (cells,) the cells of which one is true have the same number.
        given: (pairs,) the id whose probabilities add up to 1.
    """
    weights = start
    for _ in range(EM_STEPS):
        share = weights[pair]
        share = share / np.bincount(group, share)[group]
        counts = np.bincount(pair, share, len(start))
        weights = counts / np.bincount(given, counts)[given]
    return weights

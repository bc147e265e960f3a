"""Finds where each token of a text was sent, from many texts and what was sent for each, without the client.

A client may send a text's ids, words or vectors in another order than that of the text. If that were not found, every
token would be compared with another one's place, and a client that hides nothing would look safe. What is sent for a
token is mostly the same in all texts, so that the right order shows: with it, one half of the texts predicts what was
sent in the other half.

The order of the text is tried, and others that are the same for every text: backwards, moved on by some places. If none
of them fits, an order of its own is sought for each text, by a dictionary that is learnt from all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from milkglass.progress import Progress, no_progress
from milkglass.sequences import Ids
from milkglass.threat.guess import NO_BELIEF

# The token ids of a text, and the ids that were sent for it
SentText = tuple[Ids, Ids]
# Takes a text's tokens and what was sent for it; returns (tokens,) the place of each token, or NO_BELIEF
Order = Callable[[Ids, Ids], Ids]

IN_ORDER, LEARNT = "in the text's order", "in an order of its own for each text"
DECIDING_TOKENS = 20_000  # tokens of the texts that decide on the order
MIN_GAIN, MIN_DEVIATIONS = 0.02, 4.0  # a mean gain over texts counts if it is above both; the second in standard errors
# One order for all texts is taken if it has this share of the gain of an order of its own for each text. For words the
# share is larger: by the longest common parts of two texts, any order of words has some gain.
MIN_FIXED_SHARE, MIN_FIXED_SHARE_OF_WORDS = 0.5, 0.75
MAX_CELLS = 6_000_000  # pairs of a token and an id that was sent for its text, from which a dictionary is learnt
EM_STEPS = 10
SAME_ID_WEIGHT = 20.0  # how much likelier a token is sent as itself, before anything is learnt
NEW_SAME_ID_SCORE = np.log(0.1)  # of a token and the same id, if the dictionary has no such pair
NO_PAIR_SCORE = np.log(1e-9)
IN_ORDER_BONUS = 1e-3  # decides between places that are equally likely
ROTATIONS = range(-3, 4)  # places by which all tokens may be moved on


@dataclass(frozen=True)
class Alignment:
    """Holds where the tokens of some texts were sent.

    Attributes:
        order: the name of the order.
        places: for each text (tokens,) the place of each token, or NO_BELIEF.
    """

    order: str
    places: list[Ids]


def align(
    texts: Sequence[SentText], orders: Mapping[str, Order], learns: bool = True,
    min_fixed_share: float = MIN_FIXED_SHARE, progress: Progress = no_progress,
) -> Alignment:  # fmt: skip
    """Returns the likeliest order of some texts, and the places of their tokens.

    The worth of an order is the share of tokens of one half of the texts that the other half predicts, less the share
    that it predicts if what was sent for each text is shuffled, or was sent for another text. If exactly a text's own
    ids were sent, each token is where its id is.

    Args:
        orders: orders that are the same for every text, by name. The first is taken if nothing speaks for another.
        learns: whether an order of its own for each text is tried, too.
        min_fixed_share: one order for all texts is taken if it has this share of that order's gain.
        progress: receives 1 for each text that is done.
    """
    sample, rng = _deciding_texts(texts), np.random.default_rng(0)
    shuffled = [(ids, rng.permutation(sent)) for ids, sent in sample]
    gains = {name: _gains(sample, shuffled, _fixed(order)) for name, order in orders.items()}
    first, best = next(iter(gains)), max(gains, key=lambda name: float(gains[name].sum()))
    if not _exceeds_chance(gains[best] - gains[first]):
        best = first
    order, name, text_order = orders[best], best, orders[first]
    if learns and len(sample) > 1:
        learnt_gains = _gains(
            sample, _with_what_others_sent(sample), lambda known: _Dictionary.learn(known).order(text_order)
        )
        is_fixed = _exceeds_chance(gains[best]) and gains[best].sum() >= min_fixed_share * learnt_gains.sum()
        if not is_fixed and _exceeds_chance(learnt_gains):
            order, name = _Dictionary.learn(texts).order(text_order), LEARNT
    places = list[Ids]()
    for text in texts:
        own_places = _places_of_own_ids(*text)
        places.append(order(*text) if own_places is None else own_places)
        progress(1)
    return Alignment(name, places)


def fixed_orders(first: int = 0, behind: int = 0) -> dict[str, Order]:
    """Returns the order of the text, and orders that move the tokens of any text alike, by name.

    Args:
        first: how many tokens in front may have stayed where they are.
        behind: how many tokens at the end may have.
    """
    orders: dict[str, Order] = {IN_ORDER: in_order}
    for kept, words in (((0, 0), ""), ((first, behind), ", but for special tokens")):
        for rotation in ROTATIONS:
            for is_backwards in (False, True):
                name = " and ".join(["backwards"] * is_backwards + [f"moved by {rotation}"] * (rotation != 0))
                if name:
                    orders.setdefault(name + words, _Moved(rotation, is_backwards, *kept))
    return orders


@dataclass(frozen=True)
class _Moved:
    """Moves all tokens but some at the ends, where as many ids as tokens were sent."""

    rotation: int
    is_backwards: bool
    first: int
    behind: int

    def __call__(self, token_ids: Ids, sent: Ids) -> Ids:
        start = min(self.first, len(token_ids))
        end = max(start, len(token_ids) - self.behind)
        moved = np.arange(end - start)[:: -1 if self.is_backwards else 1]
        places = np.arange(len(token_ids))
        places[start:end] = start + (moved + self.rotation) % max(1, end - start)
        return places


def in_order(token_ids: Ids, sent: Ids) -> Ids:
    """Returns the places of tokens that were sent one after the other."""
    return np.arange(len(token_ids))


def _places_of_own_ids(token_ids: Ids, sent: Ids) -> Ids | None:
    """Returns the places of a text's own ids if exactly these were sent, in whatever order, or None."""
    if len(token_ids) != len(sent):
        return None
    token_order, sent_order = np.argsort(token_ids, kind="stable"), np.argsort(sent, kind="stable")
    if not np.array_equal(token_ids[token_order], sent[sent_order]):
        return None
    places = np.empty(len(token_ids), np.int64)
    places[token_order] = sent_order
    return places


def _deciding_texts(texts: Sequence[SentText]) -> list[SentText]:
    """Returns texts from all parts of the sequence, with DECIDING_TOKENS in all or a few more."""
    chosen, count = list[SentText](), 0
    for index in np.random.default_rng(0).permutation(len(texts)).tolist():
        if count >= DECIDING_TOKENS:
            break
        if len(texts[index][0]) and len(texts[index][1]):
            chosen.append(texts[index])
            count += max(map(len, texts[index]))
    return chosen


def _with_what_others_sent(texts: Sequence[SentText]) -> list[SentText]:
    """Returns each text with what was sent for another one of about the same length."""
    by_length = np.argsort([len(sent) for _, sent in texts], kind="stable")
    other_of = dict(zip(by_length.tolist(), np.roll(by_length, 1).tolist(), strict=True))
    return [(ids, texts[other_of[index]][1]) for index, (ids, _) in enumerate(texts)]


def _exceeds_chance(gains: NDArray[np.float64]) -> bool:
    """Returns whether the mean of the texts' gains is above 0 by more than chance explains."""
    if len(gains) < 2:
        return False
    deviation = float(gains.std(ddof=1)) / np.sqrt(len(gains))
    return float(gains.mean()) > max(MIN_GAIN, MIN_DEVIATIONS * deviation)


def _fixed(order: Order) -> Callable[[Sequence[SentText]], Order]:
    """Returns a function that learns nothing from the known texts."""
    return lambda known: order


def _gains(
    texts: Sequence[SentText], chance_texts: Sequence[SentText], learn: Callable[[Sequence[SentText]], Order]
) -> NDArray[np.float64]:
    """Returns (texts,) how much more is predicted of each text than of the same one in `chance_texts`.

    Args:
        learn: returns an order, from texts that are not judged by it.
    """
    gains = np.zeros(len(texts))
    for half in (0, 1):
        known = texts[1 - half :: 2]
        if not known:
            continue
        order = learn(known)
        table = _Predictions.of([_pairs(text, order) for text in known])
        true, chance = (
            [table.share(*_pairs(text, order), len(text[0])) for text in judged[half::2]]
            for judged in (texts, chance_texts)
        )
        gains[half::2] = np.array(true) - np.array(chance)
    return gains


def _pairs(text: SentText, order: Order) -> tuple[Ids, Ids]:
    """Returns the tokens of a text that were sent, and what was sent for each."""
    token_ids, sent = text
    places = order(token_ids, sent)
    is_sent = places != NO_BELIEF
    return token_ids[is_sent], sent[places[is_sent]]


@dataclass(frozen=True, eq=False)
class _Predictions:
    """Predicts tokens from what was sent for them and the other way round: the most frequent partner in known texts.

    Attributes:
        token_of: the token that each sent id stands for most often; an id that is not in it stands for itself.
        sent_of: what each token was sent as most often; a token that is not in it is sent as itself.
    """

    token_of: Mapping[int, int]
    sent_of: Mapping[int, int]

    @classmethod
    def of(cls, pairs: Sequence[tuple[Ids, Ids]]) -> _Predictions:
        """Counts the pairs of tokens and sent ids of known texts."""
        empty = np.zeros(0, np.int64)
        tokens, sent = (np.concatenate([empty, *(pair[side] for pair in pairs)]) for side in (0, 1))
        return cls(_commonest(sent, tokens), _commonest(tokens, sent))

    def share(self, tokens: Ids, sent: Ids, token_count: int) -> float:
        """Returns the mean of the shares of a text's tokens and of its sent ids that are predicted right."""
        right_count = sum(
            (self.token_of.get(there, there) == here) + (self.sent_of.get(here, here) == there)
            for here, there in zip(tokens.tolist(), sent.tolist(), strict=True)
        )
        return right_count / (2 * token_count)


def _commonest(names: Ids, values: Ids) -> dict[int, int]:
    """Returns the most frequent of `values` for each of `names`."""
    pairs, counts = np.unique(np.stack([names, values], 1), axis=0, return_counts=True)
    return dict(pairs[np.argsort(counts, kind="stable")].tolist())


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
        """Learns from texts in which any token may have come at any place, as long as they have MAX_CELLS pairs."""
        size = max((int(max(ids.max(initial=0), sent.max(initial=0))) for ids, sent in texts), default=0) + 1
        cells, tokens, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        token_weights, place_weights = [np.zeros(0)], [np.zeros(0)]
        cell_count = token_count = place_count = 0
        for token_ids, sent in texts:
            ids, id_counts = np.unique(token_ids, return_counts=True)
            sent_ids, sent_counts = np.unique(sent, return_counts=True)
            if cell_count + len(ids) * len(sent_ids) > MAX_CELLS:
                continue
            cells.append((ids[:, None] * size + sent_ids).ravel())
            tokens.append(token_count + np.repeat(np.arange(len(ids)), len(sent_ids)))
            places.append(place_count + np.tile(np.arange(len(sent_ids)), len(ids)))
            token_weights.append(np.repeat(id_counts, len(sent_ids)).astype(np.float64))
            place_weights.append(np.tile(sent_counts, len(ids)).astype(np.float64))
            cell_count += len(cells[-1])
            token_count, place_count = token_count + len(ids), place_count + len(sent_ids)
        codes, pair = np.unique(np.concatenate(cells), return_inverse=True)
        by_token, by_place = np.concatenate(tokens), np.concatenate(places)
        of_token, of_place = np.concatenate(token_weights), np.concatenate(place_weights)
        start = np.where(codes // size == codes % size, SAME_ID_WEIGHT, 1.0)
        forward = _conditional(start, pair, by_place, of_token, of_place, codes // size)
        backward = _conditional(start, pair, by_token, of_place, of_token, codes % size)
        return cls(size, codes, np.log(np.maximum(forward * backward, np.exp(NO_PAIR_SCORE))))

    def order(self, text_order: Order) -> Order:
        """Returns the order that has the likeliest places of each text, no two the same.

        Args:
            text_order: decides between places that are equally likely.
        """
        return lambda token_ids, sent: self._places(token_ids, sent, text_order(token_ids, sent))

    def _places(self, token_ids: Ids, sent: Ids, usual_places: Ids) -> Ids:
        places = np.full(len(token_ids), NO_BELIEF, np.int64)
        if not len(token_ids) or not len(sent):
            return places
        is_same: NDArray[np.bool_] = token_ids[:, None] == sent
        scores = np.full(is_same.shape, NO_PAIR_SCORE)
        scores[is_same] = NEW_SAME_ID_SCORE
        if len(self.codes):
            is_in_range = (token_ids[:, None] < self.size) & (sent < self.size)
            wanted = np.where(is_in_range, token_ids[:, None] * self.size + sent, -1)
            index = np.minimum(np.searchsorted(self.codes, wanted), len(self.codes) - 1)
            is_known = self.codes[index] == wanted
            scores[is_known] = self.scores[index][is_known]
        is_usual = np.zeros(scores.shape, np.bool_)
        kept = np.flatnonzero((usual_places != NO_BELIEF) & (usual_places < len(sent)))
        is_usual[kept, usual_places[kept]] = True
        tokens, chosen = linear_sum_assignment(-(scores + IN_ORDER_BONUS * is_usual))
        is_taken = (scores[tokens, chosen] > NO_PAIR_SCORE) | is_usual[tokens, chosen]
        places[tokens[is_taken]] = chosen[is_taken]
        return places


def _conditional(
    start: NDArray[np.float64], pair: Ids, group: Ids, weights: NDArray[np.float64], counts: NDArray[np.float64],
    given: Ids,
) -> NDArray[np.float64]:  # fmt: skip
    """Returns (pairs,) the probability of each pair among those with the same `given` id, by EM.

    Args:
        start: (pairs,) weights to begin with.
        pair: (cells,) the pair of each cell.
        group: (cells,) the number of what is explained, such as a sent id of a text: one of its cells is true.
        weights: (cells,) how often what explains it is in the text.
        counts: (cells,) how often what is explained is in the text.
        given: (pairs,) the id whose probabilities add up to 1.
    """
    probabilities = start
    for _ in range(EM_STEPS):
        share = np.maximum(weights * probabilities[pair], np.finfo(np.float64).tiny)
        share = counts * share / np.bincount(group, share)[group]
        expected = np.bincount(pair, share, len(start))
        probabilities = expected / np.bincount(given, expected)[given]
    return probabilities

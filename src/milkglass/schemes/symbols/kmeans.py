"""Finds symbols by weighted k-means with a price on frequency, over vectors of tokens and what their labels say.

    token t goes to the symbol j of least  |x_t - c_j|^2 + price_j
    c_j = mean of its tokens, weighted by sqrt(mass_t)
    price_j <- 0.7 price_j + 0.3 P log(m load_j + 0.05),    load_j the symbol's share of all mass, P `mass_price`

mass_t is the frequency of token t, m the number of symbols, c the number of tokens that are clustered.
x_t is a token's vector, centred and of length 1, followed by `label_weight` times its label score. The first centres
are tokens drawn with probabilities proportional to sqrt(mass), without replacement.

The label score of a token is what its presence says about the label, by the client's own rows (naive Bayes). With
c_k(t) the number of texts of class k that contain t, n_k that of all texts of class k, and "other" all other classes,

    score_k(t) = log (c_k + 1) / (n_k + 2) - log (c_other + 1) / (n_other + 2)       (add-one smoothing)

times trust(t) = c / (c + 4), c = c_k + c_other, since a token that was seen once says little. There is one coordinate a
class, divided by sqrt(2): with two classes the coordinates are opposite, and distances are those of one log odds. For a
regression there is one coordinate, the mean score of the texts with the token, times trust. A token in fewer than two
texts takes 0.7 times the mean of all tokens that occur in labelled texts, itself too if it occurs in one, weighted by
trust and exp(12 (cos - 1)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.parameters import limited_field
from milkglass.progress import Progress
from milkglass.schemes.mixture import Draws, Ids
from milkglass.schemes.symbols.finder import (
    Evidence,
    Floats,
    FoundSymbols,
    MapFinder,
    TaskTexts,
    VectorSource,
    thousandths,
)

DISTANCE_BLOCK_ROWS = 4096  # rows of distances held at a time
PRICE_MOMENTUM = 0.7  # share of the last round's price that stays
LOAD_FLOOR = 0.05  # added to each m load
PRIOR_TEXTS = 4.0  # the number of texts with a token at which trust is one half
SEEN_TRUST = 0.3  # above this trust a token keeps its own score: tokens in two or more texts do
KERNEL_SHARPNESS = 12.0  # factor of cosines in the kernel that weighs neighbours
NEIGHBOUR_SHARE = 0.7  # factor of the score that neighbours give
COSINE_BLOCK_ROWS = 1024  # rows of cosines held at a time


@dataclass(frozen=True)
class KMeans(MapFinder):
    """Finds symbols by k-means with a price on frequency.

    Attributes:
        vectors: each token alone through the public encoder, mean of its last states ("encoder"), or its row of the
            input table ("table").
        label_weight: the weight of the label score; 0: labels are not used.
        mass_price: the price of a symbol with more than its share of running text; 0: none.
        rounds: the number of rounds of assignment.
    """

    vectors: VectorSource = "encoder"
    label_weight: float = limited_field(1.0)
    mass_price: float = limited_field(0.3)
    rounds: int = limited_field(25, least=1)

    def find(
        self, evidence: Evidence, tokens: Ids, mass: NDArray[np.float64], symbol_count: int,
        draws_for: Callable[[str], Draws], progress: Progress,
    ) -> FoundSymbols:  # fmt: skip
        """Returns the clusters. Draws from "symbols/start"."""
        points, clusters = self.points(evidence)[tokens], Clusters(tokens, mass, symbol_count)
        start_draws = draws_for("symbols/start")
        clusters.draw_centres(points, start_draws)
        for index in range(self.rounds):
            clusters.run_round(points, self.mass_price, start_draws)
            progress(thousandths(index + 1, self.rounds))
        return FoundSymbols(clusters.symbol_of_token, points)

    def points(self, evidence: Evidence) -> Floats:
        """Returns (n, f) x_t of all tokens."""
        unit_vectors = centre_and_normalise(evidence.vectors(self.vectors))
        if not self.label_weight or evidence.labelled is None:
            return unit_vectors
        scores, trust = label_scores(evidence.labelled, len(unit_vectors))
        weighted_scores = np.float32(self.label_weight) * with_neighbours(scores, trust, unit_vectors)
        return np.concatenate([unit_vectors, weighted_scores], axis=1)


class Clusters:
    """Finds symbols round by round, and holds their centres, tokens and prices.

    Attributes:
        tokens: (c,) the ids of the tokens that are clustered.
        mass, weights: (c,) the frequency of each token, above 0, and its square root.
        symbol_of_token: (c,) the symbol of each token.
        centres: (m, f) the centre of each symbol. None: not drawn yet.
        price: (m,) the price of each symbol.
    """

    def __init__(self, tokens: Ids, mass: NDArray[np.float64], symbol_count: int) -> None:
        self.tokens, self.mass, self.weights = tokens, mass, np.sqrt(mass)
        self.centres: Floats | None = None
        self.symbol_of_token, self.price = np.zeros(len(tokens), np.int64), np.zeros(symbol_count)

    def symbol_of_all_tokens(self, n: int) -> Ids:
        """Returns (n,) the symbol of each token, 0 for tokens that are not clustered."""
        symbols = np.zeros(n, np.int64)
        symbols[self.tokens] = self.symbol_of_token
        return symbols

    def draw_centres(self, points: Floats, draws: Draws) -> None:
        """Draws centres among the points (c, f)."""
        self.centres = points[sample_without_replacement(self.weights, len(self.price), draws)].copy()

    def run_round(self, points: Floats, price_factor: float, draws: Draws) -> None:
        """Makes one round. A symbol without tokens is drawn again. `price_factor` is P of the module."""
        assert self.centres is not None
        symbol_count = len(self.price)
        self.symbol_of_token = cheapest_symbols(points, self.centres, self.price)
        total_weight = np.bincount(self.symbol_of_token, self.weights, symbol_count)
        self.centres = sum_by_symbol(
            points * self.weights[:, None].astype(np.float32), self.symbol_of_token, symbol_count
        )
        self.centres /= np.maximum(total_weight, 1e-12)[:, None].astype(np.float32)
        if len(empty_symbols := np.flatnonzero(total_weight == 0)):
            self.centres[empty_symbols] = points[sample_without_replacement(self.weights, len(empty_symbols), draws)]
        mass = np.bincount(self.symbol_of_token, self.mass, symbol_count).astype(np.float64)
        self.price = next_price(self.price, mass, price_factor)


def centre_and_normalise(vectors: Floats) -> Floats:
    """Returns (n, d) x_t: the vectors less their mean, then scaled to length 1."""
    difference = vectors.astype(np.float32) - vectors.astype(np.float32).mean(0)
    unit: Floats = difference / (np.linalg.norm(difference, axis=1, keepdims=True) + 1e-9)
    return unit


def cheapest_symbols(points: Floats, centres: Floats, price: NDArray[np.float64]) -> Ids:
    """Returns (c,) the cheapest symbol of each token; ties go to the lower number.

    |x|^2 is left out, since it is equal for all symbols.
    """
    offsets = (centres.astype(np.float64) ** 2).sum(1) + price
    cheapest = [
        (offsets - 2.0 * (points[start : start + DISTANCE_BLOCK_ROWS] @ centres.T)).argmin(1)
        for start in range(0, len(points), DISTANCE_BLOCK_ROWS)
    ]
    return np.concatenate(cheapest).astype(np.int64)


def next_price(price: NDArray[np.float64], mass: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Returns (m,) the prices of the next round.

    Args:
        price: (m,) the prices of this round.
        mass: (m,) how much each symbol has.
        factor: P of the module.
    """
    load = mass / mass.sum()
    return PRICE_MOMENTUM * price + (1 - PRICE_MOMENTUM) * factor * np.log(load * len(load) + LOAD_FLOOR)


def sum_by_symbol(rows: Floats, symbol_of_row: Ids, symbol_count: int) -> Floats:
    """Returns (m, f) the sum of the rows of each symbol.

    Args:
        rows: (c, f) one for each token.
        symbol_of_row: (c,) its symbol.
        symbol_count: m.
    """
    summed = np.zeros((symbol_count, rows.shape[1]), np.float32)
    np.add.at(summed, symbol_of_row, rows)
    return summed


def sample_without_replacement(weights: NDArray[np.float64], count: int, draws: Draws) -> Ids:
    """Returns `count` indices, drawn without replacement in proportion to their weights (exponential keys)."""
    arrivals = -np.log(draws.uniform(len(weights))) / weights
    return np.argsort(arrivals, kind="stable")[:count].astype(np.int64)


def label_scores(labelled: TaskTexts, token_count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns (n, f) the scores times trust, and (n,) the trust."""
    # a token counts once a text
    text_token_keys = np.unique(labelled.texts.sequence_indices * token_count + labelled.texts.ids)
    text, token = text_token_keys // token_count, text_token_keys % token_count
    text_counts = np.bincount(token, minlength=token_count).astype(np.float64)
    trust = text_counts / (text_counts + PRIOR_TEXTS)
    if labelled.class_count == 0:
        total = np.bincount(token, labelled.labels[text], token_count)
        return (trust * total / np.maximum(text_counts, 1))[:, None], trust
    columns = []
    for class_index in range(labelled.class_count):
        has_label = labelled.labels == class_index
        with_label, label_count = np.bincount(token, has_label[text], token_count), int(has_label.sum())
        without_label = text_counts - with_label
        other_count = len(has_label) - label_count
        log_odds = np.log((with_label + 1) / (label_count + 2)) - np.log((without_label + 1) / (other_count + 2))
        columns.append(trust * log_odds / np.sqrt(2))
    return np.stack(columns, axis=1), trust


def with_neighbours(scores: NDArray[np.float64], trust: NDArray[np.float64], unit_vectors: Floats) -> Floats:
    """Returns (n, f) the scores, in which rare tokens have those of their neighbours.

    Args:
        scores: (n, f) the scores times trust.
        trust: (n,) the trust; 0 for tokens that have no score.
        unit_vectors: (n, d) what tokens are compared by.
    """
    scored, filled = np.flatnonzero(trust > 0), scores.copy()
    rare = np.flatnonzero(trust <= SEEN_TRUST)
    if not len(scored):
        return filled.astype(np.float32)
    scored_vectors = unit_vectors[scored]
    for start in range(0, len(rare), COSINE_BLOCK_ROWS):
        block = rare[start : start + COSINE_BLOCK_ROWS]
        weights = np.exp(KERNEL_SHARPNESS * (unit_vectors[block] @ scored_vectors.T - 1)) * trust[scored]
        filled[block] = NEIGHBOUR_SHARE * (weights @ scores[scored]) / (weights.sum(1, keepdims=True) + 1e-9)
    return filled.astype(np.float32)

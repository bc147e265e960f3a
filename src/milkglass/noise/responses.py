"""Replaces values by randomised response: sends a value unchanged, or one of the m - 1 others, all equally likely.

    P(y | x) = 1 / (1 + (m - 1) w)  for y = x,     w / (1 + (m - 1) w)  for every other y,     w >= exp(-epsilon)

(Warner, JASA 1965; for m values Kairouz, Bonawitz and Ramage, ICML 2016, section 3.2). For any two values x, x' and any
y the probabilities differ by a factor of at most exp(epsilon), and posterior odds differ from prior odds by at most the
same factor. The mechanism is (epsilon, 0) locally differentially private. Probabilities are ratios of integers, with w
rounded up, drawn exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.noise.stream import Stream

Ids = NDArray[np.int64]
TRUE_VALUE_WEIGHT = 1 << 44  # the weight of the true value


@dataclass(frozen=True, eq=False)
class RandomisedResponse:
    """Replaces values by randomised response; a value outside `values` is sent unchanged.

    Attributes:
        values: (m,) the values that are replaced by each other, ascending.
        epsilon: the epsilon of one response.
    """

    values: Ids
    epsilon: float

    @property
    def other_weight(self) -> int:
        """Returns the weight of each other value, w times TRUE_VALUE_WEIGHT, rounded up."""
        return min(TRUE_VALUE_WEIGHT, math.ceil(TRUE_VALUE_WEIGHT * math.exp(-self.epsilon)) + 1)

    @property
    def keep_probability(self) -> float:
        """Returns P(y | x) for y = x, the probability that a value is sent unchanged."""
        return TRUE_VALUE_WEIGHT / self._total_weight

    @property
    def log_likelihood_ratio(self) -> float:
        """Returns the log of P(x | x) / P(y | x) for y != x: epsilon, as far as integers can express it."""
        return math.log(TRUE_VALUE_WEIGHT / self.other_weight)

    @property
    def noise_bits(self) -> float:
        """Returns H(y | x) in bits, the entropy of the response given the value."""
        m, p = len(self.values), self.keep_probability
        if m < 2:
            return 0.0
        return -p * math.log2(p) - (1 - p) * math.log2((1 - p) / (m - 1))

    def respond(self, ids: NDArray[np.integer], stream: Stream) -> Ids:
        """Returns (t,) the values that are sent in place of the values `ids` (t,)."""
        responses = np.asarray(ids, np.int64).copy()
        value_index = np.searchsorted(self.values, responses).clip(max=max(0, len(self.values) - 1))
        is_exchangeable = (
            self.values[value_index] == responses if len(self.values) else np.zeros(len(responses), np.bool_)
        )
        exchangeable_positions = np.flatnonzero(is_exchangeable)
        draws = stream.integers(self._total_weight, len(exchangeable_positions))
        is_changed = draws >= TRUE_VALUE_WEIGHT
        offset = 1 + (draws[is_changed] - TRUE_VALUE_WEIGHT) // self.other_weight
        changed_positions = exchangeable_positions[is_changed]
        responses[changed_positions] = self.values[(value_index[changed_positions] + offset) % len(self.values)]
        return responses

    def expected_counts(self, occurrences: NDArray[np.number]) -> NDArray[np.float64]:
        """Returns (size,) how often each value is sent on average, for values that occur `occurrences` (size,) times.

        Both arrays have the same sum.
        """
        sent_counts = np.asarray(occurrences, np.float64).copy()
        counts = sent_counts[self.values]
        other_probability = (1 - self.keep_probability) / max(1, len(self.values) - 1)
        sent_counts[self.values] = counts * self.keep_probability + (counts.sum() - counts) * other_probability
        return sent_counts

    @property
    def _total_weight(self) -> int:
        """Returns the sum of the weights of all values that may be sent for one value."""
        return TRUE_VALUE_WEIGHT + max(0, len(self.values) - 1) * self.other_weight

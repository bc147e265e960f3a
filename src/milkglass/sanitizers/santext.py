"""Draws a substitute from the whole vocabulary, the likelier the nearer: SANTEXT (Yue et al., ACL Findings 2021).

    p(y | x) = exp(-eps/2 |x - y|) / sum over y' of exp(-eps/2 |x - y'|)         Euclidean, y = x included

This is the exponential mechanism with the score -|x - y|, and metric local DP: for all words x, x' and y, p(y | x) <=
exp(eps |x - x'|) p(y | x'). SANTEXT+ (Algorithm 2) always replaces sensitive words, and others with probability p; its
y are only the sensitive words of the corpus. `SubstituteSampler` draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from milkglass import papers
from milkglass.accounting import format_epsilon
from milkglass.errors import UsageError
from milkglass.nearest.select import k_largest
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.sanitizers.method import SanitizerMethod, SparingMethod
from milkglass.sanitizers.sanitizer import UNKNOWN, Sanitizer, SparingRule
from milkglass.sanitizers.table import Ids, Mask, Vectors, WordVectors

HEAD_WORDS = 64  # the nearest words, which are drawn by their own probabilities
SAMPLE_WORDS = 256  # the sample to which g is the mean distance
WORDS_AT_A_TIME = 64  # words prepared at a time
TRIALS_AT_A_TIME = 8192  # proposals drawn at a time, over all words
MAX_TRIALS = 256  # trials for one word, after which its tail is drawn from in full
ENVELOPE_SLACK = 1e-3  # added to c_x, which comes from rounded distances, in units of the largest norm


class SubstituteSampler:
    """Draws substitutes exactly, and without a row of the whole vocabulary for each word.

    The nearest HEAD_WORDS are drawn by their own probabilities. The rest, the tail, is drawn by rejection from q(y) ~
    exp(-eps/2 g(y)), with g(y) the mean distance of y to a sample, accepted with exp(-eps/2 (|x - y| - g(y) + c_x)),
    where c_x is the largest g(y) - |x - y| of the tail. The numbers come from a ChaCha20 stream, 52 bits each:
    probabilities are those of fp64, and below 2^-52 nothing is drawn. What a word needs (its head, the head's share of
    the mass, c_x) is computed once, when the word first occurs. Place m is the mean, for unknown words.

    Attributes:
        vectors: (m, d) the words that are replaced, relative to their mean.
        outputs: (outputs,) the places that may be drawn.
        targets: (outputs, d) their vectors.
        near: (m + 1, k) the head of each place, as indices of `outputs`, once it is prepared.
        cumulative: (m + 1, k) the running sums of the probabilities of the head.
        slack: (m + 1,) c_x.
        is_ready: (m + 1,) whether a place is prepared.
        mean_distance: (outputs,) g.
        proposal: (outputs,) the running sums of q.
    """

    def __init__(self, vectors: Vectors, epsilon: float, outputs: Ids) -> None:
        self.half_epsilon = epsilon / 2
        self.vectors = vectors - vectors.mean(0)  # distances stay, and are rounded less; the mean is the origin
        self.outputs = outputs
        self.targets = targets = self.vectors[outputs]
        self.output_index = np.full(len(vectors), -1)  # by place: its index among the outputs
        self.output_index[outputs] = np.arange(len(targets))
        m, k = len(vectors), min(HEAD_WORDS, len(targets))
        self.squares = (targets * targets).sum(1)
        # The largest norm of a row, to which rounding errors are in proportion
        self.max_norm = np.sqrt((self.vectors * self.vectors).sum(1).max())
        self.targets_by_column = np.ascontiguousarray(targets.T)
        self.near = np.empty((m + 1, k), np.int32)  # a page of these is only there once it was written to
        self.cumulative = np.empty((m + 1, k))
        self.slack = np.empty(m + 1)
        self.is_ready = np.zeros(m + 1, np.bool_)
        sample = np.linspace(0, m - 1, min(SAMPLE_WORDS, m)).astype(np.int64)
        self.mean_distance = self._distances(self.vectors[sample]).mean(0, dtype=np.float64)  # g
        proposal = np.exp(-self.half_epsilon * (self.mean_distance - self.mean_distance.min()))
        self.proposal = np.cumsum(proposal / proposal.sum())

    def draw(self, places: Ids, stream: Stream) -> Ids:
        """Returns (t,) the places of substitutes for places (t,), or UNKNOWN."""
        places = np.where(places == UNKNOWN, len(self.vectors), places)
        self._prepare(places)
        level = stream.random(len(places))
        in_head = level < self.cumulative[places, -1]
        outputs = np.empty(len(places), np.int64)
        column = (level[in_head, None] >= self.cumulative[places[in_head]]).sum(1)
        outputs[in_head] = self.near[places[in_head], column]
        outputs[~in_head] = self._draw_tail(places[~in_head], stream)
        return self.outputs[outputs]

    def _vectors_of(self, places: Ids) -> Vectors:
        """Returns (t, d) the vectors of places; zeros, the mean, for place m."""
        rows = self.vectors[np.minimum(places, len(self.vectors) - 1)]
        rows[places == len(self.vectors)] = 0
        return rows

    def _distances(self, rows: Vectors) -> NDArray[np.float32]:
        """Returns (rows, outputs) distances by one matrix product, good to about 1e-3 of the norms for close rows."""
        distances = rows @ self.targets_by_column
        distances *= -2
        distances += self.squares
        distances += (rows * rows).sum(1)[:, None]
        return np.sqrt(np.maximum(distances, 0, out=distances), out=distances)

    def _prepare(self, places: Ids) -> None:
        """Prepares words in blocks, each in the slot of its own number.

        The last bits of a matrix product depend on a row's place in it, and a word's numbers must not depend on other
        words.
        """
        new_places = np.unique(places)
        new_places = new_places[~self.is_ready[new_places]]
        slots = new_places % WORDS_AT_A_TIME
        by_slot = np.argsort(slots, kind="stable")
        turns = np.empty(len(new_places), np.int64)  # the number of each place among those of its slot
        turns[by_slot] = np.arange(len(new_places)) - np.searchsorted(slots[by_slot], slots[by_slot])
        for turn in range(int(turns.max(initial=-1)) + 1):
            block_places = new_places[turns == turn]
            block = np.full(WORDS_AT_A_TIME, block_places[0])
            block[block_places % WORDS_AT_A_TIME] = block_places
            self._store_heads(block, block_places % WORDS_AT_A_TIME)

    def _store_heads(self, places: Ids, slots: Ids) -> None:
        """Computes what one block of places needs, and keeps that of these slots; other slots only fill the block."""
        rows = self._vectors_of(places)
        distance = self._distances(rows)
        known_rows = np.flatnonzero(places < len(self.vectors))
        known_rows = known_rows[self.output_index[places[known_rows]] >= 0]
        distance[known_rows, self.output_index[places[known_rows]]] = 0
        nearest = k_largest(-distance, self.near.shape[1])[0]
        exact = np.linalg.norm(self.targets[nearest].astype(np.float64) - rows[:, None], axis=2)
        lowest = exact.min(1, keepdims=True)
        head_weights = np.exp(-self.half_epsilon * (exact - lowest))
        np.put_along_axis(distance, nearest, np.inf, 1)  # the tail is left
        tail_weights = np.exp(np.float32(-self.half_epsilon) * (distance - lowest.astype(np.float32)))
        # Cast first: a sum that casts as it goes would depend on the rows beside it
        tail_mass = tail_weights.astype(np.float64).sum(1)
        cumulative = np.cumsum(head_weights, 1)
        cumulative /= (cumulative[:, -1] + tail_mass)[:, None]
        if nearest.shape[1] == len(self.targets):
            cumulative[:, -1] = 1
        slack = (self.mean_distance - distance).max(1) + ENVELOPE_SLACK * self.max_norm
        kept_places = places[slots]
        self.near[kept_places], self.cumulative[kept_places], self.slack[kept_places] = (
            nearest[slots],
            cumulative[slots],
            slack[slots],
        )
        self.is_ready[kept_places] = True

    def _draw_tail(self, places: Ids, stream: Stream) -> Ids:
        """Returns a word outside the head for each place, by rejection."""
        outputs, missing, trials = np.empty(len(places), np.int64), np.arange(len(places)), 0
        while len(missing) and trials < MAX_TRIALS:
            trial_count = min(MAX_TRIALS, max(1, TRIALS_AT_A_TIME // len(missing)))
            proposed, is_accepted = self._trials(places[missing], trial_count, stream)
            has_accepted, first_accepted = is_accepted.any(1), is_accepted.argmax(1)
            outputs[missing[has_accepted]] = proposed[has_accepted, first_accepted[has_accepted]]
            missing, trials = missing[~has_accepted], trials + trial_count
        # What is drawn for the rest has the same law: rejections leave no trace in it
        for start in range(0, len(missing), WORDS_AT_A_TIME):
            block = missing[start : start + WORDS_AT_A_TIME]
            outputs[block] = self._draw_full_tail(places[block], stream)
        return outputs

    def _trials(self, places: Ids, trial_count: int, stream: Stream) -> tuple[Ids, Mask]:
        """Returns (places, trial_count) words drawn from q, and which of them are accepted."""
        shape = (len(places), trial_count)
        proposed = np.minimum(np.searchsorted(self.proposal, stream.random(shape), "right"), len(self.targets) - 1)
        rows = self._vectors_of(places)
        product = np.einsum("td,tsd->ts", rows, self.targets[proposed])
        squares = self.squares[proposed] + (rows * rows).sum(1)[:, None] - 2 * product
        excess = np.sqrt(np.maximum(squares, 0)) - self.mean_distance[proposed] + self.slack[places][:, None]
        is_accepted = stream.random(shape) < np.exp(-self.half_epsilon * excess)
        row, column = np.nonzero(is_accepted)
        is_accepted[row, column] = ~(self.near[places[row]] == proposed[row, column][:, None]).any(1)
        return proposed, is_accepted

    def _draw_full_tail(self, places: Ids, stream: Stream) -> Ids:
        """Returns a word outside the head for each place from the whole tail, for at most WORDS_AT_A_TIME words."""
        distance = self._distances(self._vectors_of(places)).astype(np.float64)
        np.put_along_axis(distance, self.near[places].astype(np.int64), np.inf, 1)
        weight = np.cumsum(np.exp(-self.half_epsilon * (distance - distance.min(1, keepdims=True))), 1)
        levels = stream.random(len(places)) * weight[:, -1]
        pairs = zip(weight, levels, strict=True)
        return np.array([np.searchsorted(row, level, "right") for row, level in pairs], np.int64)


@dataclass(frozen=True, eq=False)
class SanText(Sanitizer):
    """Replaces words by SANTEXT over a table, with epsilon per unit of distance.

    An unknown word is treated as if it lay at the table's mean.
    """

    paper: ClassVar[Paper] = papers.SANTEXT.with_deviations(
        "The published code draws from BERT's whole vocabulary; special tokens and [unusedN] are not candidates.",
        "Unknown words and numbers are drawn for as if they lay at the mean of the table.",
        "Published workers share a random state and draw equally; ours are independent.",
    )

    @property
    def guarantee(self) -> str | None:
        budget = f"{format_epsilon(self.epsilon)} times the distance of two words"
        return f"metric local DP: {budget}, for one word, down to probabilities of 2^-52"

    def draw(self, places: Ids, stream: Stream) -> Ids:
        return self.sampler.draw(places, stream)

    def outputs(self) -> Ids:
        """Returns (outputs,) the places that may be drawn."""
        return np.arange(len(self.vectors))

    @cached_property
    def sampler(self) -> SubstituteSampler:
        """Returns the sampler of the table's words, which is made once."""
        return SubstituteSampler(self.vectors, self.epsilon, self.outputs())


@dataclass(frozen=True, eq=False)
class SanTextPlus(SanText):
    """Replaces words by SANTEXT+ over a table: words that are not sensitive only with probability p.

    Attributes:
        sparing: decides which words are replaced.
        occurring: (n,) whether a word occurs in the corpus. The sensitive ones that do are the substitutes: V_S of
            Algorithm 2.

    Raises:
        UsageError: a value does not fit, or no word of the corpus is sensitive.
    """

    paper: ClassVar[Paper] = papers.SANTEXT.with_deviations(
        "Words that are not in the corpus are sensitive, and are drawn for by their distance; the published code takes "
        "a uniform word of the corpus.",
        "Unknown words and numbers are drawn for as if they lay at the mean of the table.",
        "Published workers share a random state and draw equally; ours are independent.",
    )

    sparing: SparingRule = field(kw_only=True)
    occurring: Mask = field(kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sparing.check(self.table)
        if self.occurring.shape != (len(self.table),):
            raise UsageError(
                f"the corpus's words have shape {self.occurring.shape}", f"give a mask of {len(self.table)}"
            )
        if not len(self.outputs()):
            raise UsageError(
                "no word of the corpus is sensitive, and SANTEXT+ draws substitutes from those",
                "give a larger share of sensitive words, or a corpus with words of the table",
            )

    @property
    def substitute_count(self) -> int:
        return len(self.outputs())

    def outputs(self) -> Ids:
        return np.flatnonzero((self.sparing.sensitive & self.occurring)[self.table.candidates])

    @property
    def guarantee(self) -> str | None:
        return (
            f"{super().guarantee}, between sensitive words only; other words have none, "
            "and which words the corpus has, from which substitutes are drawn, is not covered"
        )

    def is_due(self, ids: Ids, stream: Stream) -> Mask:
        return self.sparing.is_due(ids, stream)

    def sensitive_mask(self) -> Mask | None:
        return self.sparing.sensitive


def halfway_epsilon(table: WordVectors) -> float:
    """Returns the epsilon near which every second word of a table is drawn as itself.

    A word x of n stays with probability 1 / sum over y of exp(-eps/2 |x - y|), which is one half if the n others weigh
    1 together. With all of them at the mean distance d: n exp(-eps/2 d) = 1, and eps = 2 ln(n) / d. Distances spread
    around d and near words count most, so the true value is somewhat larger (section 3.2's equation).
    """
    vectors = table.vectors[table.candidates].astype(np.float64)
    distance = np.linalg.norm(vectors - np.roll(vectors, len(vectors) // 2, axis=0), axis=1).mean()
    return float(2 * np.log(len(vectors)) / distance) if distance > 0 else 0.0


@dataclass(frozen=True)
class SanTextMethod(SanitizerMethod):
    """Makes SANTEXT over a table, whose one parameter is epsilon."""

    name: ClassVar[str] = "santext"

    def sanitizer(self, table: WordVectors, counts: NDArray[np.int64] | None) -> SanText:
        return SanText(table, self.epsilon)


@dataclass(frozen=True)
class SanTextPlusMethod(SparingMethod):
    """Makes SANTEXT+ over a table, by default with the share of sensitive words of ObfusLM's comparison (C.3)."""

    sensitive: float = limited_field(
        0.9, above=0, most=1, hint="with 0 no word would be protected; 0.2 is CMIF's choice"
    )

    name: ClassVar[str] = "santext+"

    def document(self) -> dict[str, Any]:
        """Returns the parameters and the law: saved halves that substituted from the whole table are refused."""
        return {**super().document(), "substitutes": "sensitive words of the corpus"}

    def sanitizer(self, table: WordVectors, counts: NDArray[np.int64] | None) -> SanTextPlus:
        sparing = self.sparing_rule(counts)
        assert counts is not None  # `sparing_rule` refuses that
        return SanTextPlus(table, self.epsilon, sparing=sparing, occurring=counts > 0)

"""Defines the truth, and grades guesses by it. No attack may import this module, which a test checks.

Public ids are the ids of the public tokenizer, and scrambled ids are those that crossed the wire. A vocabulary has n of
each, or n' > n scrambled ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.metrics import recovery
from milkglass.metrics.interval import Interval, ratio
from milkglass.metrics.recovery import Recovery
from milkglass.sequences import Ids, Sequences
from milkglass.threat.guess import NO_BELIEF, Guess

MIN_PROBABILITY = 1e-12  # smaller chances count as this: a token that is called impossible surprises by 40 bits


@dataclass(frozen=True)
class Truth:
    """Holds what the attacker wants to know.

    Attributes:
        inverse: (n',) the public id behind each scrambled id; one of several where an id stands for several tokens;
            NO_BELIEF where nobody knows it, since the id was never sent.
        ordinary: (n,) whether each public id is counted: false for special tokens and for rows without a token.
        content: (n,) whether each public id carries content (`content_tokens`).
        decode: turns public ids into text.
        sent: the scrambled ids of all texts that were sent.
        original: the public ids of the same texts. None if `inverse` gives them.
        origin: (total of original,) the place at which each token was sent, NO_BELIEF for one that was not. None if
            each token was sent in its own place.
        batch_sizes: (gradients,) how many texts were behind each gradient. None if there was one behind each.
        topics: (answers,) the topic of each answer, if only sizes and times are seen.
        token_lengths: the bytes of each token of each answer, if only sizes and times are seen.
    """

    inverse: Ids
    ordinary: NDArray[np.bool_]
    content: NDArray[np.bool_]
    decode: Callable[[Ids], str]
    sent: Sequences
    original: Sequences | None = None
    origin: Ids | None = None
    batch_sizes: Ids | None = None
    topics: Ids | None = None
    token_lengths: Sequences | None = None

    @property
    def tokens(self) -> Sequences:
        """Returns the public ids of the texts, by which guesses are graded."""
        return self.original if self.original is not None else self.sent.map_ids(self.inverse)

    @property
    def counted_rows(self) -> NDArray[np.bool_]:
        """Returns (n',) whether each scrambled id is counted: whether a known, ordinary public id is behind it."""
        return (self.inverse != NO_BELIEF) & self.ordinary[self.inverse]

    def readings(self, guess: Guess) -> Ids:
        """Returns (total, k) the public ids that a guess has for each of `tokens`, as in `Guess.by_token`."""
        readings = guess.for_tokens(self.sent)
        if self.origin is None:
            return readings
        unsent_row = np.full((1, readings.shape[1]), NO_BELIEF, np.int64)  # the last row, which NO_BELIEF picks
        return np.concatenate([readings, unsent_row])[self.origin]

    def surprise(self, guess: Guess) -> NDArray[np.float64] | None:
        """Returns (total,) the bits -log2 P(token) by which each of `tokens` surprises an attacker who states chances.

        Their mean is the attacker's cross-entropy: an estimate, and an upper bound, of what is hidden from the best
        attacker. Returns None if the guess states no chances, or if tokens were not sent in their own places.
        """
        if guess.probabilities is None or guess.by_token is None or self.origin is not None:
            return None
        is_right = guess.by_token == self.tokens.ids[:, None]
        is_listed = is_right.any(1)
        column = np.where(is_listed, is_right.argmax(1), is_right.shape[1])
        chance = np.take_along_axis(guess.probabilities, column[:, None], 1)[:, 0]
        if guess.weights is not None:
            chance = chance * np.where(is_listed, 1.0, guess.weights[self.tokens.ids])
        return -np.log2(np.maximum(chance, MIN_PROBABILITY))


def content_tokens(counts: NDArray[Any], pieces: list[str], common_limit: int = 150) -> NDArray[np.bool_]:
    """Returns (n,) whether each public id carries content: it has a letter, and is not among the commonest ids.

    Half of all running text is a few hundred function words and marks, which any attacker guesses.

    Args:
        counts: (n,) how often each id occurs in ordinary text.
        pieces: the text of each id.
        common_limit: how many ids count as common. Fewer do if these were more than half of the ids that occur, or
            more than half (rounded up) of those with a letter: short texts have content, too.
    """
    is_content = np.array([any(char.isalpha() for char in piece) for piece in pieces])
    occurs, order = np.asarray(counts) > 0, np.argsort(-np.asarray(counts), kind="stable")
    lettered_limit = (int((is_content & occurs).sum()) + 1) // 2
    common_count = min(
        common_limit,
        int(occurs.sum()) // 2,
        int(np.searchsorted(np.cumsum(is_content[order]), lettered_limit, side="right")),
    )
    is_content[order[:common_count]] = False
    return is_content


def score(guess: Guess, truth: Truth, rng: np.random.Generator) -> Recovery:
    """Grades a guess by the truth. Special tokens are never counted.

    Args:
        guess: the guess.
        truth: the truth.
        rng: draws the samples from which intervals are computed.

    Returns:
        Measures by name. "tokens" are all running tokens, "content" those of `content_tokens`, "vocabulary" every
        id of `Truth.counted_rows` once. "hidden bits" is the mean of `Truth.surprise`. "bag" is precision,
        recall and F1 of sets of ids. Whole texts are assigned to the true texts of their batch so that the most tokens
        are right. ROUGE and METEOR compare texts as `truth.decode` gives them. "topics" is the share of answers whose
        topic is right, and "token lengths" the share of tokens whose length is right.
    """
    if guess.topics is not None:
        return Recovery(_grade_answers(guess.topics, guess.token_lengths, truth, rng))
    tokens = truth.tokens
    counted = truth.ordinary[tokens.ids]
    if guess.bags is not None:
        bags = tuple(bag[truth.ordinary[bag]] for bag in guess.bags)
        return Recovery(recovery.bag_scores(bags, tokens.keep(counted), rng))
    if guess.texts is not None:
        batch_sizes = np.ones(len(tokens), np.int64) if truth.batch_sizes is None else truth.batch_sizes
        guessed = guess.texts.keep(truth.ordinary[guess.texts.ids])
        return Recovery(recovery.whole_text_scores(guessed, tokens.keep(counted), batch_sizes, truth.decode, rng))
    readings = truth.readings(guess)
    measures: dict[str, Interval] = {}
    for name, mask in (("tokens", counted), ("content", counted & truth.content[tokens.ids])):
        measures |= {
            f"{name} top-{k}": share for k, share in recovery.token_accuracies(readings, tokens, mask, rng).items()
        }
        if (bits := truth.surprise(guess)) is not None:
            measures[f"{name} hidden bits"] = recovery.token_mean(bits, tokens, mask, rng)
    if guess.by_id is not None:
        ranked = recovery.vocabulary_accuracies(guess.by_id, truth.inverse, truth.counted_rows, rng)
        measures |= {f"vocabulary top-{k}": share for k, share in ranked.items()}
    best = readings[:, 0]
    measures["exact texts"] = recovery.exact_share(best, tokens, counted, rng)
    guessed = Sequences(best, tokens.lengths).keep(counted & (best != NO_BELIEF))
    measures |= recovery.text_similarity(guessed, tokens.keep(counted), truth.decode, rng)
    return Recovery(measures)


def _grade_answers(
    topics: Ids, lengths: Sequences | None, truth: Truth, rng: np.random.Generator
) -> dict[str, Interval]:
    """Returns the share of answers with the right topic, and of tokens with the right length, by resampled answers."""
    assert truth.topics is not None
    measures = {"topics": ratio((topics == truth.topics).astype(np.float64), np.ones(len(topics)), rng)}
    if lengths is not None and truth.token_lengths is not None:
        pairs = list(zip(lengths, truth.token_lengths, strict=True))
        right_counts = [float((guessed[: len(true)] == true[: len(guessed)]).sum()) for guessed, true in pairs]
        token_counts = [float(max(len(guessed), len(true))) for guessed, true in pairs]
        measures["token lengths"] = ratio(np.array(right_counts), np.array(token_counts), rng)
    return measures

"""What is true, and how a guess is graded by it. No attack may import this module: a test holds that wall.

Public ids are the ids of the public tokenizer, scrambled ids those that crossed the wire; a vocabulary has n of each,
or more scrambled ones, n'. Out of scope: any attack, any defence, the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.metrics import recovery
from milkglass.metrics.interval import Interval
from milkglass.metrics.recovery import Recovery
from milkglass.sequences import Ids, Sequences
from milkglass.threat.guess import NO_BELIEF, Guess

MIN_CHANCE = 1e-12  # a chance below counts as this much: an attacker who calls the truth impossible is wrong by 40 bits


@dataclass(frozen=True)
class Truth:
    """What the attacker would like to know.

    Attributes:
        inverse: (n',) the public id behind each scrambled id; of several tokens that one id stands for, one.
        ordinary: (n,) by public id, false for special tokens and for rows without a token: these are never counted.
        content: (n,) by public id, see `content_tokens`.
        read: public ids to text.
    """

    inverse: Ids
    ordinary: NDArray[np.bool_]
    content: NDArray[np.bool_]
    read: Callable[[Ids], str]
    sent: Sequences  # scrambled ids of all that was sent
    original: Sequences | None = None  # public ids of the same, where the map alone does not give them
    origin: Ids | None = None  # (total of original,) where each was sent, NO_BELIEF where nowhere; None: in its place
    batches: Ids | None = None  # how many texts were behind each of the gradients; None: one behind each

    @property
    def tokens(self) -> Sequences:
        return self.original if self.original is not None else self.sent.mapped(self.inverse)

    def readings(self, guess: Guess) -> Ids:
        """(total, k): what the guess says of each of `tokens`."""
        places = guess.at(self.sent)
        if self.origin is None:
            return places
        lost = np.full((1, places.shape[1]), NO_BELIEF, np.int64)  # the last row, which NO_BELIEF picks
        return np.concatenate([places, lost])[self.origin]

    def surprise(self, guess: Guess) -> NDArray[np.float64] | None:
        """(total,) bits by which each of `tokens` surprises an attacker who states chances, -log2 P(token): their mean
        is its cross-entropy, an upper bound of what is hidden from the best attacker and an estimate of it. None where
        it states none, or tokens have other places than ids."""
        if guess.chances is None or guess.running is None or self.origin is not None:
            return None
        right = guess.running == self.tokens.ids[:, None]
        listed = right.any(1)
        column = np.where(listed, right.argmax(1), right.shape[1])
        chance = np.take_along_axis(guess.chances, column[:, None], 1)[:, 0]
        if guess.weights is not None:
            chance = chance * np.where(listed, 1.0, guess.weights[self.tokens.ids])
        return -np.log2(np.maximum(chance, MIN_CHANCE))


def content_tokens(counts: NDArray[Any], pieces: list[str], commonest: int = 150) -> NDArray[np.bool_]:
    """(n,) which public ids carry content: pieces with a letter, outside the `commonest` ones by `counts` (n,), or
    outside the commoner half of the ids that occur at all, where that is fewer.

    Half of all running text is a few hundred function words and marks, which any attacker guesses.
    """
    letters = np.array([any(char.isalpha() for char in piece) for piece in pieces])
    common = min(commonest, int((np.asarray(counts) > 0).sum()) // 2)
    letters[np.argsort(-np.asarray(counts), kind="stable")[:common]] = False
    return letters


def score(guess: Guess, truth: Truth, rng: np.random.Generator) -> Recovery:
    """Grade a guess: the only function that sees both. Special tokens are never counted.

    "tokens": all running tokens. "content": those of `content_tokens`. "hidden bits": the mean of
    `Truth.surprise`. "vocabulary": every ordinary id of the table,
    once each, sent or not. "bag": precision, recall and F1 of sets of words. Whole texts are given to the true ones of
    their batch so that as many tokens as can be are right. ROUGE and METEOR compare texts as `truth.read` gives them.
    """
    sent = truth.tokens
    counted = truth.ordinary[sent.ids]
    if guess.bags is not None:
        bags = tuple(bag[truth.ordinary[bag]] for bag in guess.bags)
        return Recovery(recovery.bags(bags, sent.kept(counted), rng))
    if guess.texts is not None:
        batches = np.ones(len(sent), np.int64) if truth.batches is None else truth.batches
        result = guess.texts.kept(truth.ordinary[guess.texts.ids])
        return Recovery(recovery.whole(result, sent.kept(counted), batches, truth.read, rng))
    places = truth.readings(guess)
    measures: dict[str, Interval] = {}
    for name, which in (("tokens", counted), ("content", counted & truth.content[sent.ids])):
        measures |= {f"{name} top-{k}": one for k, one in recovery.tokens(places, sent, which, rng).items()}
        if (bits := truth.surprise(guess)) is not None:
            measures[f"{name} hidden bits"] = recovery.mean(bits, sent, which, rng)
    if guess.table is not None:
        known = truth.ordinary[truth.inverse]
        ranked = recovery.vocabulary(guess.table, truth.inverse, known, rng)
        measures |= {f"vocabulary top-{k}": one for k, one in ranked.items()}
    best = places[:, 0]
    measures["exact texts"] = recovery.exact(best, sent, counted, rng)
    measures |= recovery.texts(
        Sequences(best, sent.lengths).kept(counted & (best != NO_BELIEF)), sent.kept(counted), truth.read, rng
    )
    return Recovery(measures)

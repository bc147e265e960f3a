"""Reads sanitized text as the output of a noisy channel (Shannon), by Bayes' rule with a model of the language.

A sanitizer replaces each word by a draw from a public distribution (Kerckhoffs), and the attacker has public text. So
the attacker sanitizes its own text (`rehearse`) and counts the replacements:

    p(token x | seen s)  is proportional to  how often an x was sent as s, in the attacker's own text

These counts contain both the mechanism and the frequency of each word. A text is read as a whole: with pairs of
neighbours from the public text, the forward-backward algorithm weighs the candidates of all places together.

    alpha(t, x) = p(s_t | x) sum_w alpha(t-1, w) p(x | w),    p(x | w) = (1 - mix) p1(x) + mix count(w, x) / count(w)

A seen token that the rehearsal never produced is read as itself: much of a sanitized text is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks import work
from milkglass.attacks.token_ids.decipherment.bigrams import Floats, PairCounts, normalise, sum_by_index
from milkglass.sequences import Ids, Sequences, look_up
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript


@dataclass(frozen=True)
class Channel:
    """Holds what a sanitizer does to tokens, as an attacker estimates it from rehearsals.

    Attributes:
        originals: (n, c) the c likeliest originals of each seen token; NO_BELIEF where there are fewer.
        likelihood: (n, c) the probability that each original is sent as the seen token.
        shares: (n,) each token's share of the public text.
    """

    originals: Ids
    likelihood: Floats
    shares: Floats


def replacement_counts(original: Sequences, rehearsed_texts: list[tuple[Sequences, Ids]], size: int) -> tuple[Ids, Ids]:
    """Counts how often the rehearsals sent token x as s.

    Args:
        original: the text that was rehearsed.
        rehearsed_texts: for each rehearsal the text that was sent, and (total,) the place in that text of each token
            of `original`; NO_BELIEF for a token that was not sent.
        size: n, the number of ids.

    Returns:
        The pairs as s * n + x, sorted, and their counts.
    """
    pair_keys = [np.empty(0, np.int64)]
    for sent_text, sent_places in rehearsed_texts:
        was_sent = sent_places != NO_BELIEF
        pair_keys.append(sent_text.ids[sent_places[was_sent]] * size + original.ids[was_sent])
    pairs, counts = np.unique(np.concatenate(pair_keys), return_counts=True)
    return pairs, counts.astype(np.int64)


def estimate_channel(
    original: Sequences, rehearsed_texts: list[tuple[Sequences, Ids]], size: int, candidate_count: int
) -> Channel:
    """Estimates the channel from rehearsals, with at most `candidate_count` originals of each seen token.

    See `replacement_counts` for the other arguments.
    """
    shares = original.counts(size) / max(1, len(original.ids))
    pairs, counts = replacement_counts(original, rehearsed_texts, size)
    seen_ids, original_ids = pairs // size, pairs % size
    order = np.lexsort((-counts, seen_ids))
    seen_ids, original_ids, counts = seen_ids[order], original_ids[order], counts[order].astype(np.float64)
    rank = np.arange(len(seen_ids)) - np.searchsorted(seen_ids, seen_ids)
    is_listed = rank < candidate_count
    originals = np.full((size, candidate_count), NO_BELIEF, np.int64)
    likelihood = np.zeros((size, candidate_count))
    originals[seen_ids[is_listed], rank[is_listed]] = original_ids[is_listed]
    sent_counts = np.bincount(original_ids, counts, size)  # how often each token was sent at all
    likelihood[seen_ids[is_listed], rank[is_listed]] = counts[is_listed] / sent_counts[original_ids[is_listed]]
    is_unseen = originals[:, 0] == NO_BELIEF
    originals[is_unseen, 0], likelihood[is_unseen, 0] = np.flatnonzero(is_unseen), 1.0
    return Channel(originals, likelihood, shares)


class BigramModel:
    """Estimates the probabilities p(x | w) of the public text from its counted pairs of neighbours.

    Attributes:
        shares: (n,) each token's share of the public text.
        mix: the weight of neighbours beside frequency.
        pair_keys: (pairs,) left id times n plus right id, ascending.
        pair_counts: (pairs,) how often each pair occurs.
        left_counts: (n,) how many pairs begin with each token.
    """

    def __init__(self, texts: Sequences, size: int, shares: Floats, mix: float) -> None:
        pairs, self.shares, self.mix = PairCounts(texts, size), shares, mix
        self.pair_keys, self.pair_counts = pairs.left * size + pairs.right, pairs.counts
        self.left_counts = sum_by_index(pairs.left, pairs.counts, size)

    def transitions(self, left_ids: Ids, right_ids: Ids) -> Floats:
        """Returns (left ids, right ids) p(right | left), which is never zero if mix < 1."""
        if not len(self.pair_keys):
            return np.tile(self.shares[right_ids] + 1e-9, (len(left_ids), 1))
        requested_keys = left_ids[:, None] * len(self.shares) + right_ids[None, :]
        pair_counts = look_up(self.pair_keys, self.pair_counts, requested_keys)
        observed = pair_counts / np.maximum(self.left_counts[left_ids], 1.0)[:, None]
        return np.asarray((1 - self.mix) * (self.shares[right_ids] + 1e-9)[None, :] + self.mix * observed)


def posteriors(ids: Ids, channel: Channel, bigrams: BigramModel) -> list[tuple[Ids, Floats]]:
    """Returns the candidates of each place of one text and their probabilities, by the forward-backward algorithm.

    Args:
        ids: (t,) the tokens that were sent, at least one.
        channel: the likelihoods of their originals.
        bigrams: how often one original follows another.
    """
    candidates = [channel.originals[token][channel.originals[token] != NO_BELIEF] for token in ids.tolist()]
    likelihoods = [
        channel.likelihood[token][: len(originals)] for token, originals in zip(ids.tolist(), candidates, strict=True)
    ]
    transitions = [bigrams.transitions(a, b) for a, b in zip(candidates, candidates[1:], strict=False)]
    forward = [likelihoods[0] * (channel.shares[candidates[0]] + 1e-9)]
    for transition, likelihood in zip(transitions, likelihoods[1:], strict=True):
        forward.append(normalise(forward[-1]) @ transition * likelihood)
    backward = [np.ones(len(candidates[-1]))]
    for transition, likelihood in zip(reversed(transitions), reversed(likelihoods[1:]), strict=True):
        backward.append(normalise(transition @ (backward[-1] * likelihood)))
    beliefs = zip(candidates, forward, reversed(backward), strict=True)
    return [(originals, normalise(a * b)) for originals, a, b in beliefs]


def write_guesses(tokens: Sequences, channel: Channel, bigrams: BigramModel, guess: Ids, budget: Budget) -> Ids:
    """Writes the likeliest candidates of each place into `guess`, for as many texts as time allows, and returns it.

    Args:
        tokens: the texts that were sent.
        channel, bigrams: see `posteriors`.
        guess: (total, k) public ids, which is written.
    """
    text_start = 0
    for index, text in enumerate(tokens):
        if budget.left() <= 0:
            break
        beliefs_of_places = posteriors(text, channel, bigrams) if len(text) else []
        counts = np.array([len(originals) for originals, _ in beliefs_of_places], np.float64)
        budget.spend(len(text) * work.CALL_SECONDS + work.elements(20.0 * float(counts[:-1] @ counts[1:])))
        for place, (originals, belief) in enumerate(beliefs_of_places):
            best = np.argsort(-belief, kind="stable")[: guess.shape[1]]
            guess[text_start + place, : len(best)] = originals[best]
        text_start += len(text)
        budget.progress((index + 1) / len(tokens))
    return guess


def rehearse_corpus(knowledge: Knowledge, count: int, rng: np.random.Generator) -> list[tuple[Sequences, Ids]]:
    """Returns the public text as the attacker's own mechanism sends it, `count` times.

    Each entry is what was sent, and the place where each token of the text was sent (`replacement_counts`). The list is
    empty if the attacker has no mechanism or no public text.
    """
    if knowledge.rehearse is None or knowledge.corpus is None:
        return []
    return [knowledge.rehearse(knowledge.corpus, seed) for seed in rng.integers(2**31, size=count).tolist()]


@dataclass(frozen=True)
class ChannelAttack(Attack):
    """Reads sanitized text by Bayes' rule, with what the attacker's own runs of the sanitizer show.

    Attributes:
        rehearsals: how often the attacker puts the corpus through the defence.
        candidates: how many originals of each token are weighed.
        mix: the weight of neighbours beside frequency, below 1.
        k: how many ids are guessed for each place, the likeliest first.
    """

    rehearsals: int = 3
    candidates: int = 40
    mix: float = 0.8
    k: int = 10

    name = "channel"
    title = "Noisy channel"
    paper = papers.unpublished_method(
        "Bayes' rule over an attacker's own rehearsal of the mechanism, with the forward-backward algorithm"
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"corpus", "rehearse"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return None if len(require_known(knowledge.corpus).ids) else "the public text holds no token"

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        corpus = require_known(knowledge.corpus)
        channel = estimate_channel(
            corpus, rehearse_corpus(knowledge, self.rehearsals, rng), transcript.vocab_size, self.candidates
        )
        bigrams = BigramModel(corpus, transcript.vocab_size, channel.shares, self.mix)
        guess = np.full((len(transcript.tokens.ids), self.k), NO_BELIEF, np.int64)
        guess[:, 0] = transcript.tokens.ids  # what time does not reach is read as it was sent
        return Guess(by_token=write_guesses(transcript.tokens, channel, bigrams, guess, budget))

"""The noisy channel: Bayes' rule in closed form, neighbours that decide, and what the rehearsal never showed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from milkglass.attacks.token_ids.channel import BigramModel, Channel, ChannelAttack, estimate_channel, posteriors
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript

SIZE = 6


def swapped(share: float) -> object:
    """Tokens 1 and 2 are sent as 3 by this share, everything else as it is; draws from the seed."""

    def rehearse(corpus: Sequences, seed: int) -> tuple[Sequences, Ids]:
        rng = np.random.default_rng(seed)
        hit = np.isin(corpus.ids, [1, 2]) & (rng.random(len(corpus.ids)) < share)
        return Sequences(np.where(hit, 3, corpus.ids), corpus.lengths), np.arange(len(corpus.ids))

    return rehearse


def known(texts: list[list[int]], share: float = 1.0) -> Knowledge:
    return Knowledge(corpus=Sequences.of(texts), rehearse=swapped(share))  # type: ignore[arg-type]


def read(sent: list[list[int]], knowledge: Knowledge, **chosen: float) -> Ids:
    transcript = Transcript((Tokens(Sequences.of(sent)),), SIZE)
    guess = replace(ChannelAttack(), **chosen)(transcript, knowledge, Budget(), np.random.default_rng(0))
    assert guess.by_token is not None
    return guess.by_token


def test_the_posterior_of_one_place_is_bayes_rule() -> None:
    """p(x | 3) ~ share(x) p(3 | x): 1 is three times as common as 2, 2 is sent as 3 twice as often."""
    originals = np.full((SIZE, 2), NO_BELIEF)
    p = np.zeros((SIZE, 2))
    originals[3], p[3] = [1, 2], [0.4, 0.8]
    share = np.array([0, 0.6, 0.2, 0.2, 0, 0])
    channel = Channel(originals, p, share)
    none = BigramModel(Sequences.of([]), SIZE, share, 0.0)
    ((some, likely),) = posteriors(np.array([3]), channel, none)
    assert some.tolist() == [1, 2]
    assert likely == pytest.approx([0.24 / 0.40, 0.16 / 0.40], abs=1e-6)


def test_forward_backward_is_the_sum_over_all_readings() -> None:
    """Against every path written out."""
    rng = np.random.default_rng(1)
    originals = np.stack([rng.permutation(SIZE)[:3] for _ in range(SIZE)])
    p, share = rng.random((SIZE, 3)), rng.dirichlet(np.ones(SIZE))
    corpus = Sequences.of([rng.integers(0, SIZE, 40)])
    channel, neighbours = Channel(originals, p, share), BigramModel(corpus, SIZE, share, 0.7)
    seen = np.array([2, 5, 0])
    total = np.zeros((3, 3))
    for path in np.ndindex(3, 3, 3):
        tokens = [int(originals[s, j]) for s, j in zip(seen, path, strict=True)]
        value = (share[tokens[0]] + 1e-9) * np.prod([p[s, j] for s, j in zip(seen, path, strict=True)])
        for a, b in zip(tokens, tokens[1:], strict=False):
            value *= neighbours.transitions(np.array([a]), np.array([b]))[0, 0]
        for place, j in enumerate(path):
            total[place, j] += value
    for place, (some, likely) in enumerate(posteriors(seen, channel, neighbours)):
        assert some.tolist() == originals[seen[place]].tolist()
        assert likely == pytest.approx(total[place] / total[place].sum())


def test_frequency_decides_without_neighbours_and_neighbours_over_it() -> None:
    corpus = [[0, 1]] * 6 + [[5, 2]] * 3  # 1 is commoner, but after 5 comes 2
    assert read([[0, 3], [5, 3]], known(corpus), mix=0.0)[:, 0].tolist() == [0, 1, 5, 1]
    assert read([[0, 3], [5, 3]], known(corpus))[:, 0].tolist() == [0, 1, 5, 2]


def test_what_the_rehearsal_never_gave_is_read_as_itself() -> None:
    assert read([[4, 0]], known([[0, 1], [0, 2]]))[:, 0].tolist() == [4, 0]


def test_a_token_that_was_sent_nowhere_is_not_counted() -> None:
    corpus = Sequences.of([[1, 2]])
    channel = estimate_channel(corpus, [(Sequences.of([[3]]), np.array([0, NO_BELIEF]))], SIZE, 4)
    assert channel.originals[3].tolist() == [1, NO_BELIEF, NO_BELIEF, NO_BELIEF]
    assert channel.likelihood[3, 0] == 1.0


def test_a_spent_budget_reads_what_was_sent() -> None:
    transcript = Transcript((Tokens(Sequences.of([[3, 0]])),), SIZE)
    attack, rng = ChannelAttack(), np.random.default_rng(0)
    guess = attack.run(transcript, known([[0, 1]]), Budget(stopped=lambda: True), rng)
    assert guess.by_token is not None
    assert guess.by_token[:, 0].tolist() == [3, 0]

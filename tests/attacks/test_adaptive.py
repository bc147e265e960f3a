"""Adaptive attacks on shadow tokens: small tables worked out by hand, the law of draws, and a language that decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from milkglass.attacks.shadows.decoding import ShadowDecoding
from milkglass.attacks.shadows.generation import ShadowGeneration
from milkglass.attacks.shadows.inverse import (
    EmbeddingRule,
    ShadowMaximum,
    ShadowMean,
    ShadowMedian,
    ShadowSampling,
    invert_shadows,
)
from milkglass.attacks.token_ids.channel import Channel
from milkglass.errors import UsageError
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript
from tests import tiny

# 5 is the shadow of 1, 2, 3 and 4; 0 stands for itself; 6 is nobody's shadow
SHADOWS = [[0], [5], [5], [5, 7], [5, 7], [1, 2], [7], [3, 6, 4]]
ANGLES = [0, 10, 40, 60, 80, 0, 45, 90]  # degrees; the likeness of 1 .. 4 to 5 falls


def flat(lists: list[list[int]]) -> tuple[Ids, Ids]:
    return np.concatenate([np.array(one) for one in lists]), np.cumsum([0, *(len(one) for one in lists)])


def known(angles: list[float] = ANGLES, **more: object) -> Knowledge:
    turned = torch.deg2rad(torch.tensor(angles, dtype=torch.float32))
    table = torch.stack([turned.cos(), turned.sin()], 1) * torch.arange(1, len(angles) + 1)[:, None]
    model = Model({"model.embed_tokens.weight": table}, {"model_type": "llama"})
    return Knowledge(public_model=model, candidates=invert_shadows(*flat(SHADOWS)), **more)  # type: ignore[arg-type]


def read(attack: Attack, sent: list[list[int]], knowledge: Knowledge, seed: int = 0, size: int = 8) -> Ids:
    transcript = Transcript((Tokens(Sequences.of(sent)),), size)
    guess = attack(transcript, knowledge, Budget(), np.random.default_rng(seed))
    assert guess.by_token is not None
    return guess.by_token


def test_the_inverse_has_every_pair_once() -> None:
    found = invert_shadows(*flat(SHADOWS))
    pairs = {(int(one.rows[0]), t) for one in found.groups for t in one.members.tolist()}
    assert pairs == {(s, t) for t, some in enumerate(SHADOWS) for s in some}
    behind = {
        int(one.rows[0]): (one.members.tolist(), p[0])
        for one, p in zip(found.groups, found.log_likelihoods, strict=True)
    }
    assert behind[5][0] == [1, 2, 3, 4]
    assert np.exp(behind[5][1]) == pytest.approx([1, 1, 0.5, 0.5])
    with pytest.raises(UsageError, match="2 starts .* 2 shadows"):
        invert_shadows(np.array([1, 2]), np.array([0, 1]))


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (ShadowMaximum(k=4), [1, 2, 3, 4]),
        (ShadowMedian(k=4), [3, 4, 2, 1]),  # from least alike: 4, 3, 2, 1, whose lower middle is 3
        (ShadowMean(k=4), [3, 2, 4, 1]),  # the mean, of lengths 2 to 5, points to 56 degrees
    ],
)
def test_a_rule_orders_what_a_shadow_can_stand_for(attack: EmbeddingRule, expected: list[int]) -> None:
    assert read(attack, [[5]], known())[0].tolist() == expected


def test_the_mean_is_of_the_embeddings_as_they_are() -> None:
    angles = np.deg2rad(ANGLES[1:5])
    mean = (np.stack([np.cos(angles), np.sin(angles)], 1) * np.arange(2, 6)[:, None]).mean(0)
    towards = np.rad2deg(np.arctan2(mean[1], mean[0]))
    order = np.argsort(np.abs(np.array(ANGLES[1:5]) - towards)) + 1
    assert read(ShadowMean(k=4), [[5]], known())[0].tolist() == order.tolist()


def test_draws_follow_the_likenesses() -> None:
    sent = [[5] * 2000]
    drawn = read(ShadowSampling(k=1), sent, known())[:, 0]
    likeness = np.cos(np.deg2rad(ANGLES[1:5]))
    counts = np.bincount(drawn, minlength=5)[1:5]
    assert chisquare(counts, 2000 * likeness / likeness.sum()).pvalue > 0.01
    assert not np.array_equal(drawn, read(ShadowSampling(k=1), sent, known(), seed=1)[:, 0])


def test_likenesses_below_zero_are_never_drawn_unless_there_is_nothing_else() -> None:
    opposite = known([0, 10, 170, 190, 200, 0, 45, 90])
    assert set(read(ShadowSampling(k=2), [[5] * 50], opposite).ravel().tolist()) == {1, NO_BELIEF}
    nothing = known([0, 170, 175, 180, 190, 0, 45, 90])
    assert set(read(ShadowSampling(k=1), [[5] * 200], nothing).ravel().tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize("attack", [ShadowMaximum(), ShadowMedian(), ShadowMean(), ShadowSampling()])
def test_what_stands_for_itself_is_read_so_and_what_is_nobody_s_shadow_not_at_all(attack: EmbeddingRule) -> None:
    found = read(attack, [[0, 5], [8]], known([*ANGLES, 30]), size=9)
    assert found[[0, 2], 0].tolist() == [0, NO_BELIEF]
    assert found[1, 0] in (1, 2, 3, 4)
    bare = replace(known(), public_model=None)
    assert "table of embeddings" in str(why_not(attack, Transcript((Tokens(Sequences.of([[5]])),), 8), bare))


# --- with a language --------------------------------------------------------------------------------------------------
def rehearse(corpus: Sequences, seed: int) -> tuple[Sequences, Ids]:
    """Every token by its first shadow."""
    first = np.array([some[0] for some in SHADOWS])
    return corpus.map_ids(first), np.arange(len(corpus.ids))


TEXTS = [[0, 1, 6], [0, 1, 6], [0, 2], [6, 2, 0], [6, 2, 0], [3, 0], [0, 4]]


def test_the_channel_is_counts_beside_an_even_choice() -> None:
    corpus = Sequences.of([[1, 1, 3]])
    attack = ShadowDecoding(prior=2.0, candidates=4)
    channel = attack.channel(invert_shadows(*flat(SHADOWS)), corpus, [rehearse(corpus, 0)], 8)
    p = dict(zip(channel.originals[5].tolist(), channel.likelihood[5].tolist(), strict=True))
    assert p == {1: pytest.approx(1.0), 3: pytest.approx((1 + 1) / 3), 2: pytest.approx(1.0), 4: pytest.approx(0.5)}
    assert isinstance(channel, Channel)
    alone = attack.channel(invert_shadows(*flat(SHADOWS)), corpus, [], 8)
    assert alone.likelihood[5].max() == 1.0


def test_neighbours_decide_between_the_originals() -> None:
    """After 0 comes 1, after 6 comes 2."""
    knowledge = known(corpus=Sequences.of(TEXTS))
    assert read(ShadowDecoding(), [[0, 5, 7], [7, 5, 0]], knowledge)[:, 0].tolist() == [0, 1, 6, 6, 2, 0]


def test_only_what_a_shadow_can_stand_for_is_read() -> None:
    knowledge = known(corpus=Sequences.of([[7] * 50, [5, 1]]), rehearse=rehearse)
    found = read(ShadowDecoding(), [[5, 5]], knowledge)
    assert set(found.ravel().tolist()) <= {1, 2, 3, 4, NO_BELIEF}


def test_a_model_learns_to_write_the_originals() -> None:
    knowledge = known(corpus=Sequences.of(TEXTS * 30), rehearse=rehearse)
    attack = ShadowGeneration(width=32, epochs=40, rate=3e-3)
    sent = [[0, 5, 7], [7, 5, 0]]
    assert read(attack, sent, knowledge)[:, 0].tolist() == [0, 1, 6, 6, 2, 0]
    free = replace(attack, restricted=False)
    assert read(free, sent, knowledge)[:, 0].tolist() == [0, 1, 6, 6, 2, 0]


def test_an_untrained_model_writes_candidates_only() -> None:
    knowledge = known(corpus=Sequences.of([[1]]), rehearse=rehearse)
    found = read(ShadowGeneration(width=32, epochs=0), [[5, 5, 7], [0]], knowledge)[:, 0]
    assert found[3] == 0
    assert set(found[:2].tolist()) <= {1, 2, 3, 4}
    assert found[2] in (3, 4, 6)


def test_any_causal_model_of_the_same_vocabulary_will_do(tmp_path: Path) -> None:
    corpus = Sequences.of([[5, 9, 11], [7, 8]])
    knowledge = Knowledge(corpus=corpus, rehearse=lambda some, _: (some, np.arange(len(some.ids))))
    attack = ShadowGeneration(base=tiny.save("gpt2", tmp_path / "gpt2"), epochs=1)
    assert read(attack, [[5, 9]], knowledge, size=tiny.VOCAB).shape == (2, 1)
    with pytest.raises(UsageError, match=r"\b300\b.*\b301\b"):
        read(attack, [[5, 9]], knowledge, size=301)


def test_a_defence_that_moves_tokens_is_not_inverted_in_place() -> None:
    knowledge = Knowledge(corpus=Sequences.of([[1, 2]]), rehearse=lambda some, _: (some, np.array([1, 0])))
    with pytest.raises(UsageError, match="places"):
        read(ShadowGeneration(width=32), [[5]], knowledge)


def test_a_spent_budget_names_nothing() -> None:
    transcript = Transcript((Tokens(Sequences.of([[5, 0]])),), 8)
    for attack in (ShadowMaximum(), ShadowDecoding(), ShadowGeneration(width=32)):
        knowledge = known(corpus=Sequences.of(TEXTS), rehearse=rehearse)
        guess = attack.run(transcript, knowledge, Budget(stopped=lambda: True), np.random.default_rng(0))
        assert guess.by_token is not None
        assert (guess.by_token == NO_BELIEF).all()

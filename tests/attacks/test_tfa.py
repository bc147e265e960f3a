"""The two guesses from counts alone, on examples small enough for closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from milkglass.attacks.token_ids.cluster_conditional import ClusterConditional
from milkglass.attacks.token_ids.tfa import TFA
from milkglass.errors import UsageError
from milkglass.sequences import Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from tests.attacks.scenes import clumped, model

RNG = np.random.default_rng(0)


def guess(sent: list[list[int]], public: list[list[int]], n: int, attack: TFA = TFA(k=3)) -> Guess:  # noqa: B008
    transcript = Transcript((Tokens(Sequences.of(sent)),), n)
    return attack(transcript, Knowledge(corpus=Sequences.of(public)), Budget(), RNG)


def table(found: Guess) -> list[list[int]]:
    assert found.by_id is not None
    return found.by_id.tolist()


def test_ranks_are_matched_and_the_nearest_come_next() -> None:
    sent = [[4, 4, 4, 4], [0, 0, 0], [2, 2], [1]]  # by rank: 4, 0, 2, 1
    public = [[3, 3, 3, 3, 3, 3, 3], [1, 1, 1, 1], [0, 0, 4]]  # by rank: 3, 1, 0, 4
    assert table(guess(sent, public, 5)) == [
        [1, 3, 0],
        [4, 0, NO_BELIEF],
        [0, 1, 4],
        [NO_BELIEF] * 3,
        [3, 1, NO_BELIEF],
    ]


def test_ties_fall_to_the_lower_id_on_both_sides() -> None:
    assert [row[0] for row in table(guess([[2, 1, 0]], [[1, 0, 2]], 3))] == [0, 1, 2]


def test_what_was_never_sent_or_never_printed_is_not_guessed() -> None:
    rows = table(guess([[5, 5, 6]], [[1]], 8))
    assert rows[5][0] == 1
    assert rows[6][0] == NO_BELIEF  # the public text is too short to have a second rank
    assert all(row == [NO_BELIEF] * 3 for i, row in enumerate(rows) if i not in (5, 6))
    assert all(row == [NO_BELIEF] * 3 for row in table(guess([[]], [[]], 4)))
    assert all(row == [NO_BELIEF] * 3 for row in table(guess([[1, 2]], [], 4)))


PAPER = TFA(k=3, places=False, match="nearest")


def test_the_papers_form_reads_the_nearest_frequency_and_one_token_for_many() -> None:
    sent = [[5, 5, 5, 5], [0, 0, 0], [2, 2, 6]]  # 5: .4, 0: .3, 2: .2, 6: .1
    public = [[3] * 12, [1] * 4, [0] * 3, [4]]  # 3: .6, 1: .2, 0: .15, 4: .05
    assert table(guess(sent, public, 7, PAPER)) == [
        [1, 0, 4],  # .3: .1 from 1, .15 from 0, .25 from 4, .3 from 3
        [NO_BELIEF] * 3,
        [1, 0, 4],  # .2: the same token again
        [NO_BELIEF] * 3,
        [NO_BELIEF] * 3,
        [1, 3, 0],  # .4: 1 and 3 are equally far, the lower id is first
        [0, 4, 1],  # .1: 0 and 4 are equally far
    ]


def test_a_literal_reading_of_nearest_frequency_agrees() -> None:
    rng = np.random.default_rng(1)
    sent, public = rng.integers(40, size=300), rng.integers(30, size=1000) ** 2 // 30
    found = table(guess([sent.tolist()], [public.tolist()], 40, TFA(k=1, places=False, match="nearest")))
    for scrambled in range(40):
        here = np.mean(sent == scrambled)
        gaps = {b: round(abs(np.mean(public == b) - here), 12) for b in sorted(set(public.tolist()))}
        assert found[scrambled][0] == (min(gaps, key=lambda b: gaps[b]) if here else NO_BELIEF)


def test_the_papers_form_has_nothing_to_say_without_text() -> None:
    assert all(row == [NO_BELIEF] * 3 for row in table(guess([[1, 2]], [], 4, PAPER)))
    assert table(guess([[1]], [[2]], 4, PAPER))[1] == [2, NO_BELIEF, NO_BELIEF]
    with pytest.raises(UsageError, match="match .*'closest'"):
        TFA(match="closest")  # type: ignore[arg-type]


def test_the_commonest_member_of_a_cluster_is_guessed_for_all_its_rows() -> None:
    groups = (Group(np.array([0, 3, 5]), np.array([1, 2, 4])), Group(np.array([1]), np.array([0])))
    candidates = Candidates(groups, (np.zeros((3, 3)), np.zeros((1, 1))))
    corpus = Sequences.of([[4, 4, 4, 1], [1, 5, 5, 5, 5, 5]])
    transcript = Transcript((Weights(model(clumped(6, 4, 0))),), 6)
    found = ClusterConditional(k=3)(transcript, Knowledge(corpus=corpus, candidates=candidates), Budget(), RNG)
    nothing = [NO_BELIEF] * 3
    assert table(found) == [[4, 1, 2], [0, NO_BELIEF, NO_BELIEF], nothing, [4, 1, 2], nothing, [4, 1, 2]]

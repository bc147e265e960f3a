"""Sizes, crossings and what is left of a scene."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from milkglass.audit import key_budget as curve
from milkglass.audit.audit import reading_curve
from milkglass.audit.key_budget import curve_sizes, tokens_at_share, tokens_to_reach
from milkglass.audit.outcome import strongest
from milkglass.audit.report.result import BudgetPoint
from milkglass.audit.run import RECIPE_OPTIONS, run
from milkglass.audit.scene import ALIKE, Adversary, Scene
from milkglass.papers import unpublished_method
from milkglass.sequences import Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript
from milkglass.threat.truth import Truth


def test_sizes_grow_by_half_decades_and_end_with_everything() -> None:
    assert curve_sizes(50_000) == [1000, 3000, 10_000, 32_000, 50_000]
    assert curve_sizes(34_000) == [1000, 3000, 10_000, 34_000]
    assert curve_sizes(500) == [500]


def test_a_crossing_lies_between_two_points_on_a_logarithmic_scale() -> None:
    points = [BudgetPoint("a", 1000, 0.0, 0.0), BudgetPoint("a", 100_000, 0.0, 0.5)]
    assert tokens_at_share(points, 0.25) == 10_000
    assert tokens_at_share(points, 0.5) == 100_000
    assert tokens_at_share(points, 0.6) is None
    assert tokens_at_share([BudgetPoint("a", 1000, 0.0, 0.7)], 0.1) == 1000


def test_each_attacker_has_its_own_thresholds() -> None:
    points = [
        BudgetPoint("same", 1000, 0.5, 0.3),
        BudgetPoint("other", 1000, 0.1, 0.0),
        BudgetPoint("other", 10_000, 0.2, 0.2),
    ]
    found = tokens_to_reach(points)
    assert found["same"] == {"10 %": 1000, "25 %": 1000}
    assert found["other"]["10 %"] == pytest.approx(3162, abs=1)
    assert list(found["other"]) == ["10 %"]


# --- the curve --------------------------------------------------------------------------------------------------------
N, SHORT = 12, 40


@dataclass(frozen=True)
class Counting(Attack):
    """Names all tokens rightly where there are more than SHORT of them, and below that fails or names none."""

    fails: bool = False

    name = "counting"
    title = "Counting"
    paper = unpublished_method("A test")
    sees = frozenset({Tokens})
    assumes = frozenset({"corpus"})

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        sent = transcript.tokens.ids
        if self.fails and len(sent) <= SHORT:
            raise RuntimeError("too few")
        return Guess(by_token=(sent if len(sent) > SHORT else np.full(len(sent), -1))[:, None])


def counted(attack: Counting, monkeypatch: pytest.MonkeyPatch) -> tuple[BudgetPoint, ...]:
    monkeypatch.setattr(curve, "FIRST_POINT_TOKENS", 20)
    rng, every = np.random.default_rng(0), np.ones(N, np.bool_)
    sent = Sequences.of(rng.integers(0, N, (25, 4)).tolist())
    known = Adversary.with_text(ALIKE, Knowledge(corpus=Sequences.of([[1, 2]])))
    scene = Scene.of(
        Transcript((Tokens(sent),), N),
        Truth(np.arange(N), every, np.arange(N) > 5, str, sent),
        Adversary.without_text(Knowledge()),
        [known],
    )
    attacks = {"mine": attack}
    done = run(scene, attacks, None, Budget(), 1, options=RECIPE_OPTIONS)
    return reading_curve(scene, attacks, done, strongest(done.results), Budget(), 1)


def test_a_curve_has_a_point_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    points = counted(Counting(), monkeypatch)
    assert [(one.adversary, one.tokens, one.running, one.content) for one in points] == [
        (ALIKE, 20, 0, 0), (ALIKE, 60, 1, 1), (ALIKE, 100, 1, 1)
    ]  # fmt: skip


def test_an_attack_that_fails_on_less_text_costs_the_curve_and_not_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(Counting(fails=True), monkeypatch) == ()

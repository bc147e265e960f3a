"""The order of attacks, and how long they are said to take."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from milkglass.attacks.embeddings.cluster_solve import ClusterSolve
from milkglass.attacks.embeddings.gram import Gram
from milkglass.attacks.embeddings.knn import KNN
from milkglass.attacks.hidden_states.invbert import InvBert
from milkglass.attacks.hidden_states.mlc import MLC
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.language import LanguageModel
from milkglass.attacks.token_ids.sda import SDA
from milkglass.attacks.token_ids.tfa import TFA
from milkglass.audit.plan import estimate, scheduled_attacks, slowness, turns_of
from milkglass.cli.audit import plan_text
from milkglass.threat.attack import Attack, Cost
from milkglass.threat.budget import Budget, OutOfTime, time_limit
from tests.audit.test_audit import Setting, scene, setting

__all__ = ["setting"]


def test_the_strongest_attacks_come_first(setting: Setting) -> None:
    it = scene(setting)
    attacks: dict[str, Attack] = {
        one.name: one for one in (KNN(), MLC(), TFA(), LanguageModel(), Gram(), ClusterSolve(), Decipherment(), SDA())
    }
    more = replace(it, adversaries=(it.adversaries[0], replace(it.adversaries[1], name="less"), it.adversaries[1]))
    order = [(turn.name, who.name) for who, turn in scheduled_attacks(more, turns_of(attacks))]
    assert [name for name, _ in order] == [
        *("decipherment", "decipherment", "gram", "language-model", "language-model"),
        *("tfa", "tfa", "knn", "mlc", "sda", "mlc", "sda"),
    ]
    assert order[0][1] == "same kind of text", "who has more comes first"


def test_the_time_is_estimated_before(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    it = scene(setting)
    monkeypatch.setattr("milkglass.audit.plan.slowness", lambda: 2.0)
    attacks: dict[str, Attack] = {"cluster-solve": ClusterSolve(), "knn": KNN(), "invbert": InvBert()}
    plan = estimate(it, attacks, budget=2000)
    n, d = it.transcript.vocab_size, it.transcript.model.width
    sent = len(it.truth.tokens.ids)

    def took(one: Cost, tokens: int) -> float:
        return (
            one.fixed
            + one.per_1000_rows * n / 1e3
            + one.per_trillion_products * n * n * d / 1e12
            + one.per_million_tokens * tokens / 1e6
        )

    both = took(ClusterSolve.cost, sent) + took(KNN.cost, sent)
    assert plan.seconds == pytest.approx(2 * both)
    assert (plan.timed_attack_count, plan.open_ended_titles) == (2, ("Inversion model",))
    assert estimate(it, attacks, budget=900).open_ended_titles == (), "four times its least time is not there"
    known = {**attacks, "decipherment": Decipherment()}
    text = it.adversaries[1].knowledge.corpus
    assert text is not None
    more = 1.5 * took(Decipherment.cost, sent + len(text.ids))  # half as much for the one point of the key's budget
    assert estimate(it, known, 2000).seconds == pytest.approx(2 * (both + more))


def test_what_a_budget_leaves_no_time_for_is_said_before(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The language model wants 150 s. What comes before it is said to take 100 s, and the chain gets 60 %."""
    monkeypatch.setattr("milkglass.audit.plan.slowness", lambda: 1.0)
    monkeypatch.setattr(ClusterSolve, "cost", Cost(fixed=100.0, per_million_tokens=0.0))
    it, attacks = scene(setting), {one.name: one for one in (ClusterSolve(), LanguageModel(), SDA())}
    plan = estimate(it, attacks, budget=200)
    assert (plan.timed_attack_count, plan.open_ended_titles) == (1, ()), "100 s of 200 are left"
    assert plan.late_titles == (LanguageModel.title,), "what others surpass is not missed"
    assert plan.enough_seconds == 400, "300 s are left of it"
    plan = estimate(it, attacks, budget=400)
    assert (plan.timed_attack_count, plan.late_titles) == (2, ()) and math.isnan(plan.enough_seconds)
    assert ClusterSolve.title in estimate(it, attacks, budget=160).late_titles, "60 % of it is too little for the chain"
    who = it.adversaries[-1]
    finished = [turn.file_name(who) for turn in turns_of(attacks)]
    assert estimate(it, attacks, 200, finished).late_titles == (), "it is not missed if an earlier run finished it"
    line = plan_text(estimate(it, attacks, budget=200), 200.0, "9m")
    assert f"{LanguageModel.title.lower()}, " in line and "--budget 9m" in line


def test_other_work_on_the_machine_does_not_use_up_a_budget() -> None:
    budget = Budget(0.5)
    time.sleep(0.6)
    assert budget.left() > 0.3
    ends = time.process_time() + 0.5
    while time.process_time() < ends:
        pass
    assert budget.left() <= 0


def test_a_budget_of_the_clock_counts_waiting() -> None:
    budget = Budget.parse("0.3s", time.monotonic)
    time.sleep(0.4)
    assert budget.left() <= 0


def test_a_block_is_ended_with_a_budget_and_only_inside() -> None:
    begun = time.monotonic()
    with pytest.raises(OutOfTime), time_limit(Budget(0.2, clock=time.monotonic)):
        time.sleep(30)
    assert time.monotonic() - begun < 5
    with time_limit(Budget(0.2, clock=time.monotonic)):
        done = True
    time.sleep(0.4)
    assert done
    with time_limit(None), time_limit(Budget(clock=time.monotonic)):
        pass


def test_this_machine_is_measured() -> None:
    assert 0.05 < slowness() < 50

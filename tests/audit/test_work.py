"""A budget of work: no clock decides what it cuts, and every attack that asks it counts what it does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.attacks.catalogue import ALL_ATTACKS, ATTACKS, GRADIENT_ATTACKS
from milkglass.attacks.embeddings.knn import KNN
from milkglass.audit.defence_scene import scene_of
from milkglass.audit.outcome import AttackResult, AuditRun
from milkglass.audit.resume import ResumeStore
from milkglass.audit.run import run
from milkglass.audit.scene import ALIKE, Scene
from milkglass.defences.catalogue import defence_of
from milkglass.gradient_defences.dp_sgd import DPSGD
from milkglass.models.checkpoint import Checkpoint
from milkglass.sequences import Sequences
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.defence import Defence
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript
from tests import tiny
from tests.attacks import test_adaptive, test_seed_search
from tests.attacks.gradient_kit import shared, step
from tests.hidden_states.kit import CORPUS, SECRET, SMALL

WORDS = sorted({word.strip(",") for text in tiny.TEXTS for word in text.split()} - {"120", "80"})
MANY_ATTACKS = ("coarse", "obfuslm")  # defences that most attacks read: some ten seconds each
DEFENCES: dict[str, Callable[[], Defence]] = {
    "obfuslm": lambda: defence_of({"k": 5, "epsilon": 0.1, "beta": 0.9}),
    "coarse": lambda: defence_of({"scheme": "coarse", "symbols": 40, "least_bits": 0.5, "most_share": 0.95}),
    "rnm": lambda: defence_of({"sanitizer": "rnm", "epsilon": 3.0}),
    "textobfuscator": lambda: SMALL["textobfuscator"],
    "dp-forward": lambda: SMALL["dp-forward"],
    "cape": lambda: SMALL["cape"],
    "gelo": lambda: SMALL["gelo"],
}
LONG = {"invert-hidden": {"epochs": 500}, "hidden-words": {"epochs": 500}, "invbert": {"epochs": 50}}
SHORT = {"invert-hidden": {"epochs": 2}, "hidden-words": {"epochs": 2}, "invbert": {"epochs": 1}, "sda": {"epochs": 1}}


def attacks(changed: Mapping[str, Mapping[str, int]]) -> dict[str, Attack]:
    return {name: replace(one, **changed.get(name, {})) for name, one in ATTACKS.items()}  # type: ignore[type-var]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    folder, made = tmp_path_factory.mktemp("work"), dict[str, Scene]()
    base = Checkpoint.open(tiny.save("bert", folder / "base"))
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, size=rng.integers(5, 12))) for _ in range(48)]

    def of(name: str) -> Scene:
        if name not in made:
            client, server = DEFENCES[name]().split(base, CORPUS, SECRET, folder / name)
            made[name] = scene_of(base, client, server, texts[:24], {ALIKE: texts[24:]})
        return made[name]

    return of


def figures(done: AuditRun) -> list[Any]:
    return [
        (one.attack, one.adversary, one.state, one.cut, one.reason, one.seconds, str(one.measures), str(one.by_class))
        for one in done.results
    ]


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every clock run away: a second passes each time somebody looks at one."""
    ticks = itertools.count(1e6)
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(time, name, lambda: float(next(ticks)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[pytest.mark.slow] if one in MANY_ATTACKS else [])
        for one in DEFENCES
        if one != "gelo"  # which takes less than a second
    ],
)
def test_no_clock_decides_what_work_cuts(
    scenes: Callable[[str], Scene], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = attacks(LONG)
    for one in few.values():
        object.__setattr__(one, "min_seconds", 0.0)  # so that all begin, and a small budget cuts them
    first = run(scenes(name), few, None, Budget.of_work(0.8), 3)
    hurried(monkeypatch)
    assert figures(run(scenes(name), few, None, Budget.of_work(0.8), 3)) == figures(first)
    monkeypatch.undo()
    assert any(one.cut or one.state == "not run" for one in first.results), "nothing was cut: the test shows nothing"


def test_attacks_that_were_finished_are_counted_when_a_run_goes_on(
    scenes: Callable[[str], Scene], tmp_path: Path
) -> None:
    """A run that was killed reads the same as one that was not."""
    whole = run(scenes("obfuslm"), attacks(SHORT), None, Budget.of_work(2.0), 3)
    ended = list[str]()

    def killed(result: AttackResult) -> None:
        ended.append(result.attack)
        if len(ended) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(scenes("obfuslm"), attacks(SHORT), ResumeStore.open(tmp_path / "kept", {}), Budget.of_work(2.0), 3, killed)
    again = run(scenes("obfuslm"), attacks(SHORT), ResumeStore.open(tmp_path / "kept", {}), Budget.of_work(2.0), 3)
    assert figures(again) == figures(whole)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] if one in MANY_ATTACKS else []) for one in DEFENCES]
)
def test_an_attack_that_asks_its_budget_counts_what_it_does(scenes: Callable[[str], Scene], name: str) -> None:
    """Else a budget of work would never end it."""
    budget, asked = Budget.of_work(1e9), list[float]()
    budget.stopped = lambda: bool(asked.append(budget.clock()))
    silent = list[str]()

    def ended(result: AttackResult) -> None:
        if len(asked) > 8 and len(set(asked[3:-1])) < 2:
            silent.append(result.attack)
        asked.clear()

    done = run(scenes(name), attacks(SHORT), None, budget, 3, ended)
    assert not silent
    assert all(one.seconds > 0 for one in done.results if one.state == "done")


def sent_scene(scene: str) -> tuple[Transcript, Knowledge]:
    """What a site shares, and what the attacker knows: a step's gradient, one under the old noise, or shadow tokens."""
    if scene == "shadows":
        sent = Sequences.of([[0, 5, 7, 5, 7, 5], [7, 5, 0, 5, 5, 7]] * 4)
        return Transcript((Tokens(sent),), len(test_adaptive.SHADOWS)), test_adaptive.known(
            corpus=Sequences.of(test_adaptive.TEXTS * 4), rehearse=test_adaptive.rehearse
        )
    if scene == "old noise":
        shield = DPSGD()
        noise = shield.added_noise(len(test_seed_search.TEXTS))
        return test_seed_search.before(shield), Knowledge(step=test_seed_search.step(), noise=noise)
    one = shared(step(scene), [[[2, 17, 9, 23, 3]]])
    return one.transcript, one.knowledge


def scenes_of(name: str) -> tuple[str, ...]:
    """Returns the scenes to which a gradient attack applies."""
    if name.startswith("shadow-"):
        return ("shadows",)
    return ("old noise",) if name in ("float-holes-rows", "seed-search") else ("bert", "gpt2")


@pytest.mark.parametrize(("name", "scene"), [(name, scene) for name in GRADIENT_ATTACKS for scene in scenes_of(name)])
def test_an_attack_on_what_sites_share_counts_what_it_does(name: str, scene: str) -> None:
    attack = ALL_ATTACKS[name]
    shorter = {"steps": 12, "starts": 8, "permutations": 8, "evaluations": 30, "count": 1 << 20, "proposals": 5,
               "epochs": 2, "width": 32}  # fmt: skip
    attack = replace(attack, **{one: value for one, value in shorter.items() if hasattr(attack, one)})
    seen, knowledge = sent_scene(scene)
    assert why_not(attack, seen, knowledge) is None
    budget, asked = Budget.of_work(1e9), list[float]()
    budget.stopped = lambda: bool(asked.append(budget.clock()))
    attack(seen, knowledge, budget, np.random.default_rng(0))
    assert len(asked) < 4 or len(set(asked[1:])) > 1
    assert len(asked) < 2 or budget.clock() > 0, "it asks in a loop, and counts nothing"


def test_work_is_counted_by_no_other_budget() -> None:
    budget = Budget(8, clock=lambda: 0.0)
    budget.spend(5.0)
    assert budget.left() == 8 and not budget.counts_work
    work = Budget.of_work(8.0)
    part = work.part(0.5)
    part.spend(3.0)
    assert (work.left(), part.left(), work.counts_work) == (5, 1, True)


def test_an_attack_that_counts_nothing_costs_what_it_declares(scenes: Callable[[str], Scene]) -> None:
    done = run(scenes("obfuslm"), {"tfa": ATTACKS["tfa"], "knn": KNN()}, None, Budget.of_work(60.0), 3)
    tfa, knn = done.results
    assert tfa.seconds == pytest.approx(ATTACKS["tfa"].cost.fixed, rel=0.2)
    assert 0 < knn.seconds < KNN.cost.seconds(tiny.VOCAB, 32, 1000, 1000)

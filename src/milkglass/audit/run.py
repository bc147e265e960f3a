"""Run every attack of the catalogue by every adversary, side by side, within a budget, and go on after a stop.

Solvers that need no text run first, one after the other, each with the candidates of the one before; what they found is
handed to every attack that assumes candidates. Each finished cell is on disk before the next begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np
from numpy.typing import NDArray

from milkglass.attacks.assignment import Solver, ranked
from milkglass.audit.outcome import AttackResult
from milkglass.audit.resume import ResumeStore
from milkglass.audit.scene import Adversary, Scene
from milkglass.client.data.texts import CLASSES, classes
from milkglass.errors import MilkglassError
from milkglass.metrics.interval import Interval, ratio
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack, Budget, Preprocessor, why_not
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Transcript
from milkglass.threat.truth import score

Report = Callable[[AttackResult], None]
GRACE = 30.0  # seconds for an attack that waited for the chain, however much of the budget that took
PLACED = 0.01  # of the ids; candidates that place fewer are the guesses of a solver that failed, and would mislead
CHAIN = 0.6  # of what is left of the budget: the strongest attacks come after the chain and need the rest


@dataclass(frozen=True)
class AuditRun:
    """cells, and for each done one the public id read for each token sent, (total,)."""

    cells: tuple[AttackResult, ...]
    readings: Mapping[tuple[str, str], Ids]
    candidates: Candidates | None  # what the solvers that need no text arrived at


def run(
    scene: Scene,
    attacks: Mapping[str, type[Attack]],
    work: ResumeStore,
    budget: Budget,
    seed: int,
    threads: int = 2,
    progress: Report = lambda cell: None,
) -> AuditRun:
    """attacks: by name, in the order in which candidates are handed on."""
    selected = [kind() for kind in attacks.values()]
    runner = _Runner(scene, work, budget, seed, progress)
    with ThreadPoolExecutor(threads) as pool:  # the chain is submitted first, so whoever waits for it waits in turn
        try:
            undoers = [one for one in selected if isinstance(one, Preprocessor)]
            early = [one for one in selected if _early(one)]
            chain = pool.submit(runner.chain, early, undoers, scene.adversaries[0].knowledge)
            rest = [pool.submit(runner.cell, attack, who, chain) for who, attack in _pairs(scene, selected)]
            result = [*chain.result()[0], *(one.result() for one in rest)]
        except BaseException:  # Ctrl-C above all: what runs stops at its next look at the budget, nothing more begins
            runner.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    readings = {(cell.adversary, cell.attack): read for cell, read in result if read is not None}
    return AuditRun(tuple(cell for cell, _ in result), readings, chain.result()[1])


def planned(scene: Scene, attacks: Mapping[str, type[Attack]]) -> int:
    """How many cells there will be."""
    selected = [kind() for kind in attacks.values()]
    return sum(map(_early, selected)) + len(_pairs(scene, selected))


def _pairs(scene: Scene, chosen: Sequence[Attack]) -> list[tuple[Adversary, Attack]]:
    """Who runs what beside the chain: an attack without text is run once, one that reads text by whoever has some, and
    by nobody else unless nobody has any, so that the reason is said."""
    bare, *others = scene.adversaries
    result = []
    for adversary in scene.adversaries:
        for attack in chosen:
            reads = "corpus" in attack.assumes | attack.helped_by
            expected = not others or not reads if adversary is bare else reads
            if expected and not _early(attack):
                result.append((adversary, attack))
    return sorted(result, key=lambda pair: _turn(pair[1]))


def _turn(attack: Attack) -> int:
    """What ends soon while the chain runs; what reads most as soon as it has ended; last what takes minutes alone."""
    if _waits(attack):
        return 1
    if not attack.needs:
        return 0
    return 2 if "candidates" in attack.assumes else 3


def _early(attack: Attack) -> bool:
    """Solvers without text: they are the chain."""
    return isinstance(attack, Solver) and "corpus" not in attack.assumes and not attack.of_outputs


def _waits(attack: Attack) -> bool:
    """For the chain: these are cheap and read most, so a budget that the chain used up must not be their end."""
    return "candidates" in attack.assumes | attack.helped_by and not attack.needs and not _early(attack)


Chain = tuple[list[tuple[AttackResult, Ids | None]], Candidates | None]


@dataclass(frozen=True)
class _Runner:
    scene: Scene
    work: ResumeStore
    budget: Budget
    seed: int
    progress: Report
    stop: Event = field(default_factory=Event)

    def chain(self, solvers: Sequence[Attack], undoers: Sequence[Preprocessor], knowledge: Knowledge) -> Chain:
        """Where an attack can undo a part of the scheme, the solvers start from what it leaves."""
        result, candidates, transcript = [], None, self.scene.transcript
        for undoer in undoers if solvers else ():
            try:
                if not self.stop.is_set() and why_not(undoer, transcript, knowledge) is None:
                    transcript = undoer.before(transcript, knowledge)
            except Exception:  # noqa: BLE001, S112 - it has a cell of its own, which says that it failed
                continue
        for solver in solvers:
            assert isinstance(solver, Solver)
            provided = replace(knowledge, candidates=candidates)
            cell, reading, learnt = self._solve(solver, provided, transcript)
            if (
                learnt is not None
                and sum(len(one.rows) for one in learnt.solved) >= PLACED * self.scene.transcript.size
            ):
                candidates = learnt
            result.append((cell, reading))
        return result, candidates

    def _solve(
        self, solver: Solver, knowledge: Knowledge, transcript: Transcript
    ) -> tuple[AttackResult, Ids | None, Candidates | None]:
        learnt: list[Candidates] = []
        name = self.scene.adversaries[0].name
        kept = self.work.candidates(solver.name)

        def attempt(own: Budget) -> Guess:
            learnt.append(solver.learn(transcript, knowledge, own, self._rng(solver)))
            self.work.keep_candidates(solver.name, learnt[0])  # before the cell: one without the other is done again
            return ranked(learnt[0], self.scene.transcript.size)

        cell, reading = self._graded(solver, name, knowledge, attempt, self._in_group(learnt), kept is not None)
        return cell, reading, learnt[0] if learnt else kept

    def _in_group(self, learnt: list[Candidates]) -> Callable[[], float | None]:
        """Called when the solver is done: the share of ordinary ids whose public id is in a group that was solved."""

        def share() -> float | None:
            if not learnt:
                return None
            inverse = self.scene.truth.inverse
            hit = np.zeros(len(inverse), np.bool_)
            for group in learnt[0].solved:
                hit[group.rows] = np.isin(inverse[group.rows], group.members)
            return float(hit[self.scene.truth.ordinary[inverse]].mean())

        return share

    def cell(self, attack: Attack, adversary: Adversary, chain: Future[Chain]) -> tuple[AttackResult, Ids | None]:
        knowledge = adversary.knowledge
        if "candidates" in attack.assumes | attack.helped_by:
            knowledge = replace(knowledge, candidates=chain.result()[1])

        def attempt(own: Budget) -> Guess:
            return attack.run(self.scene.transcript, knowledge, own, self._rng(attack))

        return self._graded(attack, adversary.name, knowledge, attempt, lambda: None)

    def _own(self, attack: Attack) -> Budget:
        """What is left; a part of it for an attack that would use all there is, and for one that others wait for."""
        left = max(GRACE if _waits(attack) else 1.0, self.budget.left())
        seconds = CHAIN * left if _early(attack) else left
        return Budget(max(left / 2, attack.needs) if attack.needs else seconds, stopped=self.stop.is_set)

    def _rng(self, attack: Attack) -> np.random.Generator:
        return np.random.default_rng([self.seed, *attack.name.encode()])

    def _graded(
        self,
        attack: Attack,
        adversary: str,
        knowledge: Knowledge,
        attempt: Callable[[Budget], Guess],
        in_group: Callable[[], float | None],
        reusable: bool = True,
    ) -> tuple[AttackResult, Ids | None]:
        name = f"{adversary}-{attack.name}".replace(" ", "_")
        if reusable and (kept := self.work.cell(name)):
            self.progress(kept[0])
            return kept
        blank = AttackResult(
            attack.name,
            attack.title,
            adversary,
            "not run",
            of_outputs=attack.of_outputs,
            costly=attack.needs > 0,
            joint=_early(attack) or "candidates" in attack.assumes | attack.helped_by,
        )
        reading = None
        try:
            cell, reading = self._tried(blank, attack, knowledge, attempt, in_group)
        except MilkglassError as error:
            cell = replace(blank, state="failed", reason=error.message)
        except Exception as error:  # noqa: BLE001 - one attack's fault must not cost the others' results
            cell = replace(blank, state="failed", reason=type(error).__name__)  # its text may quote what it saw
        if cell.state == "done" and not self.stop.is_set():
            self.work.keep(name, cell, reading)
        self.progress(cell)
        return cell, reading

    def _tried(
        self,
        blank: AttackResult,
        attack: Attack,
        knowledge: Knowledge,
        attempt: Callable[[Budget], Guess],
        in_group: Callable[[], float | None],
    ) -> tuple[AttackResult, Ids | None]:
        if reason := why_not(attack, self.scene.transcript, knowledge):
            return replace(blank, state="does not apply", reason=reason), None
        if self.stop.is_set() or (self.budget.left() <= 0 and not _waits(attack)):
            return replace(blank, reason="the budget was spent before its turn"), None
        if attack.needs and self.budget.left() < attack.needs:
            return replace(blank, reason=f"it needs {attack.needs:.0f} s, less is left: give a longer --budget"), None
        started, own = time.monotonic(), self._own(attack)
        guess = attempt(own)
        seconds = time.monotonic() - started
        truth, rng = self.scene.truth_about(attack.of_outputs), np.random.default_rng(self.seed)
        recovery = score(guess, truth, rng)
        reading = None if guess.bags is not None else truth.readings(guess)[:, 0]
        sent = reading is not None and not attack.of_outputs
        return replace(
            blank,
            state="done",
            seconds=seconds,
            measures=recovery.measures,
            by_class=by_class(self.scene, reading, rng) if sent and reading is not None else {},
            cut=own.left() <= 0,
            in_group=in_group(),
        ), reading if sent else None


def by_class(scene: Scene, reading: Ids, rng: np.random.Generator) -> dict[str, Interval]:
    """The share of each class of tokens that was read rightly; classes that do not occur are left out."""
    sent = scene.truth.tokens
    counted: NDArray[np.bool_] = scene.truth.ordinary[sent.ids]
    which = classes(scene.texts, scene.content, sent.counts(len(scene.content)))
    result: dict[str, Interval] = {}
    for number, name in enumerate(CLASSES):
        inside = counted & (which == number)
        if inside.any():
            weights = np.bincount(sent.owner, inside, len(sent)).astype(np.float64)
            hits = np.bincount(sent.owner, inside & (reading == sent.ids), len(sent)).astype(np.float64)
            result[name] = ratio(hits, weights, rng)
    return result

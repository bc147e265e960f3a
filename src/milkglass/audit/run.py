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
    attacks: Mapping[str, Attack],
    work: ResumeStore,
    budget: Budget,
    seed: int,
    threads: int = 2,
    progress: Report = lambda cell: None,
    use_minimum: bool = True,
) -> AuditRun:
    """Args:
    attacks: by the name that their results have, in the order in which candidates are handed on.
    use_minimum: whether an attack's `min_seconds` counts; a recipe says itself how long an attack may take.
    """
    selected = _entries(attacks, use_minimum)
    runner = _Runner(scene, work, budget, seed, progress)
    with ThreadPoolExecutor(threads) as pool:  # the chain is submitted first, so whoever waits for it waits in turn
        try:
            undoers = [one.attack for one in selected if isinstance(one.attack, Preprocessor)]
            early = [one for one in selected if one.early]
            chain = pool.submit(runner.chain, early, undoers, scene.adversaries[0].knowledge)
            rest = [pool.submit(runner.cell, entry, who, chain) for who, entry in _pairs(scene, selected)]
            result = [*chain.result()[0], *(one.result() for one in rest)]
        except BaseException:  # Ctrl-C above all: what runs stops at its next look at the budget, nothing more begins
            runner.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    readings = {(cell.adversary, cell.attack): read for cell, read in result if read is not None}
    return AuditRun(tuple(cell for cell, _ in result), readings, chain.result()[1])


def planned(scene: Scene, attacks: Mapping[str, Attack]) -> int:
    """How many cells there will be."""
    selected = _entries(attacks)
    return sum(one.early for one in selected) + len(_pairs(scene, selected))


@dataclass(frozen=True)
class _Entry:
    """One attack of a run.

    Attributes:
        name: that its results have.
        min_seconds: see `Attack`.
    """

    name: str
    attack: Attack
    min_seconds: float

    @property
    def early(self) -> bool:
        """Solvers without text: they are the chain."""
        return isinstance(self.attack, Solver) and "corpus" not in self.attack.assumes and not self.attack.of_outputs

    @property
    def takes_candidates(self) -> bool:
        return "candidates" in self.attack.assumes | self.attack.uses

    @property
    def waits(self) -> bool:
        """For the chain: these are cheap and read most, so a budget that the chain used up must not be their end."""
        return self.takes_candidates and not self.min_seconds and not self.early

    @property
    def turn(self) -> int:
        """What ends soon while the chain runs; what reads most as soon as it has ended; last what takes minutes."""
        if self.waits:
            return 1
        if not self.min_seconds:
            return 0
        return 2 if "candidates" in self.attack.assumes else 3


def _entries(attacks: Mapping[str, Attack], use_minimum: bool = True) -> list[_Entry]:
    return [_Entry(name, one, one.min_seconds if use_minimum else 0.0) for name, one in attacks.items()]


def _pairs(scene: Scene, chosen: Sequence[_Entry]) -> list[tuple[Adversary, _Entry]]:
    """Who runs what beside the chain: an attack without text is run once, one that reads text by whoever has some, and
    by nobody else unless nobody has any, so that the reason is said."""
    bare, *others = scene.adversaries
    result = []
    for adversary in scene.adversaries:
        for entry in chosen:
            reads = "corpus" in entry.attack.assumes | entry.attack.uses
            expected = not others or not reads if adversary is bare else reads
            if expected and not entry.early:
                result.append((adversary, entry))
    return sorted(result, key=lambda pair: pair[1].turn)


Chain = tuple[list[tuple[AttackResult, Ids | None]], Candidates | None]


@dataclass(frozen=True)
class _Runner:
    scene: Scene
    work: ResumeStore
    budget: Budget
    seed: int
    progress: Report
    stop: Event = field(default_factory=Event)

    def chain(self, solvers: Sequence[_Entry], undoers: Sequence[Preprocessor], knowledge: Knowledge) -> Chain:
        """Where an attack can undo a part of the scheme, the solvers start from what it leaves."""
        result, candidates, transcript = [], None, self.scene.transcript
        for undoer in undoers if solvers else ():
            try:
                if not self.stop.is_set() and why_not(undoer, transcript, knowledge) is None:
                    transcript = undoer.before(transcript, knowledge)
            except Exception:  # noqa: BLE001, S112 - it has a cell of its own, which says that it failed
                continue
        for solver in solvers:
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
        self, entry: _Entry, knowledge: Knowledge, transcript: Transcript
    ) -> tuple[AttackResult, Ids | None, Candidates | None]:
        learnt: list[Candidates] = []
        name = self.scene.adversaries[0].name
        kept = self.work.candidates(entry.name)
        solver = entry.attack
        assert isinstance(solver, Solver)

        def attempt(own: Budget) -> Guess:
            learnt.append(solver.learn(transcript, knowledge, own, self._rng(entry)))
            self.work.keep_candidates(entry.name, learnt[0])  # before the cell: one without the other is done again
            return ranked(learnt[0], self.scene.transcript.size)

        cell, reading = self._graded(entry, name, knowledge, attempt, self._in_group(learnt), kept is not None)
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

    def cell(self, entry: _Entry, adversary: Adversary, chain: Future[Chain]) -> tuple[AttackResult, Ids | None]:
        knowledge = adversary.knowledge
        if entry.takes_candidates:
            knowledge = replace(knowledge, candidates=chain.result()[1])

        def attempt(own: Budget) -> Guess:
            return entry.attack.run(self.scene.transcript, knowledge, own, self._rng(entry))

        return self._graded(entry, adversary.name, knowledge, attempt, lambda: None)

    def _own(self, entry: _Entry) -> Budget:
        """What is left; a part of it for an attack that would use all there is, and for one that others wait for."""
        left = max(GRACE if entry.waits else 1.0, self.budget.left())
        seconds = CHAIN * left if entry.early else left
        return Budget(max(left / 2, entry.min_seconds) if entry.min_seconds else seconds, stopped=self.stop.is_set)

    def _rng(self, entry: _Entry) -> np.random.Generator:
        return np.random.default_rng([self.seed, *entry.name.encode()])

    def _graded(
        self,
        entry: _Entry,
        adversary: str,
        knowledge: Knowledge,
        attempt: Callable[[Budget], Guess],
        in_group: Callable[[], float | None],
        reusable: bool = True,
    ) -> tuple[AttackResult, Ids | None]:
        name = f"{adversary}-{entry.name}".replace(" ", "_")
        if reusable and (kept := self.work.cell(name)):
            self.progress(kept[0])
            return kept
        blank = AttackResult(
            entry.name,
            entry.attack.title,
            adversary,
            "not run",
            of_outputs=entry.attack.of_outputs,
            costly=entry.min_seconds > 0,
            joint=entry.early or entry.takes_candidates,
        )
        reading = None
        try:
            cell, reading = self._tried(blank, entry, knowledge, attempt, in_group)
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
        entry: _Entry,
        knowledge: Knowledge,
        attempt: Callable[[Budget], Guess],
        in_group: Callable[[], float | None],
    ) -> tuple[AttackResult, Ids | None]:
        attack = entry.attack
        if reason := why_not(attack, self.scene.transcript, knowledge):
            return replace(blank, state="does not apply", reason=reason), None
        if self.stop.is_set() or (self.budget.left() <= 0 and not entry.waits):
            return replace(blank, reason="the budget was spent before its turn"), None
        if entry.min_seconds and self.budget.left() < entry.min_seconds:
            return replace(
                blank, reason=f"it needs {entry.min_seconds:.0f} s, less is left: give a longer --budget"
            ), None
        started, own = time.monotonic(), self._own(entry)
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

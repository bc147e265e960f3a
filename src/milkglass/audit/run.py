"""Run every attack of the catalogue by every adversary, side by side, within a budget, and go on after a stop.

Solvers that need no text run first, one after the other, each with the candidates of the one before; what they found is
handed to every attack that assumes candidates. Each finished cell is on disk before the next begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from milkglass.attacks.assignment import Solver, ranked
from milkglass.audit.cells import Cell
from milkglass.audit.scene import Adversary, Scene
from milkglass.audit.texts import CLASSES, classes
from milkglass.audit.work import Work
from milkglass.errors import MilkglassError
from milkglass.metrics.interval import Interval, ratio
from milkglass.sequences import Ids
from milkglass.threat import Attack, Budget, Candidates, Guess, Knowledge, score, why_not

Tell = Callable[[Cell], None]


@dataclass(frozen=True)
class Done:
    """cells, and for each done one the public id read for each token sent, (total,)."""

    cells: tuple[Cell, ...]
    readings: Mapping[tuple[str, str], Ids]
    candidates: Candidates | None  # what the solvers that need no text arrived at


def run(
    scene: Scene,
    attacks: Mapping[str, type[Attack]],
    work: Work,
    budget: Budget,
    seed: int,
    threads: int = 2,
    tell: Tell = lambda cell: None,
) -> Done:
    """attacks: by name, in the order in which candidates are handed on."""
    chosen = [kind() for kind in attacks.values()]
    bare = scene.adversaries[0]
    runner = _Runner(scene, work, budget, seed, tell)
    with ThreadPoolExecutor(threads) as pool:  # the chain is submitted first, so whoever waits for it waits in turn
        chain = pool.submit(runner.chain, [a for a in chosen if _early(a)], bare.knowledge)
        cells: list[Future[list[tuple[Cell, Ids | None]]] | Future[tuple[Cell, Ids | None]]] = []
        for adversary, attack in _pairs(scene, chosen):
            cells.append(pool.submit(runner.cell, attack, adversary, chain))
        found: list[tuple[Cell, Ids | None]] = list(chain.result()[0])
        for one in cells:
            result = one.result()
            found += result if isinstance(result, list) else [result]
    readings = {(cell.adversary, cell.attack): read for cell, read in found if read is not None}
    return Done(tuple(cell for cell, _ in found), readings, chain.result()[1])


def planned(scene: Scene, attacks: Mapping[str, type[Attack]]) -> int:
    """How many cells there will be."""
    chosen = [kind() for kind in attacks.values()]
    return sum(map(_early, chosen)) + len(_pairs(scene, chosen))


def _pairs(scene: Scene, chosen: Sequence[Attack]) -> list[tuple[Adversary, Attack]]:
    """Who runs what beside the chain: an attack without text is run once, one that reads text by whoever has some, and
    by nobody else unless nobody has any, so that the reason is said."""
    bare, *others = scene.adversaries
    found = []
    for adversary in scene.adversaries:
        for attack in chosen:
            reads = "corpus" in attack.assumes
            wanted = not others or not reads if adversary is bare else reads
            if wanted and not _early(attack):
                found.append((adversary, attack))
    return found


def _early(attack: Attack) -> bool:
    """Solvers without text: they are the chain."""
    return isinstance(attack, Solver) and "corpus" not in attack.assumes


Chain = tuple[list[tuple[Cell, Ids | None]], Candidates | None]


@dataclass(frozen=True)
class _Runner:
    scene: Scene
    work: Work
    budget: Budget
    seed: int
    tell: Tell

    def chain(self, solvers: Sequence[Attack], knowledge: Knowledge) -> Chain:
        found, candidates = [], None
        for solver in solvers:
            assert isinstance(solver, Solver)
            given = replace(knowledge, candidates=candidates)
            cell, reading, learnt = self._solve(solver, given)
            candidates = learnt or candidates
            found.append((cell, reading))
        return found, candidates

    def _solve(self, solver: Solver, knowledge: Knowledge) -> tuple[Cell, Ids | None, Candidates | None]:
        learnt: list[Candidates] = []
        name = self.scene.adversaries[0].name

        def attempt() -> Guess:
            learnt.append(solver.learn(self.scene.transcript, knowledge, self._own(solver), self._rng(solver)))
            return ranked(learnt[0], self.scene.transcript.size)

        kept = self.work.candidates(solver.name)
        cell, reading = self._graded(solver, name, knowledge, attempt, self._in_group(learnt))
        if learnt:
            self.work.keep_candidates(solver.name, learnt[0])
        return cell, reading, learnt[0] if learnt else kept

    def _in_group(self, learnt: list[Candidates]) -> Callable[[], float | None]:
        """Called when the solver is done: the share of ordinary ids whose public id is in a group that was solved."""

        def share() -> float | None:
            if not learnt:
                return None
            inverse = self.scene.truth.inverse
            hit = np.zeros(len(inverse), np.bool_)
            for group in learnt[0].groups:
                if group.weights is not None or len(group.members) == 1:  # solved; what is left over is not
                    hit[group.rows] = np.isin(inverse[group.rows], group.members)
            return float(hit[self.scene.truth.ordinary[inverse]].mean())

        return share

    def cell(self, attack: Attack, adversary: Adversary, chain: Future[Chain]) -> tuple[Cell, Ids | None]:
        knowledge = adversary.knowledge
        if "candidates" in attack.assumes | attack.helped_by:
            knowledge = replace(knowledge, candidates=chain.result()[1])

        def attempt() -> Guess:
            return attack.run(self.scene.transcript, knowledge, self._own(attack), self._rng(attack))

        return self._graded(attack, adversary.name, knowledge, attempt, lambda: None)

    def _own(self, attack: Attack) -> Budget:
        """What is left; half of it for an attack that would use all there is."""
        left = max(1.0, self.budget.left())
        return Budget(max(left / 2, attack.needs) if attack.needs else left)

    def _rng(self, attack: Attack) -> np.random.Generator:
        return np.random.default_rng([self.seed, *attack.name.encode()])

    def _graded(
        self,
        attack: Attack,
        adversary: str,
        knowledge: Knowledge,
        attempt: Callable[[], Guess],
        in_group: Callable[[], float | None],
    ) -> tuple[Cell, Ids | None]:
        name = f"{adversary}-{attack.name}".replace(" ", "_")
        if kept := self.work.cell(name):
            self.tell(kept[0])
            return kept
        blank = Cell(attack.name, attack.title, adversary, "not run")
        started, reading = time.monotonic(), None
        if reason := why_not(attack, self.scene.transcript, knowledge):
            cell = replace(blank, state="does not apply", reason=reason)
        elif self.budget.left() <= 0:
            cell = replace(blank, reason="the budget was spent before its turn")
        elif self.budget.left() < attack.needs:
            cell = replace(blank, reason=f"it needs {attack.needs / 60:.1g} min, less is left of the budget")
        else:
            try:
                guess = attempt()
            except MilkglassError as error:
                cell = replace(blank, state="failed", reason=error.message)
            except (ArithmeticError, MemoryError, RuntimeError, np.linalg.LinAlgError) as error:
                cell = replace(blank, state="failed", reason=type(error).__name__)  # its text may quote what it saw
            else:
                cell, reading = self._done(blank, guess, time.monotonic() - started, in_group())
        if cell.state != "not run":
            self.work.keep(name, cell, reading)
        self.tell(cell)
        return cell, reading

    def _done(self, blank: Cell, guess: Guess, seconds: float, in_group: float | None) -> tuple[Cell, Ids | None]:
        rng = np.random.default_rng(self.seed)
        recovery = score(guess, self.scene.truth, rng)
        reading = None if guess.bags is not None else guess.at(self.scene.truth.sent)[:, 0]
        return replace(
            blank,
            state="done",
            seconds=seconds,
            measures=recovery.measures,
            by_class={} if reading is None else by_class(self.scene, reading, rng),
            in_group=in_group,
        ), reading


def by_class(scene: Scene, reading: Ids, rng: np.random.Generator) -> dict[str, Interval]:
    """The share of each class of tokens that was read rightly; classes that do not occur are left out."""
    sent = scene.truth.tokens
    counted: NDArray[np.bool_] = scene.truth.ordinary[sent.ids]
    which = classes(scene.texts, scene.content, sent.counts(scene.transcript.size))
    found: dict[str, Interval] = {}
    for number, name in enumerate(CLASSES):
        inside = counted & (which == number)
        if inside.any():
            weights = np.bincount(sent.owner, inside, len(sent)).astype(np.float64)
            hits = np.bincount(sent.owner, inside & (reading == sent.ids), len(sent)).astype(np.float64)
            found[name] = ratio(hits, weights, rng)
    return found

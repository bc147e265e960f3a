"""Runs every attack by every adversary who can run it, one after the other, within a budget.

Attacks on ids and tables, on hidden states and on gradients all run here. Attacks that undo a scheme itself run first.
Solvers that need no text follow, each with the candidates of the one before, and their result is given to every attack
that uses candidates. Then plan.py decides the order. One attack runs at a time, since a budget counts the processor
seconds of the whole process. Each result is on disk before the next attack begins, so a stopped run can resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from milkglass.attacks.assignment import Solver, ranked
from milkglass.audit.outcome import AttackResult, AuditRun, FinishedAttack, share_in_group, shares_by_class
from milkglass.audit.plan import AttackTurn, scheduled_attacks, split_at_chain, turns_of
from milkglass.audit.resume import ResumeStore
from milkglass.audit.scene import Adversary, Scene
from milkglass.errors import MilkglassError
from milkglass.threat.attack import Attack, Preprocessor, why_not
from milkglass.threat.budget import Budget, OutOfTime, ended_with
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Transcript
from milkglass.threat.truth import score

Report = Callable[[AttackResult], None]
ENDED = "it was ended when the budget was spent, before it had read anything: give a longer --budget"
OVERTIME_FACTOR, SPARE_SECONDS = 1.5, 2.0  # times its own budget, and seconds more, after which an attack is ended
MIN_PLACED_SHARE = 0.01  # of the ids; candidates that place fewer are guesses of a solver that failed, and mislead


@dataclass(frozen=True)
class RunOptions:
    """How a run treats its attacks. The defaults are those of an audit.

    Attributes:
        use_minimum: whether an attack's `min_seconds` counts; recipes set their own times.
        own_budget: returns the next attack's own budget; all attacks then draw from the same seed. None: attacks share
            the whole budget, and each draws from the seed and its name.
        deadline: a budget of the clock's seconds; an attack that still runs when it is spent is ended and has no
            result. None: each attack is waited for.
    """

    use_minimum: bool = True
    own_budget: Callable[[], Budget] | None = None
    deadline: Budget | None = None


RECIPE = RunOptions(use_minimum=False)


def run(
    scene: Scene,
    attacks: Mapping[str, Attack],
    store: ResumeStore | None,
    budget: Budget,
    seed: int,
    progress: Report = lambda result: None,
    rules: RunOptions = RunOptions(),
) -> AuditRun:
    """Runs the attacks of a scene.

    Args:
        scene: what is attacked.
        attacks: by the name of their results, in the order in which candidates are passed on.
        store: where results are kept. None: nowhere.
        budget: of the whole run.
        seed: of every random draw.
        progress: receives each result at once.
        rules: see `RunOptions`.
    """
    turns = turns_of(attacks, rules.use_minimum)
    runner = _Runner(scene, store, budget, seed, progress, rules)
    before_chain, after_chain = split_at_chain(scheduled_attacks(scene, turns))
    finished = [runner.run_attack(turn, who, _Chain([], None, False)) for who, turn in before_chain]
    chain = runner.chain(turns)
    finished += [*chain.attacks, *(runner.run_attack(turn, who, chain) for who, turn in after_chain)]
    place = {(name, who.name): n for n, (name, who) in enumerate(product(attacks, scene.adversaries))}
    finished.sort(key=lambda attack: place[attack.result.attack, attack.result.adversary])  # in the catalogue's order
    return AuditRun(tuple(finished), chain.candidates)


# --- one attack -------------------------------------------------------------------------------------------------------
Attempt = Callable[[Transcript, Knowledge, Budget, np.random.Generator], Guess]


@dataclass(frozen=True, eq=False)
class _Chain:
    """The result of the solvers.

    Attributes:
        attacks: the result of each solver.
        candidates: what they found.
        renewed: whether one of them ran now, so that stored results from earlier candidates are outdated.
    """

    attacks: list[FinishedAttack]
    candidates: Candidates | None
    renewed: bool


@dataclass(frozen=True)
class _Runner:
    scene: Scene
    store: ResumeStore | None
    budget: Budget
    seed: int
    progress: Report
    rules: RunOptions

    def chain(self, turns: Sequence[AttackTurn]) -> _Chain:
        """Runs the solvers. If an attack can undo a part of the scheme, they start from what it leaves."""
        solvers = [turn for turn in turns if turn.is_solver_without_text]
        undoers = [turn.attack for turn in turns if isinstance(turn.attack, Preprocessor)] if solvers else []
        who = self.scene.adversaries[0]
        finished, renewed = list[FinishedAttack](), False
        candidates, transcript = who.knowledge.candidates, self.scene.transcript
        for undoer in undoers:
            try:
                if why_not(undoer, transcript, who.knowledge) is None:
                    with ended_with(self.rules.deadline):
                        transcript = undoer.before(transcript, who.knowledge)
            except (Exception, OutOfTime):  # noqa: BLE001, S112 - it has a result of its own, which says that it failed
                continue
        for solver in solvers:
            attack, learnt, anew = self._solve(solver, who, candidates, transcript, renewed)
            renewed = renewed or anew
            placed = 0 if learnt is None else sum(len(group.rows) for group in learnt.solved)
            if placed and placed >= MIN_PLACED_SHARE * self.scene.transcript.size:
                candidates = learnt
            finished.append(attack)
        return _Chain(finished, candidates, renewed)

    def _solve(
        self, turn: AttackTurn, who: Adversary, candidates: Candidates | None, transcript: Transcript, renewed: bool
    ) -> tuple[FinishedAttack, Candidates | None, bool]:
        """Returns the result, the candidates, and whether the solver ran now.

        Args:
            renewed: whether a solver before it ran now.
        """
        solver, learnt = turn.attack, list[Candidates]()
        assert isinstance(solver, Solver)
        stale = self.store is None or (renewed and turn.takes_candidates)
        stored_candidates = None if self.store is None or stale else self.store.candidates(turn.name)

        def attempt(seen: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
            learnt.append(solver.learn(transcript, knowledge, budget, rng))
            if self.store is not None:  # before the result: one without the other is done again
                self.store.write_candidates(turn.name, learnt[0])
            return ranked(learnt[0], seen.size)

        knowledge = replace(who.knowledge, candidates=candidates)
        finished = self._stored(turn, who) if stored_candidates is not None else None
        finished = finished or self._run_attack(turn, who, knowledge, attempt, learnt)
        return finished, learnt[0] if learnt else stored_candidates, bool(learnt)

    def run_attack(self, turn: AttackTurn, who: Adversary, chain: _Chain) -> FinishedAttack:
        knowledge, stale = who.knowledge, False
        if turn.takes_candidates and knowledge.candidates is None:
            knowledge, stale = replace(knowledge, candidates=chain.candidates), chain.renewed
        return (None if stale else self._stored(turn, who)) or self._run_attack(turn, who, knowledge, turn.attack)

    def _stored(self, turn: AttackTurn, who: Adversary) -> FinishedAttack | None:
        """Returns the stored result of an earlier run, or None."""
        stored = None if self.store is None else self.store.stored_result(_file_name(turn, who))
        if stored is None:
            return None
        self.budget.spend(stored[0].seconds)
        self.progress(stored[0])
        return FinishedAttack(stored[0], reading=stored[1])

    def _run_attack(
        self,
        turn: AttackTurn,
        who: Adversary,
        knowledge: Knowledge,
        attempt: Attempt,
        learnt: Sequence[Candidates] = (),
    ) -> FinishedAttack:
        """Runs an attack, grades it and stores the result. An error is its result, not the audit's."""
        result = turn.not_run_result(who)
        try:
            finished = self._attempt(result, turn, self.scene.seen_by(who), knowledge, attempt, learnt)
        except MilkglassError as error:
            finished = FinishedAttack(replace(result, state="failed", reason=error.message))
        except Exception as error:  # noqa: BLE001 - one attack's fault must not cost the others' results
            finished = FinishedAttack(
                replace(result, state="failed", reason=type(error).__name__)
            )  # its text may quote texts
        if finished.result.state == "done" and self.store is not None:
            self.store.write_result(_file_name(turn, who), finished.result, finished.reading)
        self.progress(finished.result)
        return finished

    def _attempt(
        self, result: AttackResult, turn: AttackTurn, seen: Transcript, knowledge: Knowledge, attempt: Attempt,
        learnt: Sequence[Candidates],
    ) -> FinishedAttack:  # fmt: skip
        """Returns an attack's graded result, or why it does not apply or came too late."""
        budget = self._budget(turn)
        if reason := why_not(turn.attack, seen, knowledge):
            return FinishedAttack(replace(result, state="does not apply", reason=reason))
        if reason := turn.why_late(self.budget.left()):
            return FinishedAttack(replace(result, reason=reason))
        started = budget.clock()
        seed_of_attack = [self.seed, *turn.name.encode()] if self.rules.own_budget is None else self.seed
        try:
            with ended_with(self._deadline(budget)), _seed_torch(budget, seed_of_attack):
                guess = attempt(seen, knowledge, budget, np.random.default_rng(seed_of_attack))
        except OutOfTime:
            return FinishedAttack(replace(result, reason=ENDED))
        if budget.clock() == started:
            budget.spend(self._declared_cost(turn, knowledge))
        result, is_cut = replace(result, state="done", seconds=budget.clock() - started), budget.left() <= 0
        truth, rng = self.scene.truth_about(turn.attack.of_outputs), np.random.default_rng(self.seed)
        result = replace(result, measures=score(guess, truth, rng).measures, in_group=share_in_group(learnt, truth))
        if guess.bags is not None or guess.texts is not None or turn.attack.of_outputs:
            return FinishedAttack(result.with_cut(is_cut), guess)
        reading = truth.readings(guess)[:, 0]
        if self.scene.texts is not None:
            result = replace(result, by_class=shares_by_class(self.scene.texts, truth, reading, rng))
        return FinishedAttack(result.with_cut(is_cut), guess, reading)

    def _deadline(self, budget: Budget) -> Budget | None:
        """Returns when an attack is ended: with the run, or if each has its own budget, somewhat after that."""
        run_deadline = self.rules.deadline
        if run_deadline is None or self.rules.own_budget is None:
            return run_deadline
        return Budget(
            min(run_deadline.left(), OVERTIME_FACTOR * budget.left() + SPARE_SECONDS), clock=run_deadline.clock
        )

    def _declared_cost(self, turn: AttackTurn, knowledge: Knowledge) -> float:
        """Returns the declared cost of an attack that does not count its work."""
        sent, corpus = len(self.scene.truth.tokens.ids), knowledge.corpus
        width = 0 if knowledge.public_model is None else knowledge.public_model.width
        tokens = sent + (0 if corpus is None else len(corpus.ids))
        return turn.attack.cost.seconds(self.scene.transcript.size, width, sent, tokens)

    def _budget(self, turn: AttackTurn) -> Budget:
        """Returns the attack's share of what is left."""
        if self.rules.own_budget is not None:
            return self.rules.own_budget()
        seconds = turn.share(self.budget.left())
        return Budget(seconds, stopped=self.budget.stopped, clock=self.budget.clock)


@contextmanager
def _seed_torch(budget: Budget, seed: int | list[int]) -> Iterator[None]:
    """Seeds what torch draws for all of a process, such as dropout, if the budget counts work: nothing may differ."""
    if not budget.counts_work:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.default_rng(seed).integers(2**63)))
        yield


def _file_name(turn: AttackTurn, who: Adversary) -> str:
    return f"{who.name}-{turn.name}".replace(" ", "_")

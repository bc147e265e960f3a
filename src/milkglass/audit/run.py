"""Runs every attack by every adversary who can run it, one after the other, within a budget.

Attacks on ids and tables, on hidden states and on gradients all run here. Attacks that undo a scheme itself run first.
Then come the solvers that need no text, one after the other: a solver (attacks/assignment.py) finds candidates, the
public ids for which each scrambled id can stand, and starts from the candidates of the solver before it. Every later
attack that uses candidates gets the result. plan.py decides the order of the rest. One attack runs at a time, since a
budget counts the CPU seconds of the whole process. Each result is on disk before the next attack begins, so a stopped
run can resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch

from milkglass.attacks.assignment import Solver, guess_by_rank
from milkglass.audit.outcome import AttackOutcome, AttackResult, AuditRun, share_in_group, shares_by_class
from milkglass.audit.plan import AttackTurn, scheduled_attacks, split_at_chain, turns_of
from milkglass.audit.resume import ResumeStore
from milkglass.audit.scene import Adversary, Scene
from milkglass.errors import MilkglassError
from milkglass.threat.attack import Attack, Preprocessor, why_not
from milkglass.threat.budget import Budget, OutOfTime, time_limit
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Transcript
from milkglass.threat.truth import score

OnResult = Callable[[AttackResult], None]
ALL_READ_REASON = "an attack before it read every token that was sent"
ENDED_REASON = "it was ended when the budget was spent, before it had read anything: give a longer --budget"
# An attack with its own budget is ended after so many times that budget and so many seconds more
OVERTIME_FACTOR, OVERTIME_SECONDS = 1.5, 2.0
MIN_PLACED_SHARE = 0.01  # candidates that place a smaller share of the ids come from a solver that failed, and mislead


@dataclass(frozen=True)
class RunOptions:
    """Sets how a run treats its attacks. The defaults are those of an audit.

    Attributes:
        requires_min_seconds: whether an attack begins only if its `min_seconds` are left (plan.py). Recipes set their
            own times.
        next_budget: returns the budget of the next attack; all attacks then draw from the same seed. None: attacks
            share the run's budget, and each draws from the seed and its name.
        deadline: a budget of wall-clock seconds. An attack that still runs when it is spent is ended and has no result.
            None: no attack is ended.
        on_begin: receives the title of each attack when it begins.
        ends_when_all_is_read: whether no attack begins after one that read every token that was sent.
    """

    requires_min_seconds: bool = True
    next_budget: Callable[[], Budget] | None = None
    deadline: Budget | None = None
    on_begin: Callable[[str], None] = lambda title: None
    ends_when_all_is_read: bool = False


RECIPE_OPTIONS = RunOptions(requires_min_seconds=False)


def run(
    scene: Scene,
    attacks: Mapping[str, Attack],
    store: ResumeStore | None,
    budget: Budget,
    seed: int,
    on_result: OnResult = lambda result: None,
    options: RunOptions = RunOptions(),
) -> AuditRun:
    """Runs every attack of a scene for every adversary. An attack that fails does not end the run.

    Args:
        scene: what is attacked.
        attacks: the attacks by the names of their results. Solvers pass candidates on in this order.
        store: keeps results, so that a stopped run resumes. None: nothing is kept.
        budget: the time of the whole run.
        seed: decides every random draw.
        on_result: is called with each result as soon as it is known.
        options: how the attacks are treated.

    Returns:
        The results in the order of `attacks`, for each attack in the order of the scene's adversaries, and the
        candidates that the solvers found.
    """
    turns = turns_of(attacks, options.requires_min_seconds)
    runner = _Runner(scene, store, budget, seed, on_result, options)
    before_chain, after_chain = split_at_chain(scheduled_attacks(scene, turns))
    finished = [runner.run_attack(turn, adversary, _Chain([], None, False)) for adversary, turn in before_chain]
    chain = runner.run_chain(turns)
    finished += [*chain.attacks, *(runner.run_attack(turn, adversary, chain) for adversary, turn in after_chain)]
    order = {
        (name, adversary.name): index for index, (name, adversary) in enumerate(product(attacks, scene.adversaries))
    }
    finished.sort(key=lambda attack: order[attack.result.attack, attack.result.adversary])  # as in the catalogue
    return AuditRun(tuple(finished), chain.candidates)


# --- one attack -------------------------------------------------------------------------------------------------------
MakeGuess = Callable[[Transcript, Knowledge, Budget, np.random.Generator], Guess]


@dataclass(frozen=True, eq=False)
class _Chain:
    """Holds what the chain of solvers leaves to the attacks after it.

    Attributes:
        attacks: the result of each solver.
        candidates: what the solvers found together. None: nothing.
        is_renewed: whether a solver ran now, so that stored results that used earlier candidates are outdated.
    """

    attacks: list[AttackOutcome]
    candidates: Candidates | None
    is_renewed: bool


@dataclass(frozen=True)
class _Runner:
    """Runs single attacks and the chain. The fields are the arguments of `run`, and the results so far."""

    scene: Scene
    store: ResumeStore | None
    budget: Budget
    seed: int
    on_result: OnResult
    options: RunOptions
    results: list[AttackResult] = field(default_factory=list)

    def run_chain(self, turns: Sequence[AttackTurn]) -> _Chain:
        """Runs the solvers. If an attack can undo a part of the scheme, they start from what it leaves."""
        solvers = [turn for turn in turns if turn.is_solver_without_text]
        preprocessors = [turn.attack for turn in turns if isinstance(turn.attack, Preprocessor)] if solvers else []
        adversary = self.scene.adversaries[0]
        finished, is_renewed = list[AttackOutcome](), False
        candidates, transcript = adversary.knowledge.candidates, self.scene.transcript
        for preprocessor in preprocessors:
            try:
                if why_not(preprocessor, transcript, adversary.knowledge) is None:
                    with time_limit(self.options.deadline):
                        transcript = preprocessor.undo(transcript, adversary.knowledge)
            except (Exception, OutOfTime):  # noqa: BLE001, S112 - the attack has a result of its own, which says so
                continue
        for solver in solvers:
            attack, solution, ran_now = self._solve(solver, adversary, candidates, transcript, is_renewed)
            is_renewed = is_renewed or ran_now
            placed_count = 0 if solution is None else sum(len(group.rows) for group in solution.solved_groups)
            if placed_count and placed_count >= MIN_PLACED_SHARE * self.scene.transcript.vocab_size:
                candidates = solution
            finished.append(attack)
        return _Chain(finished, candidates, is_renewed)

    def _solve(
        self,
        turn: AttackTurn,
        adversary: Adversary,
        candidates: Candidates | None,
        transcript: Transcript,
        is_renewed: bool,
    ) -> tuple[AttackOutcome, Candidates | None, bool]:
        """Returns a solver's result, the candidates that it found, and whether it ran now.

        Args:
            candidates: what the solvers before it found.
            transcript: what it reads, which is what undoing attacks left of the scene's transcript.
            is_renewed: whether a solver before it ran now.
        """
        solver, solutions = turn.attack, list[Candidates]()
        assert isinstance(solver, Solver)
        is_stale = self.store is None or (is_renewed and turn.takes_candidates)
        stored_candidates = None if self.store is None or is_stale else self.store.candidates(turn.name)

        def make_guess(seen: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
            solutions.append(solver.learn(transcript, knowledge, budget, rng))
            if self.store is not None:  # before the result: one without the other is done again
                self.store.write_candidates(turn.name, solutions[0])
            return guess_by_rank(solutions[0], seen.vocab_size)

        knowledge = replace(adversary.knowledge, candidates=candidates)
        finished = self._load_stored(turn, adversary) if stored_candidates is not None else None
        finished = finished or self._run_attack(turn, adversary, knowledge, make_guess, solutions)
        return finished, solutions[0] if solutions else stored_candidates, bool(solutions)

    def run_attack(self, turn: AttackTurn, adversary: Adversary, chain: _Chain) -> AttackOutcome:
        """Returns an attack's result: the stored one if it still holds, or else that of a new run."""
        knowledge, is_stale = adversary.knowledge, False
        if turn.takes_candidates and knowledge.candidates is None:
            knowledge, is_stale = replace(knowledge, candidates=chain.candidates), chain.is_renewed
        stored = None if is_stale else self._load_stored(turn, adversary)
        return stored or self._run_attack(turn, adversary, knowledge, turn.attack)

    def _load_stored(self, turn: AttackTurn, adversary: Adversary) -> AttackOutcome | None:
        """Returns the stored result of an earlier run, or None.

        Its seconds are charged to the run's budget, if that counts work.
        """
        stored = None if self.store is None else self.store.stored_result(turn.file_name(adversary))
        if stored is None:
            return None
        result, reading = stored
        self.budget.spend(result.seconds)
        self._add_result(result)
        return AttackOutcome(result, reading=reading)

    def _run_attack(
        self,
        turn: AttackTurn,
        adversary: Adversary,
        knowledge: Knowledge,
        make_guess: MakeGuess,
        solutions: Sequence[Candidates] = (),
    ) -> AttackOutcome:
        """Runs an attack, grades it and stores the result. An error becomes the attack's result, and the run goes on.

        Args:
            knowledge: what the adversary has besides the transcript.
            make_guess: the attack itself.
            solutions: receives the candidates of a solver while `make_guess` runs; empty for other attacks.
        """
        result = turn.not_run_result(adversary)
        try:
            finished = self._attack_and_grade(
                result, turn, self.scene.seen_by(adversary), knowledge, make_guess, solutions
            )
        except MilkglassError as error:
            finished = AttackOutcome(replace(result, state="failed", reason=error.message))
        except Exception as error:  # noqa: BLE001 - one attack's fault must not cost the others' results
            fault = type(error).__name__  # without its message, which may quote texts
            finished = AttackOutcome(replace(result, state="failed", reason=fault))
        if finished.result.state == "done" and self.store is not None:
            self.store.write_result(turn.file_name(adversary), finished.result, finished.reading)
        self._add_result(finished.result)
        return finished

    def _add_result(self, result: AttackResult) -> None:
        """Keeps a result, and reports it."""
        self.results.append(result)
        self.on_result(result)

    def _is_all_read(self) -> bool:
        """Returns whether an attack read every token that was sent."""
        return any(not result.of_outputs and result.value("tokens top-1") == 1.0 for result in self.results)

    def _attack_and_grade(
        self, result: AttackResult, turn: AttackTurn, seen: Transcript, knowledge: Knowledge, make_guess: MakeGuess,
        solutions: Sequence[Candidates],
    ) -> AttackOutcome:  # fmt: skip
        """Returns an attack's graded result, or why it does not apply or came too late."""
        budget = self._budget(turn)
        if reason := why_not(turn.attack, seen, knowledge):
            return AttackOutcome(replace(result, state="does not apply", reason=reason))
        if self.options.ends_when_all_is_read and not turn.attack.of_outputs and self._is_all_read():
            return AttackOutcome(replace(result, state="does not apply", reason=ALL_READ_REASON))
        if reason := turn.why_late(self.budget.left()):
            return AttackOutcome(replace(result, reason=reason))
        self.options.on_begin(turn.attack.title)
        started = budget.clock()
        attack_seed = [self.seed, *turn.name.encode()] if self.options.next_budget is None else self.seed
        try:
            with time_limit(self._deadline(budget)), _seed_torch(budget, attack_seed):
                guess = make_guess(seen, knowledge, budget, np.random.default_rng(attack_seed))
        except OutOfTime:
            return AttackOutcome(replace(result, reason=ENDED_REASON))
        if budget.clock() == started:
            budget.spend(self._declared_cost(turn, knowledge))
        result, is_cut = replace(result, state="done", seconds=budget.clock() - started), budget.left() <= 0
        truth, rng = self.scene.truth_about(turn.attack.of_outputs), np.random.default_rng(self.seed)
        result = replace(result, measures=score(guess, truth, rng).measures, in_group=share_in_group(solutions, truth))
        if guess.bags is not None or guess.texts is not None or turn.attack.of_outputs:
            return AttackOutcome(result.with_cut(is_cut), guess)
        reading = truth.readings(guess)[:, 0]
        if self.scene.texts is not None:
            result = replace(result, by_class=shares_by_class(self.scene.texts, truth, reading, rng))
        return AttackOutcome(result.with_cut(is_cut), guess, reading)

    def _deadline(self, budget: Budget) -> Budget | None:
        """Returns what ends an attack: the run's deadline, or somewhat more than its own budget if it has one."""
        run_deadline = self.options.deadline
        if run_deadline is None or self.options.next_budget is None:
            return run_deadline
        return Budget(
            min(run_deadline.left(), OVERTIME_FACTOR * budget.left() + OVERTIME_SECONDS), clock=run_deadline.clock
        )

    def _declared_cost(self, turn: AttackTurn, knowledge: Knowledge) -> float:
        """Returns the seconds that an attack says it takes, which stand for one that does not count its work."""
        sent_tokens, corpus = len(self.scene.truth.tokens.ids), knowledge.corpus
        width = 0 if knowledge.public_model is None else knowledge.public_model.width
        all_tokens = sent_tokens + (0 if corpus is None else len(corpus.ids))
        return turn.attack.cost.seconds(self.scene.transcript.vocab_size, width, sent_tokens, all_tokens)

    def _budget(self, turn: AttackTurn) -> Budget:
        """Returns the attack's own budget, or its share of what is left of the run's."""
        if self.options.next_budget is not None:
            return self.options.next_budget()
        seconds = turn.share(self.budget.left())
        return Budget(seconds, stopped=self.budget.stopped, clock=self.budget.clock)


@contextmanager
def _seed_torch(budget: Budget, seed: int | list[int]) -> Iterator[None]:
    """Seeds torch's own generator, from which dropout draws, if the budget counts work.

    Two such runs then give equal results.
    """
    if not budget.counts_work:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.default_rng(seed).integers(2**63)))
        yield

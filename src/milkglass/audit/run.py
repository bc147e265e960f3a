"""The one game: every attack by every adversary who can run it, side by side, within a budget, going on after a stop.

What is observed does not matter here: ids and tables, hidden states, and gradients are attacked by the same code.
Solvers that need no text run first, one after the other, each with the candidates of the one before; what they worked
out is handed to every attack that uses candidates. Each finished result is on disk before the next attack begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np

from milkglass.attacks.assignment import Solver, ranked
from milkglass.audit.outcome import AttackResult, AuditRun, FinishedAttack, by_class, in_group
from milkglass.audit.resume import ResumeStore
from milkglass.audit.scene import Adversary, Scene
from milkglass.errors import MilkglassError
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
class RunOptions:
    """How a run treats its attacks; the defaults are those of an audit.

    Attributes:
        threads: how many attacks run at once.
        use_minimum: whether an attack's `min_seconds` counts; a recipe decides itself how long an attack may take.
        own_stream: whether each attack draws from the seed and its name, or all alike from the seed.
        own_budget: the budget of the next attack, where each has one of its own. None: shares of the whole.
    """

    threads: int = 2
    use_minimum: bool = True
    own_stream: bool = True
    own_budget: Callable[[], Budget] | None = None


RECIPE = RunOptions(threads=1, use_minimum=False)


@dataclass(frozen=True)
class AttackTurn:
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
    def rank(self) -> int:
        """0: at once, while the chain runs; 1: after the chain; 2-3: slow attacks."""
        if self.waits:
            return 1
        if not self.min_seconds:
            return 0
        return 2 if "candidates" in self.attack.assumes else 3

    def result_by(self, adversary: Adversary) -> AttackResult:
        """Before it was run."""
        return AttackResult(
            self.name,
            self.attack.title,
            adversary.name,
            "not run",
            of_outputs=self.attack.of_outputs,
            costly=self.min_seconds > 0,
            joint=self.early or self.takes_candidates,
        )


def turns_of(attacks: Mapping[str, Attack], use_minimum: bool = True) -> list[AttackTurn]:
    return [AttackTurn(name, one, one.min_seconds if use_minimum else 0.0) for name, one in attacks.items()]


def pairs(scene: Scene, turns: Sequence[AttackTurn]) -> list[tuple[Adversary, AttackTurn]]:
    """Who runs what beside the chain."""
    late = [(turn, scene.players(turn.attack)) for turn in turns if not turn.early]
    pairs = [(who, turn) for who in scene.adversaries for turn, players in late if who in players]
    return sorted(pairs, key=lambda pair: pair[1].rank)


def run(
    scene: Scene,
    attacks: Mapping[str, Attack],
    store: ResumeStore | None,
    budget: Budget,
    seed: int,
    progress: Report = lambda result: None,
    rules: RunOptions = RunOptions(),
) -> AuditRun:
    """Args:
    attacks: by the name that their results have, in the order in which candidates are handed on.
    store: where results are kept; None: nowhere.
    progress: receives each result as it is there, from the thread that ran the attack.
    """
    turns = turns_of(attacks, rules.use_minimum)
    runner = _Runner(scene, store, budget, seed, progress, rules)
    with ThreadPoolExecutor(rules.threads) as pool:  # the chain is submitted first: what waits for it waits in turn
        try:
            chain = pool.submit(runner.chain, turns)
            rest = [pool.submit(runner.play, turn, who, chain) for who, turn in pairs(scene, turns)]
            result = [*chain.result()[0], *(one.result() for one in rest)]
        except BaseException:  # Ctrl-C above all: what runs stops at its next look at the budget, nothing more begins
            runner.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return AuditRun(tuple(result), chain.result()[1])


def planned(scene: Scene, attacks: Mapping[str, Attack]) -> int:
    """How many results there will be."""
    turns = turns_of(attacks)
    return sum(one.early for one in turns) + len(pairs(scene, turns))


# --- one attack -------------------------------------------------------------------------------------------------------
Chain = tuple[list[FinishedAttack], Candidates | None]
Attempt = Callable[[Transcript, Knowledge, Budget, np.random.Generator], Guess]


@dataclass(frozen=True)
class _Runner:
    scene: Scene
    store: ResumeStore | None
    budget: Budget
    seed: int
    progress: Report
    rules: RunOptions
    stop: Event = field(default_factory=Event)

    def chain(self, turns: Sequence[AttackTurn]) -> Chain:
        """Where an attack can undo a part of the scheme, the solvers start from what it leaves."""
        solvers = [one for one in turns if one.early]
        undoers = [one.attack for one in turns if isinstance(one.attack, Preprocessor)] if solvers else []
        who = self.scene.adversaries[0]
        played, candidates, transcript = [], who.knowledge.candidates, self.scene.transcript
        for undoer in undoers:
            try:
                if not self.stop.is_set() and why_not(undoer, transcript, who.knowledge) is None:
                    transcript = undoer.before(transcript, who.knowledge)
            except Exception:  # noqa: BLE001, S112 - it has a result of its own, which says that it failed
                continue
        for solver in solvers:
            one, learnt = self._solve(solver, who, candidates, transcript)
            placed = 0 if learnt is None else sum(len(group.rows) for group in learnt.solved)
            if placed and placed >= PLACED * self.scene.transcript.size:
                candidates = learnt
            played.append(one)
        return played, candidates

    def _solve(
        self, turn: AttackTurn, who: Adversary, candidates: Candidates | None, transcript: Transcript
    ) -> tuple[FinishedAttack, Candidates | None]:
        solver, learnt = turn.attack, list[Candidates]()
        assert isinstance(solver, Solver)
        kept = None if self.store is None else self.store.candidates(turn.name)

        def attempt(seen: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
            learnt.append(solver.learn(transcript, knowledge, budget, rng))
            if self.store is not None:  # before the result: one without the other is done again
                self.store.keep_candidates(turn.name, learnt[0])
            return ranked(learnt[0], seen.size)

        knowledge = replace(who.knowledge, candidates=candidates)
        played = self._kept(turn, who) if kept is not None else None
        played = played or self._played(turn, who, knowledge, attempt, learnt)
        return played, learnt[0] if learnt else kept

    def play(self, turn: AttackTurn, who: Adversary, chain: Future[Chain]) -> FinishedAttack:
        knowledge = who.knowledge
        if turn.takes_candidates and knowledge.candidates is None:
            knowledge = replace(knowledge, candidates=chain.result()[1])
        return self._kept(turn, who) or self._played(turn, who, knowledge, turn.attack)

    def _kept(self, turn: AttackTurn, who: Adversary) -> FinishedAttack | None:
        """What was played before a stop."""
        kept = None if self.store is None else self.store.cell(_file_name(turn, who))
        if kept is None:
            return None
        self.progress(kept[0])
        return FinishedAttack(kept[0], reading=kept[1])

    def _played(
        self,
        turn: AttackTurn,
        who: Adversary,
        knowledge: Knowledge,
        attempt: Attempt,
        learnt: Sequence[Candidates] = (),
    ) -> FinishedAttack:
        result = turn.result_by(who)
        try:
            played = self._tried(result, turn, self.scene.seen_by(who), knowledge, attempt, learnt)
        except MilkglassError as error:
            played = FinishedAttack(replace(result, state="failed", reason=error.message))
        except Exception as error:  # noqa: BLE001 - one attack's fault must not cost the others' results
            played = FinishedAttack(
                replace(result, state="failed", reason=type(error).__name__)
            )  # its text may quote texts
        if played.result.state == "done" and self.store is not None and not self.stop.is_set():
            self.store.keep(_file_name(turn, who), played.result, played.reading)
        self.progress(played.result)
        return played

    def _tried(
        self, result: AttackResult, turn: AttackTurn, seen: Transcript, knowledge: Knowledge, attempt: Attempt,
        learnt: Sequence[Candidates],
    ) -> FinishedAttack:  # fmt: skip
        budget = self._budget(turn)
        if reason := why_not(turn.attack, seen, knowledge):
            return FinishedAttack(replace(result, state="does not apply", reason=reason))
        if reason := self._late(turn):
            return FinishedAttack(replace(result, reason=reason))
        started = budget.clock()
        guess = attempt(seen, knowledge, budget, self._rng(turn))
        result = replace(result, state="done", seconds=budget.clock() - started, cut=budget.left() <= 0)
        truth, rng = self.scene.truth_about(turn.attack.of_outputs), np.random.default_rng(self.seed)
        result = replace(result, measures=score(guess, truth, rng).measures, in_group=in_group(learnt, truth))
        if guess.bags is not None or guess.texts is not None or turn.attack.of_outputs:
            return FinishedAttack(result, guess)
        reading = truth.readings(guess)[:, 0]
        if self.scene.texts is not None:
            result = replace(result, by_class=by_class(self.scene.texts, truth, reading, rng))
        return FinishedAttack(result, guess, reading)

    def _late(self, turn: AttackTurn) -> str:
        """Why there is no time for it, "" where there is."""
        left = self.budget.left()
        if self.stop.is_set() or (left <= 0 and not turn.waits):
            return "the budget was spent before its turn"
        if turn.min_seconds and left < turn.min_seconds:
            return f"it needs {turn.min_seconds:.0f} s, less is left: give a longer --budget"
        return ""

    def _budget(self, turn: AttackTurn) -> Budget:
        """What is left; a part of it for an attack that would use all there is, and for one that others wait for."""
        if self.rules.own_budget is not None:
            own = self.rules.own_budget()
            return replace(own, stopped=lambda: own.stopped() or self.stop.is_set())
        left = max(GRACE if turn.waits else 1.0, self.budget.left())
        seconds = CHAIN * left if turn.early else left
        return Budget(max(left / 2, turn.min_seconds) if turn.min_seconds else seconds, stopped=self.stop.is_set)

    def _rng(self, turn: AttackTurn) -> np.random.Generator:
        return np.random.default_rng([self.seed, *turn.name.encode()] if self.rules.own_stream else self.seed)


def _file_name(turn: AttackTurn, who: Adversary) -> str:
    return f"{who.name}-{turn.name}".replace(" ", "_")

"""The order of an audit's attacks, and how long they will take.

The order is: attacks that undo a scheme itself, the chain of solvers that need no text, attacks that start from their
candidates, attacks that read more with more time, and baselines (`Attack.baseline`). A short budget omits the last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from milkglass.attacks.assignment import Solver
from milkglass.audit.key_budget import curve_sizes
from milkglass.audit.outcome import AttackResult
from milkglass.audit.scene import Adversary, Scene
from milkglass.threat.attack import Attack, Cost, why_not
from milkglass.threat.knowledge import Candidates, require_known

SPARE_FACTOR = 4  # a baseline of long training is begun only with so many times its `min_seconds`
GRACE_SECONDS = 30.0  # seconds for an attack that waited for the chain, however much of the budget that took
CHAIN_SHARE = 0.6  # of what is left of the budget: the strongest attacks come after the chain and need the rest
MAX_DOUBLINGS = 12  # how often a budget that is too short is doubled in search of one that would do
REFERENCE_SECONDS = 0.10  # CPU seconds of `slowness`'s job on the machine on which attacks were timed
JOB_ROWS, JOB_WIDTH, JOB_OTHER_ROWS, JOB_PRODUCTS = 512, 256, 8192, 4  # the sizes of the job of `slowness`


@dataclass(frozen=True)
class AttackTurn:
    """Decides an attack's place in the order of a run, and its share of the budget.

    Attributes:
        name: the name of the attack's results.
        attack: the attack.
        min_seconds: `Attack.min_seconds`; 0 if it does not count.
    """

    name: str
    attack: Attack
    min_seconds: float

    @property
    def is_solver_without_text(self) -> bool:
        """Returns whether the attack is one of the chain: a solver that needs no text of the attacker's."""
        return isinstance(self.attack, Solver) and "corpus" not in self.attack.assumes and not self.attack.of_outputs

    @property
    def takes_candidates(self) -> bool:
        """Returns whether the attack uses candidates that solvers found."""
        return "candidates" in self.attack.assumes | self.attack.uses

    @property
    def must_run(self) -> bool:
        """Returns whether the attack runs even if the chain used up the budget: such ones are cheap and read most."""
        return self.takes_candidates and not self.min_seconds and not self.is_solver_without_text

    @property
    def begin_seconds(self) -> float:
        """Returns the seconds that must be left for the attack to begin."""
        return self.min_seconds * (SPARE_FACTOR if self.attack.baseline else 1)

    def share(self, seconds_left: float) -> float:
        """Returns how many of the seconds left the attack may use.

        These are not all if other attacks need its result, or if it uses all that it gets.
        """
        seconds_left = max(GRACE_SECONDS if self.must_run else 1.0, seconds_left)
        if self.attack.runs_first:  # what it reads leaves nothing for others, or it ends at once
            return seconds_left
        if self.is_solver_without_text:
            return CHAIN_SHARE * seconds_left
        return max(seconds_left / 2, self.min_seconds) if self.min_seconds else seconds_left

    def why_late(self, seconds_left: float) -> str:
        """Returns why there is no time for the attack; "" if there is."""
        if seconds_left <= 0 and not self.must_run:
            return "the budget was spent before its turn"
        if self.begin_seconds and seconds_left < self.begin_seconds:
            return f"it is begun only with {self.begin_seconds:.0f} s of the budget left: give a longer --budget"
        return ""

    @property
    def rank(self) -> int:
        """Returns the attack's place in the order. Negative ranks are before the chain; 0 is the first after it."""
        if self.attack.runs_first:
            return -1 if self.min_seconds else -2
        if self.attack.baseline:
            return 5 if self.min_seconds else 4
        if not self.min_seconds:
            return 0 if self.must_run else 1
        return 2 if "candidates" in self.attack.assumes else 3

    def file_name(self, adversary: Adversary) -> str:
        """Returns the name under which the result of this attack by an attacker is stored."""
        return f"{adversary.name}-{self.name}".replace(" ", "_")

    def not_run_result(self, adversary: Adversary) -> AttackResult:
        """Returns the result of this attack before it runs."""
        return AttackResult(
            self.name,
            self.attack.title,
            adversary.name,
            "not run",
            of_outputs=self.attack.of_outputs,
            costly=self.min_seconds > 0,
            joint=self.is_solver_without_text or self.takes_candidates,
        )


ScheduledAttack = tuple[Adversary, AttackTurn]


def turns_of(attacks: Mapping[str, Attack], requires_min_seconds: bool = True) -> list[AttackTurn]:
    """Returns the turns of attacks that are given by the names of their results."""
    return [
        AttackTurn(name, attack, attack.min_seconds if requires_min_seconds else 0.0)
        for name, attack in attacks.items()
    ]


def scheduled_attacks(scene: Scene, turns: Sequence[AttackTurn]) -> list[ScheduledAttack]:
    """Returns each attack besides the chain with its attacker, in order. The attacker who has most comes first."""
    after_chain = [(turn, scene.attackers_of(turn.attack)) for turn in turns if not turn.is_solver_without_text]
    pairs = [
        (adversary, turn)
        for adversary in reversed(scene.adversaries)
        for turn, attackers in after_chain
        if adversary in attackers
    ]
    return sorted(pairs, key=lambda pair: pair[1].rank)


def split_at_chain(scheduled: Sequence[ScheduledAttack]) -> tuple[list[ScheduledAttack], list[ScheduledAttack]]:
    """Returns the pairs before the chain and those after it."""
    return [pair for pair in scheduled if pair[1].rank < 0], [pair for pair in scheduled if pair[1].rank >= 0]


def without_id_recovery(scene: Scene, attacks: Mapping[str, Attack]) -> dict[str, Attack]:
    """Returns the attacks, without those that recover ids if public ids are sent.

    These take most of a run's time, and then read no more than the ids themselves.
    """
    has_public_ids = scene.adversaries[0].knowledge.has_public_ids
    return {name: attack for name, attack in attacks.items() if not (has_public_ids and attack.recovers_ids)}


def planned_count(scene: Scene, attacks: Mapping[str, Attack]) -> int:
    """Returns how many results there will be."""
    turns = turns_of(attacks)
    return sum(turn.is_solver_without_text for turn in turns) + len(scheduled_attacks(scene, turns))


# --- how long ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TimeEstimate:
    """Holds the estimated time of an audit on this machine.

    Attributes:
        seconds: CPU time of the attacks that the budget lets begin and that end by themselves, and of the curve of the
            key's budget.
        timed_attack_count: the number of these attacks.
        open_ended_titles: the other attacks that begin, each of which uses up to half of what is left of the budget.
        late_titles: attacks, except baselines, for which too little time is left.
        enough_seconds: a budget in which late attacks end, or at least begin. nan: none is late, or none was found.
    """

    seconds: float
    timed_attack_count: int
    open_ended_titles: tuple[str, ...]
    late_titles: tuple[str, ...] = ()
    enough_seconds: float = math.nan


@dataclass(frozen=True)
class _Step:
    """Pairs an attack that applies with its attacker and its time.

    Attributes:
        adversary: the attacker.
        turn: the attack.
        seconds: the time that the attack takes here. None: it uses what it gets.
    """

    adversary: Adversary
    turn: AttackTurn
    seconds: float | None


def estimate(
    scene: Scene, attacks: Mapping[str, Attack], budget: float, finished_names: Collection[str] = ()
) -> TimeEstimate:
    """Estimates the time from the number of tokens, the size of the tables, and a short measurement of this machine.

    Args:
        budget: the budget of the attacks, in CPU seconds.
        finished_names: the names (`AttackTurn.file_name`) of attacks that an earlier run finished.
    """
    steps = [step for step in _steps(scene, attacks) if step.turn.file_name(step.adversary) not in finished_names]
    sent = len(scene.truth.tokens.ids)
    begun_steps, late_steps = _schedule(steps, budget)
    ended_steps = [step for step in begun_steps if step.seconds is not None]
    curve_seconds_of = dict[str, float]()
    for step in ended_steps:
        if step.turn.rank == 0 and step.adversary.knowledge.corpus is not None and scene.gains_from_more_text:
            curve_seconds = (step.seconds or 0.0) * len(curve_sizes(sent)) / 2  # the attack runs for each point
            curve_seconds_of[step.adversary.name] = max(curve_seconds_of.get(step.adversary.name, 0.0), curve_seconds)
    seconds = sum(step.seconds or 0.0 for step in ended_steps) + sum(curve_seconds_of.values())
    open_ended = dict.fromkeys(step.turn.attack.title for step in begun_steps if step.seconds is None)
    titles = tuple(dict.fromkeys(step.turn.attack.title for step in late_steps))
    return TimeEstimate(
        seconds, len(ended_steps), tuple(open_ended), titles, _enough_budget(steps, budget) if late_steps else math.nan
    )


def _steps(scene: Scene, attacks: Mapping[str, Attack]) -> list[_Step]:
    """Returns all attacks that apply, in the order of a run, with their estimated seconds."""
    turns, size, sent = turns_of(attacks), scene.transcript.vocab_size, len(scene.truth.tokens.ids)
    steps, pace = list[_Step](), slowness()
    before_chain, after_chain = split_at_chain(scheduled_attacks(scene, turns))
    chain = [(scene.adversaries[0], turn) for turn in turns if turn.is_solver_without_text]
    for adversary, turn in [*before_chain, *chain, *after_chain]:
        if not _applies(scene, adversary, turn):
            continue
        seconds = None
        if not turn.min_seconds or turn.attack.cost != Cost():
            corpus = adversary.knowledge.corpus
            tokens = sent + (0 if corpus is None else len(corpus.ids))
            width = require_known(adversary.knowledge.public_model).width
            seconds = pace * turn.attack.cost.seconds(size, width, sent, tokens)
        steps.append(_Step(adversary, turn, seconds))
    return steps


def _schedule(steps: Sequence[_Step], budget: float) -> tuple[list[_Step], list[_Step]]:
    """Returns the attacks that are begun, and those that are not begun or are cut short, without baselines.

    It shares the budget as run.py does. Each attack takes its estimated time, and open-ended ones all they get.
    """
    seconds_left, begun_steps, late_steps = budget, list[_Step](), list[_Step]()
    for step in steps:
        share = step.turn.share(seconds_left)
        needed = share if step.seconds is None else step.seconds
        is_late = bool(step.turn.why_late(seconds_left))
        if not is_late:
            begun_steps.append(step)
            seconds_left -= min(needed, share)
        if (is_late or needed > share) and not step.turn.attack.baseline:
            late_steps.append(step)
    return begun_steps, late_steps


def _enough_budget(steps: Sequence[_Step], budget: float) -> float:
    """Returns the first of twice the budget, four times, ... in which nothing is late; nan if none was found."""
    budgets = (budget * 2**power for power in range(1, MAX_DOUBLINGS + 1))
    return next((seconds for seconds in budgets if not _schedule(steps, seconds)[1]), math.nan)


def _applies(scene: Scene, adversary: Adversary, turn: AttackTurn) -> bool:
    """Returns whether the attack applies, as far as known before the chain: candidates are assumed to be found."""
    knowledge = adversary.knowledge
    if knowledge.candidates is None:
        knowledge = replace(knowledge, candidates=Candidates((), ()))
    try:
        return why_not(turn.attack, scene.seen_by(adversary), knowledge) is None
    except Exception:  # noqa: BLE001 - the attack fails at its turn, and its result says so
        return False


def slowness() -> float:
    """Returns how many times longer a comparison of rows takes here than on the machine where attacks were timed.

    The measurement takes some tenths of a second.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(JOB_ROWS, JOB_WIDTH, generator=generator)
    other_rows = torch.randn(JOB_WIDTH, JOB_OTHER_ROWS, generator=generator)
    fastest = float("inf")
    for _ in range(3):  # the first one also loads the library
        started = time.process_time()
        for _ in range(JOB_PRODUCTS):
            (rows @ other_rows).topk(10, dim=1)
        fastest = min(fastest, time.process_time() - started)
    return fastest / REFERENCE_SECONDS

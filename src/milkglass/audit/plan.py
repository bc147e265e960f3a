"""The order of an audit's attacks, and how long they will take.

What reads most comes first: the chain of solvers that need no text, what starts from their candidates, then attacks
that read more with more time, and at last those that papers compare with. A budget that is too short costs the weakest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from milkglass.attacks.assignment import Solver
from milkglass.audit.key_budget import sizes
from milkglass.audit.outcome import AttackResult
from milkglass.audit.scene import Adversary, Scene
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.cost import Cost
from milkglass.threat.knowledge import Candidates, required

SPARE = 4  # an attack of long training that others surpass is begun only where its least time is left so many times
REFERENCE = 0.10  # processor seconds of `speed`'s job on the machine on which attacks were timed
ROWS, WIDTH, AGAINST, TIMES = 512, 256, 8192, 4  # of that job


@dataclass(frozen=True)
class AttackTurn:
    """One attack of a run.

    Attributes:
        name: that its results have.
        min_seconds: see `Attack`; 0 where it does not count.
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
    def least(self) -> float:
        """Seconds that must be left when its turn comes."""
        return self.min_seconds * (SPARE if self.attack.baseline else 1)

    @property
    def rank(self) -> int:
        """0: first after the chain."""
        if self.attack.baseline:
            return 5 if self.min_seconds else 4
        if not self.min_seconds:
            return 0 if self.waits else 1
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
    """Who runs what after the chain, in this order: of attackers the last one, who has most, comes first."""
    late = [(turn, scene.players(turn.attack)) for turn in turns if not turn.early]
    pairs = [(who, turn) for who in reversed(scene.adversaries) for turn, players in late if who in players]
    return sorted(pairs, key=lambda pair: pair[1].rank)


def planned(scene: Scene, attacks: Mapping[str, Attack]) -> int:
    """How many results there will be."""
    turns = turns_of(attacks)
    return sum(one.early for one in turns) + len(pairs(scene, turns))


# --- how long ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TimeEstimate:
    """What an audit will take here.

    Attributes:
        seconds: of processor time, of the attacks that say what they take and of the key's budget.
        attacks: how many those are.
        open_ended: titles of the others: they use up to half of what is left of the budget.
    """

    seconds: float
    attacks: int
    open_ended: tuple[str, ...]


def estimated(scene: Scene, attacks: Mapping[str, Attack], budget: float) -> TimeEstimate:
    """From the number of tokens, the size of the tables, and a short measurement of this machine. budget: seconds."""
    turns, size = turns_of(attacks), scene.transcript.size
    sent, again = len(scene.truth.tokens.ids), dict[str, float]()
    seconds, ended, open_ended = 0.0, 0, dict[str, None]()
    for who, turn in [*((scene.adversaries[0], one) for one in turns if one.early), *pairs(scene, turns)]:
        if turn.least > budget or not _applies(scene, who, turn):
            continue
        if turn.min_seconds and turn.attack.cost == Cost():
            open_ended[turn.attack.title] = None
            continue
        corpus = who.knowledge.corpus
        tokens = sent + (0 if corpus is None else len(corpus.ids))
        took = turn.attack.cost.seconds(size, required(who.knowledge.public_model).width, tokens)
        seconds, ended = seconds + took, ended + 1
        if turn.rank == 0 and corpus is not None and scene.has_key_budget:  # again for each point of the curve
            again[who.name] = max(again.get(who.name, 0.0), took * len(sizes(sent)) / 2)
    return TimeEstimate(speed() * (seconds + sum(again.values())), ended, tuple(open_ended))


def _applies(scene: Scene, who: Adversary, turn: AttackTurn) -> bool:
    """As far as can be said before the chain: candidates are assumed to be found."""
    knowledge = who.knowledge
    if knowledge.candidates is None:
        knowledge = replace(knowledge, candidates=Candidates((), ()))
    try:
        return why_not(turn.attack, scene.seen_by(who), knowledge) is None
    except Exception:  # noqa: BLE001 - when its turn comes it has a result, which says that it failed
        return False


def speed() -> float:
    """How much longer a comparison of rows takes here than where attacks were timed; measured in some tenths of a
    second."""
    drawn = torch.Generator().manual_seed(0)
    rows, others = torch.randn(ROWS, WIDTH, generator=drawn), torch.randn(WIDTH, AGAINST, generator=drawn)
    best = float("inf")
    for _ in range(3):  # the first one also loads the library
        started = time.process_time()
        for _ in range(TIMES):
            (rows @ others).topk(10, dim=1)
        best = min(best, time.process_time() - started)
    return best / REFERENCE

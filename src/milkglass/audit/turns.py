"""Which attacks of a run are played by whom, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from milkglass.attacks.assignment import Solver
from milkglass.audit.outcome import AttackResult
from milkglass.audit.scene import Adversary, Scene
from milkglass.threat.attack import Attack


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
        """What ends soon while the chain runs; what reads most as soon as it has ended; last what takes minutes."""
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

"""One attack by one adversary: what came of it. Never blank: a score, "does not apply: reason" or "failed: reason"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from milkglass.metrics.interval import Interval

State = Literal["done", "does not apply", "failed", "not run"]


@dataclass(frozen=True)
class AttackResult:
    """attack, adversary: names. reason: for every state but "done". measures: see metrics/recovery.py. by_class: for
    each class of token (client/data/texts.py) the share that came back. examples: (original, as the attacker reads it).
    """

    attack: str
    title: str
    adversary: str
    state: State
    reason: str = ""
    seconds: float = 0.0
    measures: Mapping[str, Interval] = field(default_factory=dict)
    by_class: Mapping[str, Interval] = field(default_factory=dict)
    of_outputs: bool = False  # it reads what was generated, not what was sent
    costly: bool = False  # an attack that only a longer budget begins
    joint: bool = False  # it finds the clusters, or starts from them: these read most
    cut: bool = False  # the budget ended it early: the figure is what it had by then
    in_group: float | None = None  # solvers: share of the ordinary vocabulary whose token is among its candidates

    def to_json(self) -> dict[str, Any]:
        """nan, which JSON does not have, becomes null."""
        raw = asdict(self)
        for name in ("measures", "by_class"):
            raw[name] = {
                measure: {part: None if number != number else number for part, number in one.items()}
                for measure, one in raw[name].items()
            }
        return raw

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> AttackResult:
        known = dict(raw)
        for name in ("measures", "by_class"):
            known[name] = {measure: _interval(one) for measure, one in known[name].items()}
        return cls(**known)

    @property
    def what(self) -> str:
        """The attack's title, and what it reads where that is not what was sent."""
        return f"{self.title}, of the answers" if self.of_outputs else self.title

    def value(self, measure: str) -> float:
        """nan where there is no such figure."""
        return self.measures[measure].value if measure in self.measures else float("nan")


def _interval(raw: Mapping[str, Any]) -> Interval:
    value, low, high = (math.nan if raw[part] is None else float(raw[part]) for part in ("value", "low", "high"))
    return Interval(value, low, high, int(raw["units"]))


def strongest(cells: tuple[AttackResult, ...], measure: str | None = None) -> AttackResult | None:
    """The one that got most of what was sent back, by this measure; without one by running and content tokens alike,
    so that neither figure of a verdict is far below another attack's. None: none was done."""
    names = ("tokens top-1", "content top-1") if measure is None else (measure, "tokens top-1")
    done = [cell for cell in cells if not cell.of_outputs and not math.isnan(cell.value(names[0]))]

    def got(cell: AttackResult) -> tuple[float, ...]:
        values = [0.0 if math.isnan(cell.value(name)) else cell.value(name) for name in names]  # no content at all
        return (sum(values),) if measure is None else tuple(values)

    return max(done, key=got, default=None)

"""What an audit of updates found: each attack's figures, what was refused, what attackers had, and a verdict.

What this module does not know: how any of it came about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from milkglass.metrics.interval import Interval

AS_THEY_ARE = "shadows as they are"  # no attack: who reads the shadows and takes them for the text


@dataclass(frozen=True)
class Found:
    """Of one attack. reason: for every state but "done". rounds: attacked ones, from 0. left_out: reasons by round,
    where it did not apply to some. cut: the budget ended it. texts, trained: measures against the site's texts, and
    against what was trained on; None where an attack does not read that."""

    attack: str
    state: Literal["done", "does not apply", "failed"]
    reason: str = ""
    rounds: tuple[int, ...] = ()
    left_out: Mapping[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    cut: bool = False
    texts: Mapping[str, Interval] = field(default_factory=dict)
    trained: Mapping[str, Interval] | None = None

    def to_json(self) -> dict[str, Any]:
        raw = asdict(self)
        raw["texts"] = _plain(raw["texts"])
        raw["trained"] = None if self.trained is None else _plain(raw["trained"])
        return raw


@dataclass(frozen=True)
class PublicTexts:
    """How many texts attackers had. given: of those that the audit was given. own: of the site's own, which stand for
    text of the same kind: no attacked update comes from them. left_out: of both, since they hold an attacked text or
    are part of one (audit/decontaminate.py). tokens: of what was left. name: what was given, in words."""

    name: str
    given: int
    own: int
    left_out: int
    tokens: int

    def __str__(self) -> str:
        parts = [f"{self.given:,} of {self.name}"] if self.given else []
        parts += [f"{self.own:,} of the site's own that no attacked update comes from"] if self.own else []
        return f"public text of {self.tokens:,} tokens ({', '.join(parts)})" if parts else "no public text"


@dataclass(frozen=True)
class Leakage:
    """site, ghost: see replay.py. refused: rounds that nothing can be said of, and why. texts: how many were behind
    the others, a text once for each round that it was in. floor: what costs nothing (metrics/recovery.floors). advice:
    what would make attackers stronger, "" where nothing is known of that."""

    site: str
    ghost: bool
    rounds: tuple[int, ...]
    refused: Mapping[int, str]
    texts: int
    found: tuple[Found, ...]
    floor: Mapping[str, float]
    public: PublicTexts
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """nan becomes null."""
        raw = {"milkglass_update_audit": 1, **asdict(self), "verdict": verdict(self)}
        known = ["the model", "the weights of every round", "labels", "lengths", str(self.public)]
        floor = {name: None if math.isnan(one) else one for name, one in self.floor.items()}
        return raw | {"found": [one.to_json() for one in self.found], "floor": floor, "attackers_know": known}

    def strongest(self, measure: Callable[[Mapping[str, Interval]], Interval]) -> Found | None:
        """By that measure of what it read of the texts."""
        done = [one for one in self.found if one.state == "done" and one.texts]
        return max(done, key=lambda one: (measure(one.texts).value, rouge(one.texts).value), default=None)


@dataclass(frozen=True, eq=False)
class Reading:
    """One attack, one update: what stood there, what was read. Private."""

    attack: str
    round: int
    texts: list[str] = field(repr=False)
    readings: list[str] = field(repr=False)


def tokens(measures: Mapping[str, Interval]) -> Interval:
    """The share of tokens that came back; at their places alone where an attack reads places."""
    return measures["token recall"] if "token recall" in measures else measures["tokens top-1"]


def rouge(measures: Mapping[str, Interval]) -> Interval:
    return measures["rouge-1"]


def named(measures: Mapping[str, Interval]) -> Interval:
    """The share of a batch's different tokens that were read, whosever they are; as `tokens` where an attack reads
    places."""
    return measures.get("tokens named", tokens(measures))


def verdict(of: Leakage) -> str:
    """A sentence or two. It never says that texts are safe: what these attacks don't read, others may."""
    best, likest, most = of.strongest(tokens), of.strongest(rouge), of.strongest(named)
    if best is None or likest is None or most is None:
        why = next(iter(of.refused.values()), "no attack applies")
        return f"Nothing could be attacked ({why}), which says nothing of how much these updates tell."
    came = (
        f"at least {100 * tokens(best.texts).value:.1f} % of the tokens of site {of.site}'s texts ({best.attack}; "
        f"ROUGE-1 {100 * rouge(likest.texts).value:.1f} %{'' if likest is best else f' by {likest.attack}'})"
    )
    if named(most.texts).value > tokens(best.texts).value:
        share = f"{100 * named(most.texts).value:.1f} % of the different tokens of each batch"
        came += f", and knows {share}, if not which text they are from ({most.attack})"
    if not of.ghost:
        why = "the texts did not pass through GHOST, and other attacks may read more"
        return f"Whoever sees these updates gets back {came}; {why}."
    read = [tokens(one.trained).value for one in of.found if one.trained]
    known = max((named(one.trained).value for one in of.found if one.trained), default=0.0)
    shadows = f"Of the shadows that were trained on, {100 * max(read, default=0):.1f} % were read from these updates"
    if known > max(read, default=0):
        shadows += (
            f", and {100 * known:.1f} % of the different ones of each batch are known, if not which text they are from"
        )
    shadows += ". "
    seen = best.trained is not None or max(read, default=0) == 1  # else shadows were given that nobody read
    whoever = "Whoever sees these updates" if seen else "Whoever has all shadows"
    more = "Other attacks may read more."
    if not any(one.attack.startswith("shadow-") for one in of.found):
        more = "No attack on shadows was run (shadow-...): they read most of what GHOST leaves."
    return f"{shadows if read else ''}{whoever} gets back {came}. {more}"


def _plain(measures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    return {
        name: {part: None if number != number else number for part, number in one.items()}
        for name, one in measures.items()
    }

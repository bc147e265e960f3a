"""The report of an audit of updates: the figures of each attack, what was refused, what attackers had, a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from milkglass.audit.outcome import AttackResult, finite
from milkglass.metrics.interval import Interval

AS_THEY_ARE = "shadows as they are"  # no attack: the shadows are taken for the texts


@dataclass(frozen=True)
class PublicTexts:
    """How much public text attackers had.

    Attributes:
        name: what the audit was given, in words.
        given: how many of those texts remain.
        own: how many of the site's own texts, from which no attacked update comes.
        left_out: of both, because they contain an attacked text or are part of one (audit/decontaminate.py).
        tokens: in all remaining texts.
    """

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
    """What the updates of one site reveal.

    Attributes:
        site: its name.
        ghost: whether its texts passed through GHOST.
        rounds: those that were attacked, from 0.
        refused: rounds about which nothing can be said, and why.
        texts: how many texts were behind the attacked rounds, counted once for each round.
        results: of each attack against the site's texts, over all rounds.
        by_round: these results for each round, by attack.
        trained: figures against what was trained on, by attack.
        floor: what is recovered without an attack (metrics/recovery.floors).
        public: what text attackers had.
        advice: what would make attackers stronger; "" if nothing is known.
        noise: the defence of the gradients, if it adds noise.
        selection: how GHOST selected shadows; "" without GHOST.
    """

    site: str
    ghost: bool
    rounds: tuple[int, ...]
    refused: Mapping[int, str]
    texts: int
    results: tuple[AttackResult, ...]
    by_round: Mapping[str, Mapping[int, AttackResult]]
    trained: Mapping[str, Mapping[str, Interval]]
    floor: Mapping[str, float]
    public: PublicTexts
    advice: str = ""
    noise: str = ""
    selection: str = ""

    @property
    def done(self) -> list[AttackResult]:
        return [one for one in self.results if one.state == "done"]

    def attacked(self, attack: str) -> tuple[int, ...]:
        """Returns the rounds on which an attack ran."""
        rounds = self.by_round.get(attack)
        return self.rounds if rounds is None else tuple(n for n, one in rounds.items() if one.state == "done")

    def left_out(self, attack: str) -> dict[int, str]:
        """Returns the rounds to which an attack does not apply, and why."""
        rounds = self.by_round.get(attack, {})
        return {number: one.reason for number, one in rounds.items() if one.state != "done"}

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON, with null for nan."""
        raw = {
            "milkglass_update_audit": 1, "site": self.site, "ghost": self.ghost,
            "rounds": self.rounds, "refused": self.refused, "texts": self.texts,
            "found": [self._row(one) for one in self.results],
            "floor": self.floor, "public": asdict(self.public), "advice": self.advice, "verdict": verdict(self),
            "attackers_know": ["the model", "the weights of every round", "labels", "lengths", str(self.public)],
        }  # fmt: skip
        if self.selection not in ("", "states"):  # the paper's is the default, and is left out as in earlier reports
            raw["selection"] = self.selection
        return cast("dict[str, Any]", finite(raw))

    def _row(self, one: AttackResult) -> dict[str, Any]:
        done = one.state == "done"
        trained = self.trained.get(one.attack)
        return {
            "attack": one.attack, "state": one.state, "reason": one.reason,
            "rounds": self.attacked(one.attack) if done else (),
            "left_out": self.left_out(one.attack) if done else {},
            "seconds": one.seconds, "cut": one.cut, "texts": _plain(one.measures),
            "trained": None if trained is None else _plain(trained),
        }  # fmt: skip

    def strongest(self, measure: Callable[[Mapping[str, Interval]], Interval]) -> AttackResult | None:
        """Returns the attack that read most of the texts by this measure."""
        read = [one for one in self.done if one.measures]
        return max(read, key=lambda one: (measure(one.measures).value, rouge(one.measures).value), default=None)


@dataclass(frozen=True, eq=False)
class UpdateReading:
    """What one attack read of one update, beside the texts. Private."""

    attack: str
    round: int
    texts: list[str] = field(repr=False)
    readings: list[str] = field(repr=False)


def tokens(measures: Mapping[str, Interval]) -> Interval:
    """Returns the share of tokens that came back; for an attack that reads places, only those at their places."""
    return measures["token recall"] if "token recall" in measures else measures["tokens top-1"]


def rouge(measures: Mapping[str, Interval]) -> Interval:
    return measures["rouge-1"]


def named(measures: Mapping[str, Interval]) -> Interval:
    """Returns the share of a batch's different tokens that were read, from whichever text. See `tokens` for places."""
    return measures.get("tokens named", tokens(measures))


def verdict(of: Leakage) -> str:
    """Returns a sentence or two, which never say that texts are safe: other attacks may read more."""
    best, likest, most = of.strongest(tokens), of.strongest(rouge), of.strongest(named)
    if best is None or likest is None or most is None:
        why = next(iter(of.refused.values()), "no attack applies")
        return f"Nothing could be attacked ({why}), which says nothing about how much these updates reveal."
    came = (
        f"at least {_percent(tokens(best.measures))} of the tokens of site {of.site}'s texts ({best.attack}; "
        f"ROUGE-1 {_percent(rouge(likest.measures))}{'' if likest is best else f' by {likest.attack}'})"
    )
    if named(most.measures).value > tokens(best.measures).value:
        share = f"{_percent(named(most.measures))} of the different tokens of each batch"
        came += f", and knows {share}, if not which text they are from ({most.attack})"
    noise = f" Noise was added to the gradients ({of.noise})." if of.noise else ""
    if not of.ghost:
        why = "the texts did not pass through GHOST, and other attacks may read more"
        return f"Anyone who sees these updates gets back {came}; {why}.{noise}"
    more = "Other attacks may read more."
    if not any(one.attack.startswith("shadow-") for one in of.results):
        more = "No attack on shadows was run (shadow-...): they read most of what GHOST leaves."
    return f"{_of_shadows(of)}{_who(of, best)} gets back {came}. {more}{noise}"


def _of_shadows(of: Leakage) -> str:
    read, known = _most_trained(of, tokens), _most_trained(of, named)
    if not any(of.trained.values()):
        return ""
    more = f", and {100 * known:.1f} % of the different ones of each batch are known, if not which text they are from"
    return (
        f"Of the shadows that were trained on, {100 * read:.1f} % were read from these updates"
        f"{more if known > read else ''}. "
    )


def _who(of: Leakage, best: AttackResult) -> str:
    """Returns who can run this attack: attacks on shadows were given all of them, which updates may not reveal."""
    read_by_it = best.attack in of.trained or _most_trained(of, tokens) == 1
    return "Anyone who sees these updates" if read_by_it else "Anyone with all shadows"


def _most_trained(of: Leakage, measure: Callable[[Mapping[str, Interval]], Interval]) -> float:
    return max((measure(one).value for one in of.trained.values() if one), default=0.0)


def _percent(one: Interval) -> str:
    return f"{100 * one.value:.1f} %"


def _plain(measures: Mapping[str, Interval]) -> dict[str, Any]:
    return {name: asdict(one) for name, one in measures.items()}

"""The report of an audit of updates: the figures of each attack, what was refused, what attackers had, a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from milkglass.audit.outcome import AttackResult, nan_as_none
from milkglass.audit.report.texts import TEXTS, filled
from milkglass.metrics.interval import Interval

KNOWN = "attackers know the model in every round, the labels and the lengths, and have"
AS_THEY_ARE = "shadows as they are"  # no attack: the shadows are taken for the texts
Measures = Mapping[str, Interval]


@dataclass(frozen=True)
class UpdateResult(AttackResult):
    """The result of one attack on all updates, against the site's texts.

    Attributes:
        rounds: on which it ran.
        left_out: the rounds to which it does not apply, and why.
        trained: the figures against what was trained on. None: it read nothing, or read shadows and no gradients.
    """

    rounds: tuple[int, ...] = ()
    left_out: Mapping[int, str] = field(default_factory=dict)
    trained: Measures | None = None

    @property
    def tokens(self) -> Interval:
        return tokens(self.measures)

    @property
    def rouge(self) -> Interval:
        return self.measures["rouge-1"]

    @property
    def gap(self) -> str:
        """Returns why there are no figures, or none of some rounds; "" if there are all."""
        if self.state != "done":
            return f"{self.state}: {self.reason}"
        if not self.left_out:
            return ""
        rounds = len(self.left_out) + len(self.rounds)
        return f"does not apply to {len(self.left_out)} of {rounds} rounds: {next(iter(self.left_out.values()))}"

    def row(self) -> dict[str, Any]:
        is_done = self.state == "done"
        raw = asdict(self)
        return {
            **{name: raw[name] for name in ("attack", "state", "reason", "seconds", "cut", "trained")},
            "rounds": self.rounds if is_done else (), "left_out": self.left_out if is_done else {},
            "texts": raw["measures"],
        }  # fmt: skip


@dataclass(frozen=True)
class UpdateAudit:
    """What the updates of one site reveal.

    Attributes:
        ghost: whether its texts passed through GHOST.
        rounds: those that were attacked, from 0.
        refused: rounds about which nothing can be said, and why.
        texts: how many texts were behind the attacked rounds, counted once for each round.
        results: of each attack.
        floor: what is recovered without an attack (metrics/recovery.floors).
        public: the public text that attackers had: the "name" of what the audit was given, how many of those texts
            remain ("given"), how many are the site's "own", from which no attacked update comes, how many of both are
            "left_out", because they contain an attacked text or are part of one, and the "tokens" in all that remain.
        advice: what would make attackers stronger; "" if nothing is known.
        noise: the defence of the gradients, if it adds noise.
        selection: how GHOST selected shadows; "" without GHOST.
    """

    site: str
    ghost: bool
    rounds: tuple[int, ...]
    refused: Mapping[int, str]
    texts: int
    results: tuple[UpdateResult, ...]
    floor: Mapping[str, float]
    public: Mapping[str, Any]
    advice: str = ""
    noise: str = ""
    selection: str = ""

    @property
    def done(self) -> list[UpdateResult]:
        return [result for result in self.results if result.state == "done"]

    @property
    def public_text(self) -> str:
        """Returns the attackers' public text in words."""
        return filled(TEXTS["updates"]["public"], **self.public)

    def notes(self) -> list[str]:
        """Returns what a reader of the figures has to know, a line each."""
        lines = [f"{result.attack}: {result.gap}" for result in self.results if result.gap]
        lines += [f"round {number + 1} is left out: {reason}" for number, reason in self.refused.items()]
        if self.done:
            lines += ["in brackets: 95 % intervals over texts; ROUGE-1: how much of a text's words a reading has (F1)"]
        if any(result.cut for result in self.done):
            lines += ["not finished: its share of --budget was over; more texts in a batch need more"]
        if self.floor:
            commonest = f"{100 * self.floor['commonest token']:.1f} %"
            lines += [
                f"guessing alone: always the commonest token of these texts is right at {commonest} of all places"
            ]
        lines += [
            f"attacked: {self.texts:,} texts in {len(self.rounds)} rounds (one that was in two counts twice)",
            f"{KNOWN} {self.public_text}",
        ]
        if left_out := self.public["left_out"]:
            lines += [f"{left_out:,} public texts contain an attacked text or are part of one: they are left out"]
        if self.ghost:
            other = "" if self.selection == "states" else ", which is not the paper's"
            lines += [f"ghost's selection of shadows: {self.selection}{other}"]
        lines += [self.advice] if self.advice else []
        if any(result.attack.startswith("shadow-") for result in self.done):
            lines += ["shadow-...: with all shadows, as an exact inversion would read them; tokens at their places"]
        return lines

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON, with null for nan."""
        raw = {
            "milkglass_update_audit": 1, "site": self.site, "ghost": self.ghost,
            "rounds": self.rounds, "refused": self.refused, "texts": self.texts,
            "found": [result.row() for result in self.results],
            "floor": self.floor, "public": self.public, "advice": self.advice, "verdict": verdict(self),
            "attackers_know": ["the model", "the weights of every round", "labels", "lengths", self.public_text],
        }  # fmt: skip
        if self.selection not in ("", "states"):  # the paper's is the default, and is left out as in earlier reports
            raw["selection"] = self.selection
        return cast("dict[str, Any]", nan_as_none(raw))


def tokens(measures: Measures) -> Interval:
    """Returns the share of tokens that came back; for an attack that reads places, only those at their places."""
    return measures["token recall"] if "token recall" in measures else measures["tokens top-1"]


def tokens_named(measures: Measures) -> Interval:
    """Returns the share of a batch's different tokens that were read, from whichever text. See `tokens` for places."""
    return measures.get("tokens named", tokens(measures))


def verdict(audit: UpdateAudit) -> str:
    """Returns a sentence or two, which never say that texts are safe: other attacks may read more."""
    measured = [result for result in audit.done if result.measures]
    if not measured:
        return filled(TEXTS["updates"]["nothing"], why=next(iter(audit.refused.values()), "no attack applies"))

    def strongest(measure: Callable[[Measures], Interval]) -> UpdateResult:
        return max(measured, key=lambda result: (measure(result.measures).value, result.rouge.value))

    trained = [result.trained for result in audit.results if result.trained]
    shadows, known_shares = (
        max((part(measures).value for measures in trained), default=0.0) for part in (tokens, tokens_named)
    )
    best, best_namer = strongest(tokens), strongest(tokens_named)
    return filled(
        TEXTS["updates"]["verdict"],
        of=audit,
        best=best,
        likest=strongest(lambda measures: measures["rouge-1"]),
        namer=best_namer,
        named=tokens_named(best_namer.measures),
        shadows=shadows if trained else None,
        known=known_shares,
        by_it=best.trained is not None or shadows == 1,
        adaptive=any(result.attack.startswith("shadow-") for result in audit.results),
    )

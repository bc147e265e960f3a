"""The report of an audit of updates: the figures of each attack, what was refused, what attackers had, a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from milkglass.audit.outcome import AttackResult, nan_as_none
from milkglass.audit.report.texts import TEXTS, fill_template
from milkglass.metrics.interval import Interval

KNOWLEDGE_LEAD = "attackers know the model in every round, the labels and the lengths, and have"
SHADOWS_AS_TEXTS = "shadows as they are"  # the name of a result without an attack: the shadows are taken for the texts
Measures = Mapping[str, Interval]


@dataclass(frozen=True)
class UpdateResult(AttackResult):
    """Holds the result of one attack on all updates, against the site's texts.

    Attributes:
        rounds: the rounds on which the attack ran, from 0.
        left_out_rounds: the rounds to which the attack does not apply, and why.
        trained_measures: the figures against what was trained on; `measures` has those against the texts. None: the
            attack read nothing, or read shadows and no gradients.
    """

    rounds: tuple[int, ...] = ()
    left_out_rounds: Mapping[int, str] = field(default_factory=dict)
    trained_measures: Measures | None = None

    @property
    def token_share(self) -> Interval:
        """Returns the share of the texts' tokens that came back."""
        return token_share(self.measures)

    @property
    def rouge(self) -> Interval:
        """Returns the ROUGE-1 of the readings with the site's texts."""
        return self.measures["rouge-1"]

    @property
    def why_missing(self) -> str:
        """Returns why there are no figures, or none of some rounds; "" if no figure is missing."""
        if self.state != "done":
            return f"{self.state}: {self.reason}"
        if not self.left_out_rounds:
            return ""
        round_count = len(self.left_out_rounds) + len(self.rounds)
        reason = next(iter(self.left_out_rounds.values()))
        return f"does not apply to {len(self.left_out_rounds)} of {round_count} rounds: {reason}"

    def document(self) -> dict[str, Any]:
        """Returns the result as an entry of "found" in the report's JSON."""
        is_done = self.state == "done"
        fields = asdict(self)
        return {
            **{name: fields[name] for name in ("attack", "state", "reason", "seconds", "cut")},
            "trained": fields["trained_measures"],
            "rounds": self.rounds if is_done else (), "left_out": self.left_out_rounds if is_done else {},
            "texts": fields["measures"],
        }  # fmt: skip


@dataclass(frozen=True)
class UpdateAudit:
    """Reports what the updates of one site reveal.

    Attributes:
        site: the site's name.
        uses_ghost: whether the site's texts passed through GHOST.
        rounds: the rounds that were attacked, from 0.
        refused: the rounds about which nothing can be said, from 0, and why.
        text_count: how many texts were behind the attacked rounds, counted once for each round.
        results: one for each attack.
        floors: the shares that are recovered without an attack (metrics/recovery.floor_accuracies).
        public: the public text that attackers had: the "name" of what the audit was given, how many of those texts
            remain ("given"), how many are the site's "own", from which no attacked update comes, how many of both are
            "left_out", because they contain an attacked text or are part of one, and the "tokens" in all that remain.
        advice: what would make attackers stronger; "" if nothing is known.
        noise_defence: the name and parameters of the defence of the gradients, if it adds noise; "" if it adds none.
        selection: how GHOST selected shadows; "" without GHOST.
    """

    site: str
    uses_ghost: bool
    rounds: tuple[int, ...]
    refused: Mapping[int, str]
    text_count: int
    results: tuple[UpdateResult, ...]
    floors: Mapping[str, float]
    public: Mapping[str, Any]
    advice: str = ""
    noise_defence: str = ""
    selection: str = ""

    @property
    def finished_results(self) -> list[UpdateResult]:
        """Returns the results of the attacks that ran to their end or to that of their share of the budget."""
        return [result for result in self.results if result.state == "done"]

    @property
    def public_text(self) -> str:
        """Returns the attackers' public text in words."""
        return fill_template(TEXTS["updates"]["public"], **self.public)

    def notes(self) -> list[str]:
        """Returns what a reader of the figures has to know, a line each."""
        lines = [f"{result.attack}: {result.why_missing}" for result in self.results if result.why_missing]
        lines += [f"round {number + 1} is left out: {reason}" for number, reason in self.refused.items()]
        if self.finished_results:
            lines += ["in brackets: 95 % intervals over texts; ROUGE-1: how much of a text's words a reading has (F1)"]
        if any(result.cut for result in self.finished_results):
            lines += ["not finished: its share of --budget was over; more texts in a batch need more"]
        if self.floors:
            commonest = f"{100 * self.floors['commonest token']:.1f} %"
            lines += [
                f"guessing alone: always the commonest token of these texts is right at {commonest} of all places"
            ]
        lines += [
            f"attacked: {self.text_count:,} texts in {len(self.rounds)} rounds (one that was in two counts twice)",
            f"{KNOWLEDGE_LEAD} {self.public_text}",
        ]
        if left_out := self.public["left_out"]:
            lines += [f"{left_out:,} public texts contain an attacked text or are part of one: they are left out"]
        if self.uses_ghost:
            remark = "" if self.selection == "states" else ", which is not the paper's"
            lines += [f"ghost's selection of shadows: {self.selection}{remark}"]
        lines += [self.advice] if self.advice else []
        if any(result.attack.startswith("shadow-") for result in self.finished_results):
            lines += ["shadow-...: with all shadows, as an exact inversion would read them; tokens at their places"]
        return lines

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON, with null for nan."""
        raw = {
            "milkglass_update_audit": 1, "site": self.site, "ghost": self.uses_ghost,
            "rounds": self.rounds, "refused": self.refused, "texts": self.text_count,
            "found": [result.document() for result in self.results],
            "floor": self.floors, "public": self.public, "advice": self.advice, "verdict": verdict(self),
            "attackers_know": ["the model", "the weights of every round", "labels", "lengths", self.public_text],
        }  # fmt: skip
        if self.selection not in ("", "states"):  # the paper's is the default, and is left out as in earlier reports
            raw["selection"] = self.selection
        return cast("dict[str, Any]", nan_as_none(raw))


def token_share(measures: Measures) -> Interval:
    """Returns the share of tokens that came back; for an attack that reads places, only those at their places."""
    return measures["token recall"] if "token recall" in measures else measures["tokens top-1"]


def named_share(measures: Measures) -> Interval:
    """Returns the share of a batch's different tokens that were read, in whichever text of the batch they are.

    For an attack without this figure it is `token_share`.
    """
    return measures.get("tokens named", token_share(measures))


def verdict(audit: UpdateAudit) -> str:
    """Returns in a sentence or two how much was read. Texts are never called safe: other attacks may read more."""
    graded = [result for result in audit.finished_results if result.measures]
    if not graded:
        ended_reasons = [result.reason for result in audit.results if result.state in ("failed", "not run")]
        reason = next(iter([*audit.refused.values(), *ended_reasons]), "no attack applies")
        return fill_template(TEXTS["updates"]["nothing"], why=reason)

    def strongest(measure: Callable[[Measures], Interval]) -> UpdateResult:
        return max(graded, key=lambda result: (measure(result.measures).value, result.rouge.value))

    trained = [result.trained_measures for result in audit.results if result.trained_measures]
    read_shadows, known_shadows = (
        max((share(measures).value for measures in trained), default=0.0) for share in (token_share, named_share)
    )
    best, best_named = strongest(token_share), strongest(named_share)
    return fill_template(
        TEXTS["updates"]["verdict"],
        of=audit,
        best=best,
        best_rouge=strongest(lambda measures: measures["rouge-1"]),
        best_named=best_named,
        named_share=named_share(best_named.measures),
        read_shadows=read_shadows if trained else None,
        known_shadows=known_shadows,
        from_updates=best.trained_measures is not None or read_shadows == 1,
        adaptive=any(result.attack.startswith("shadow-") for result in audit.results),
    )

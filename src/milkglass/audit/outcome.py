"""Holds the outcome of one attack by one adversary: a score, "does not apply: reason" or "failed: reason"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from milkglass.client.data.texts import TOKEN_CLASSES, EncodedTexts, token_classes
from milkglass.metrics.interval import Interval, ratio
from milkglass.sequences import Ids
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Candidates
from milkglass.threat.truth import Truth

State = Literal["done", "does not apply", "failed", "not run"]


@dataclass(frozen=True)
class AttackResult:
    """Holds the figures of one attack by one adversary, or why it has none.

    Attributes:
        attack: the attack's name.
        title: the attack's name in reports.
        adversary: the attacker's name.
        state: whether the attack ran to its end, does not apply, failed, or was not begun.
        reason: why the attack is in this state; empty if it is "done".
        seconds: how long the attack ran, by the clock of its budget.
        measures: figures of metrics/recovery.py by name.
        by_class: the share that is recovered of each class of token (client/data/texts.py).
        of_outputs: whether the attack reads what was generated, and not what was sent.
        costly: whether the attack is begun only if enough of the budget is left.
        joint: whether the attack works out the clusters or starts from them. Such attacks read most.
        cut: whether the budget ended the attack early. The figures are then partial, without intervals.
        in_group: for solvers, the share of ordinary ids whose public id is in a group that they solved; else None.
    """

    attack: str
    title: str
    adversary: str
    state: State
    reason: str = ""
    seconds: float = 0.0
    measures: Mapping[str, Interval] = field(default_factory=dict)
    by_class: Mapping[str, Interval] = field(default_factory=dict)
    of_outputs: bool = False
    costly: bool = False
    joint: bool = False
    cut: bool = False
    in_group: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON-like data, which `from_json` reads."""
        return dict(nan_as_none(asdict(self)))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> AttackResult:
        """Returns the result that `to_json` wrote."""
        fields_by_name = dict(raw)
        for name in ("measures", "by_class"):
            fields_by_name[name] = {
                measure: interval_from_json(interval) for measure, interval in fields_by_name[name].items()
            }
        return cls(**fields_by_name)

    @property
    def label(self) -> str:
        """Returns the attack's title, and that it reads answers if it does."""
        return f"{self.title}, of the answers" if self.of_outputs else self.title

    def with_cut(self, is_cut: bool) -> AttackResult:
        """Returns the result, marked as cut or as complete.

        A partial result has no intervals, since it is not a random sample.
        """
        if not is_cut:
            return replace(self, cut=False)
        measures, by_class = without_intervals(self.measures), without_intervals(self.by_class)
        return replace(self, cut=True, measures=measures, by_class=by_class)

    def value(self, measure: str) -> float:
        """Returns a figure, or nan if there is none."""
        return self.measures[measure].value if measure in self.measures else float("nan")

    def selected_measures(self, names: Iterable[str]) -> dict[str, Interval]:
        """Returns the figures of these names, as far as there are such."""
        return {name: self.measures[name] for name in names if name in self.measures}


def without_intervals(measures: Mapping[str, Interval]) -> dict[str, Interval]:
    """Returns the figures without their intervals, as those of an attack that was cut."""
    return {name: measure.without_interval for name, measure in measures.items()}


def nan_as_none(value: Any) -> Any:
    """Returns a JSON-like value with None for each nan, which JSON lacks, at any depth."""
    if isinstance(value, dict):
        return {name: nan_as_none(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [nan_as_none(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def interval_from_json(raw: Mapping[str, Any]) -> Interval:
    """Returns the interval of a JSON object with its fields, in which null stands for nan."""
    value, low, high = (math.nan if raw[part] is None else float(raw[part]) for part in ("value", "low", "high"))
    return Interval(value, low, high, int(raw["units"]))


@dataclass(frozen=True, eq=False)
class AttackOutcome:
    """Holds the outcome of one attack by one adversary, also if the attack did not run.

    Attributes:
        result: the result, also if the attack did not run.
        guess: the attack's guess. None: it made none, or the result was read from disk.
        reading: (total,) the public id that is read for each sent token. None: the attack does not read places of what
            was sent.
    """

    result: AttackResult
    guess: Guess | None = None
    reading: Ids | None = None


@dataclass(frozen=True, eq=False)
class AuditRun:
    """Holds what came of all attacks of a run.

    Attributes:
        outcomes: the outcome of each attack by each adversary.
        candidates: what the solvers that need no text found.
    """

    outcomes: tuple[AttackOutcome, ...]
    candidates: Candidates | None

    @property
    def results(self) -> tuple[AttackResult, ...]:
        """Returns the result of each attack by each attacker."""
        return tuple(outcome.result for outcome in self.outcomes)

    @property
    def readings(self) -> dict[tuple[str, str], Ids]:
        """Returns the reading of each attack that has one, by the names of attacker and attack."""
        return {
            (outcome.result.adversary, outcome.result.attack): outcome.reading
            for outcome in self.outcomes
            if outcome.reading is not None
        }


def strongest(results: tuple[AttackResult, ...], measure: str | None = None) -> AttackResult | None:
    """Returns the attack that recovered most of what was sent, or None if none ran to its end.

    Args:
        results: the results to compare.
        measure: the figure by which they are compared. None: the sum of the shares of running and of content tokens, so
            that neither figure of a verdict is far below another attack's.
    """
    names = ("tokens top-1", "content top-1") if measure is None else (measure, "tokens top-1")
    comparable = [result for result in results if not result.of_outputs and not math.isnan(result.value(names[0]))]

    def shares(result: AttackResult) -> tuple[float, ...]:
        values = [0.0 if math.isnan(result.value(name)) else result.value(name) for name in names]  # no content at all
        return (sum(values),) if measure is None else tuple(values)

    return max(comparable, key=shares, default=None)


# --- figures that only some attacks have ------------------------------------------------------------------------------
def share_in_group(solver_candidates: Sequence[Candidates], truth: Truth) -> float | None:
    """Returns the share of ordinary ids whose public id is in a group that a solver solved; None for other attacks."""
    if not solver_candidates:
        return None
    is_hit = np.zeros(len(truth.inverse), np.bool_)
    for group in solver_candidates[0].solved_groups:
        is_hit[group.rows] = np.isin(truth.inverse[group.rows], group.members)
    return float(is_hit[truth.counted_rows].mean())


def shares_by_class(texts: EncodedTexts, truth: Truth, reading: Ids, rng: np.random.Generator) -> dict[str, Interval]:
    """Returns the share of each class of tokens that was read correctly. Classes that do not occur are left out."""
    sent = truth.tokens
    is_counted: NDArray[np.bool_] = truth.ordinary[sent.ids]
    class_of_token = token_classes(texts, truth.content, sent.counts(len(truth.content)))
    shares: dict[str, Interval] = {}
    for class_number, name in enumerate(TOKEN_CLASSES):
        in_class = is_counted & (class_of_token == class_number)
        if in_class.any():
            weights = np.bincount(sent.sequence_indices, in_class, len(sent)).astype(np.float64)
            hits = np.bincount(sent.sequence_indices, in_class & (reading == sent.ids), len(sent)).astype(np.float64)
            shares[name] = ratio(hits, weights, rng)
    return shares

"""Keeps each figure of a result as a record: what was measured, of what, and the value.

A result's JSON has a list of records, without the fields that are empty. A record's name joins its parts: pages, tables
and the entries [published], [asked] and [why] of a recipe use it. Nothing takes a name apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from milkglass.errors import UsageError

SPREAD_SUFFIX = " +-"  # after a measure's name: half the width of its 95 % interval
POOLED_SUFFIX = (
    " with own model"  # after a measure's name: the server's answers pooled with those of the client's own model
)
STRONGEST_ATTACK = "strongest"  # the name of whatever attack reads most
COMMONEST_CLASS, CLIENT_ALONE = (
    "commonest class",
    "client alone",
)  # variants without a defence: no model, and the client's own
NAME_PARTS = ("measure", "attack", "attacker", "data", "variant", "when", "note")


@dataclass(frozen=True, kw_only=True)
class ResultRecord:
    """Holds one figure of a result, with what identifies it and what was published.

    Attributes:
        measure: the name of what is measured.
        value: the figure; nan if it is undefined.
        attack: the attack that read it, if it is a figure of an attack.
        attacker: the attacker who read it.
        data: the data set, if a result has several.
        variant: the defence, the scheme or the model.
        when: the state of the variant's model, such as "before" or "after" training.
        note: what else distinguishes the record from others.
        half_width: half the width of the 95 % interval. None: there is no interval.
        further_numbers: more numbers about the value, such as the "least" and the "most" over keys or seeds.
        published: the paper's figure.
        asked: the demand on the figure, in words.
        why: why the figure differs from the paper's.
        undefined: why there is no value, or no interval.
    """

    measure: str
    value: float
    attack: str = ""
    attacker: str = ""
    data: str = ""
    variant: str = ""
    when: str = ""
    note: str = ""
    half_width: float | None = None
    further_numbers: Mapping[str, Any] = field(default_factory=dict)
    published: float | None = None
    asked: str = ""
    why: str = ""
    undefined: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns what identifies the record within its result."""
        return tuple(getattr(self, part) for part in NAME_PARTS)

    @property
    def name(self) -> str:
        """Returns the parts that are not empty, joined: "MEASURE, ATTACK, ATTACKER, DATA, VARIANT WHEN, NOTE"."""
        variant = f"{self.variant} {self.when}".strip()
        return ", ".join(filter(None, (self.measure, self.attack, self.attacker, self.data, variant, self.note)))

    @property
    def numbers(self) -> dict[str, float]:
        """Returns the value, half the width of its interval, and the further numbers, each by its name."""
        result = {} if math.isnan(self.value) else {self.name: self.value}
        if self.half_width is not None:
            result[replace(self, measure=self.measure + SPREAD_SUFFIX).name] = self.half_width
        return result | {f"{self.name}, {name}": number for name, number in self.further_numbers.items()}

    def round_to(self, digits: int) -> ResultRecord:
        """Returns the record with all its numbers rounded to `digits` decimals."""
        further_numbers = {name: round(number, digits) for name, number in self.further_numbers.items()}
        half_width = None if self.half_width is None else round(self.half_width, digits)
        return replace(self, value=round(self.value, digits), half_width=half_width, further_numbers=further_numbers)

    def to_json(self) -> dict[str, Any]:
        """Returns the record as an entry of a result's "figures", without empty fields."""
        entries = {name: value for name, value in asdict(self).items() if value not in ("", None)}
        entries |= entries.pop("further_numbers")
        return {**entries, "value": None if math.isnan(self.value) else self.value}


def read_records(result: Mapping[str, Any]) -> list[ResultRecord]:
    """Returns the records of a result.

    Raises:
        UsageError: the result was written before results had records, or is not a result.
    """
    figures = result.get("figures")
    if not isinstance(figures, list):
        raise UsageError(
            f"{result.get('recipe', 'this file')} has no list of records: an earlier version of Milkglass wrote it",
            "run `milkglass reproduce` again with the same --out: what is measured is kept, and written anew",
        )
    field_names = {record_field.name for record_field in fields(ResultRecord)}
    return [
        ResultRecord(
            **{name: entry[name] for name in entry if name in field_names} | {"value": _value_or_nan(entry["value"])},
            further_numbers={name: value for name, value in entry.items() if name not in field_names},
        )
        for entry in figures
    ]


def numbers_by_name(records: Iterable[ResultRecord]) -> dict[str, float]:
    """Returns every number of these records by its name."""
    return {name: value for record in records for name, value in record.numbers.items()}


def make_records(values: Mapping[str, float], **parts: str) -> list[ResultRecord]:
    """Returns a record for each measure.

    Args:
        values: the value of each measure; that of "MEASURE +-" is half the width of the interval of MEASURE
            (metrics/interval.with_half_widths).
        parts: the other parts of every record's name.
    """
    measures = [name for name in values if name.removesuffix(SPREAD_SUFFIX) == name]
    return [
        ResultRecord(measure=measure, value=values[measure], half_width=values.get(measure + SPREAD_SUFFIX), **parts)  # type: ignore[arg-type]
        for measure in measures
    ]


Statistic = Callable[[Any], Any]


def merge_records(
    runs: Sequence[Sequence[ResultRecord]], center: Statistic, spread: Mapping[str, Statistic], count_name: str
) -> list[ResultRecord]:
    """Returns one record for all records of several runs that have the same name; those of a single run as they are.

    Args:
        runs: the records of each run.
        center: computes the merged value from the values, and the merged half-width from the half-widths.
        spread: compute further numbers from the values, by the names of these numbers.
        count_name: the name under which a record says how many runs have it, if not all have.
    """
    if len(runs) == 1:
        return list(runs[0])
    records_by_name_parts: dict[tuple[str, ...], list[ResultRecord]] = {}
    for record in itertools.chain.from_iterable(runs):
        records_by_name_parts.setdefault(record.parts, []).append(record)
    merged = []
    for group in records_by_name_parts.values():
        values = np.array([record.value for record in group])
        widths = [record.half_width for record in group if record.half_width is not None]
        further_numbers = {} if len(group) == len(runs) else {count_name: float(len(group))}
        further_numbers |= {name: float(statistic(values)) for name, statistic in spread.items()}
        half_width = float(center(widths)) if widths else None
        merged.append(
            replace(group[0], value=float(center(values)), half_width=half_width, further_numbers=further_numbers)
        )
    return merged


def _value_or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)

"""The base of all recipes: a paper's figures, how Milkglass measures them, and the result with both side by side.

A kind of recipe is a frozen dataclass in kinds/ whose fields are the entries of the recipe's file, in full or with its
table [quick].

    [quick]
    rows = 1000                          a value in place of the recipe's
    training.max_steps = 150             one entry of a table, the others stay
    variants = ["k=10, eps=1"]           of a table only the entries of these names
    only.data = ["sst2"]                 the same, of a table of which entries are changed as well

A quick run is never taken for a full one: its name, the names of its files and the record in its folder end in
".quick". The demands of a full run do not apply to it; only [quick.asked] does.
"""

from __future__ import annotations

import abc
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from milkglass import files
from milkglass.errors import UsageError
from milkglass.experiments.needs import RecipeNeeds
from milkglass.experiments.record import ResultRecord

if TYPE_CHECKING:
    from milkglass.experiments.runs import RunContext

UNDEFINED_SHARE_REASON = "a share of nothing, such as the precision of a class that no answer names"
CUT_REASON = "the time of the recipe ended the attack: how far a search got is not a sample, and it has no interval"


@dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC):
    """Measures one table or figure of a paper. Subclasses write `about` and `measure`.

    Attributes:
        name: the name of the recipe's file and of its result, with ".quick" for a quick run.
        paper: the table or figure, in words.
        model: a reference that `models/resolve.py` reads, unless the kind says otherwise.
        published: the paper's figures by name.
        asked: the demand on the run in words, by figure.
        why: the reason why our figure differs, by figure or by a pattern with *; reasons for quick runs only are in
            [quick.why].
        quick: the table [quick] of a quick run. None: it is a full run.
        needs: the memory and time that a run takes (needs.py); neither a result nor a run folder's record has them.
        decimals: how many decimals the figures have in the result.
        is_cacheable: whether runs of this kind can share what takes longest.
        may_cut_attacks: whether the recipe's own time may end an attack, whose figures then have no intervals.
    """

    name: str
    paper: str
    model: str
    published: Mapping[str, float] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = None
    needs: Mapping[str, float] = field(default_factory=dict)

    decimals: ClassVar[int] = 2
    is_cacheable: ClassVar[bool] = False
    may_cut_attacks: ClassVar[bool] = False

    @classmethod
    def read(cls, path: Path, quick: bool = False) -> Self:
        """Reads a recipe's file, and checks it before anything runs.

        Raises:
            UsageError: an entry is missing, unknown, of another type, or refused by `check`.
        """
        raw = read_settings(path, quick)
        raw.pop("kind", None)
        recipe = from_entries(cls, cls.field_values(raw))
        from_entries(RecipeNeeds, recipe.needs)
        recipe.check()
        return recipe

    @classmethod
    def field_values(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Returns the file's entries as values of the fields."""
        return raw

    def check(self) -> None:  # noqa: B027 - most kinds check something
        """Raises UsageError for entries that cannot be combined."""

    @abc.abstractmethod
    def about(self) -> dict[str, Any]:
        """Returns what decides the figures, as the beginning of the result."""

    @abc.abstractmethod
    def measure(self, run: RunContext) -> list[ResultRecord]:
        """Returns the figures. What exists in the run folder is not measured again."""

    def result(self) -> dict[str, Any]:
        """Returns what the result says before its figures."""
        return self.about()

    def reproduce(self, run: RunContext) -> Path:
        """Writes RUN/NAME.json: what was run, by which code, and each figure beside the paper's and the demand."""
        figures = [figure.to_json() for figure in self.figures(self.measure(run))]
        predictions = {"predictions": run.predictions} if run.predictions else {}
        document = {**self.result(), "made": run.provenance(), "figures": figures, **predictions}
        path = run.out / f"{self.name}.json"
        files.write(path, json.dumps(document, indent=1) + "\n")
        return path

    @property
    def head(self) -> dict[str, Any]:
        """Returns the beginning of every result."""
        return {"recipe": self.name, "paper": self.paper, "model": self.model}

    def entries(self, *names: str) -> dict[str, Any]:
        """Returns the head, these fields as JSON, and what a quick run changed."""
        return {**self.head, **{name: _as_json(getattr(self, name)) for name in names}, **self.quick_entry}

    @property
    def quick_entry(self) -> dict[str, Any]:
        """Returns what a quick run changed, as an entry of the result; empty for a full run."""
        return {} if self.quick is None else {"quick": self.quick}

    def figures(self, measured: Sequence[ResultRecord]) -> list[ResultRecord]:
        """Returns the rounded figures with what was published, what is asked and why they differ.

        Raises:
            UsageError: the recipe names a figure that was not measured. A quick run measures less, and only the figures
                in its `asked` are required.
        """
        expected = self.asked.keys() | (self.published.keys() if self.quick is None else set())
        if missing := sorted(expected - {record.name for record in measured}):
            raise UsageError(f"{self.name} names a figure that was not measured: {missing[0]!r}", "see the recipe")
        return [self._figure(record) for record in measured]

    def _figure(self, record: ResultRecord) -> ResultRecord:
        """Returns a record as the result states it, with the published figure and the reason for a difference."""
        if math.isnan(record.value):
            return replace(record, half_width=None, undefined=record.undefined or UNDEFINED_SHARE_REASON)
        if record.half_width is not None and math.isnan(record.half_width):
            record = replace(
                record, half_width=None, undefined=CUT_REASON if self.may_cut_attacks else UNDEFINED_SHARE_REASON
            )
        published = self.published.get(record.name)
        why = "" if published is None else reason_for(record.name, self.why) or ""
        return replace(
            record.round_to(self.decimals), published=published, asked=self.asked.get(record.name, ""), why=why
        )


def _as_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.model_dump() if isinstance(value, BaseModel) else value


def reason_for(name: str, why: Mapping[str, str]) -> str | None:
    """Returns the figure's own reason, or else that of the first matching pattern. None: there is none."""
    if name in why:
        return why[name]
    # Only * stands for anything: names hold brackets and question marks
    patterns = {pattern_text.replace("[", "[[]").replace("?", "[?]"): reason for pattern_text, reason in why.items()}
    return next((reason for pattern, reason in patterns.items() if fnmatchcase(name, pattern)), None)


# --- a recipe's file -------------------------------------------------------------------------------------------------
QUICK_SUFFIX = ".quick"
# What a quick run may change. Never what was published, the seed, or what kind of recipe it is.
QUICK_ENTRIES = (
    "model", "rows", "seconds", "curve", "instructions", "keys", "attacks", "public", "public_rows", "variants",
    "defences", "seeds", "attacked", "data", "training", "texts", "evaluation", "asked", "why", "only", "needs",
)  # fmt: skip

T = TypeVar("T")


def read_settings(path: Path, quick: bool = False) -> dict[str, Any]:
    """Returns the entries of a recipe's file, and its name.

    Raises:
        UsageError: the file is not a recipe, `quick` is set and it has no table [quick], or that table changes an entry
            that it must not change.
    """
    if not path.is_file():
        raise UsageError(f"there is no recipe {path}", "recipes are .toml files")
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and bytes that are not UTF-8
        raise UsageError(f"{path.name} is not TOML: {error}", "see recipes/ for examples") from None
    _require_seeds(raw)
    _require_counts({name: value for name, value in raw.items() if name != "published"}, "")
    changes = raw.pop("quick", None)
    if not quick:
        return {**raw, "name": path.stem}
    if not isinstance(changes, dict):
        raise UsageError(f"{path.name} has no table [quick]", "run it without --quick, or write one")
    if unknown := [key for key in changes if key not in QUICK_ENTRIES]:
        raise UsageError(f"[quick] must not change {unknown[0]}", f"it may change: {', '.join(QUICK_ENTRIES)}")
    base = {key: value for key, value in raw.items() if key not in ("asked", "needs")}
    overrides = {key: value for key, value in changes.items() if key != "only"}
    whole = _overlay(_overlay(base, overrides), table_of(changes, "only"))
    reported = {key: value for key, value in changes.items() if key not in ("why", "needs")}  # what decides the run
    return {**whole, "name": path.stem + QUICK_SUFFIX, "quick": reported}


def _require_seeds(raw: Mapping[str, Any]) -> None:
    seeds = raw.get("seeds", [])
    for seed in [*(seeds if isinstance(seeds, list) else []), *([raw["seed"]] if "seed" in raw else [])]:
        if type(seed) is not int or seed < 0:
            description = seed if type(seed) is int else toml_type(seed)
            raise UsageError(f"a seed is {description}, a whole number from 0 is needed", "see the recipe")


def _require_counts(entry: Any, place: str) -> None:
    """Raises UsageError for a negative whole number, anywhere in an entry. Of rows, -1 would mean all but the last."""
    parts = entry.items() if isinstance(entry, dict) else enumerate(entry) if isinstance(entry, list) else ()
    for name, part in parts:
        _require_counts(part, f"{place}.{name}" if place else str(name))
    if type(entry) is int and entry < 0:
        raise UsageError(f"{place} is {entry}, a number from 0 on is needed", "see the recipe")


def _overlay(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe's file with `changes` over it; a list for a table chooses some of its entries."""
    merged = dict(raw)
    for key, value in changes.items():
        current = raw.get(key)
        if isinstance(current, dict) and isinstance(value, dict):
            merged[key] = _overlay(current, value)
        elif isinstance(current, dict) and isinstance(value, list):
            if missing := [name for name in value if not isinstance(name, str) or name not in current]:
                raise UsageError(
                    f"[quick] names {missing[0]!r}, which is not in {key}", f"it has: {', '.join(current)}"
                )
            merged[key] = {name: current[name] for name in value}
        else:
            merged[key] = value
    return merged


def table_of(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the entry as a table, empty if it is missing. Raises UsageError for anything else."""
    table = raw.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{name} is {toml_type(table)}, a table is needed", f"write [{name}]")
    return table


def from_entries(dataclass_type: type[T], entries: Mapping[str, Any]) -> T:
    """Returns an instance of a dataclass with these entries of a recipe.

    Raises:
        UsageError: an entry is missing, unknown or of another type.
    """
    parameters = {entry.name: entry for entry in fields(dataclass_type)}  # type: ignore[arg-type]
    required = [
        name for name, entry in parameters.items() if entry.default is MISSING and entry.default_factory is MISSING
    ]
    if unknown := [name for name in entries if name not in parameters]:
        raise UsageError(f"a recipe of this kind has no {unknown[0]}", f"it has: {', '.join(parameters)}")
    if missing := [name for name in required if name not in entries]:
        raise UsageError(f"the recipe has no {missing[0]}", f"it needs: {', '.join(required)}")
    require_types(dataclass_type, entries)
    return dataclass_type(**entries)


# --- types of values --------------------------------------------------------------------------------------------------
# TOML's types are taken as they are: no string is read as a number, and true is not 1. A number must be finite.
TOML_TYPE_NAMES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a string"),
    (dict, "a table"),
    (list, "a list"),
)


def toml_type(value: Any) -> str:
    """Returns TOML's name of the value's type for messages, such as "a string"."""
    names = (name for python_type, name in TOML_TYPE_NAMES if isinstance(value, python_type))
    return next(names, f"a {type(value).__name__}")


def require_types(dataclass_type: type, raw: Mapping[str, Any]) -> None:
    """Raises UsageError for the first value that is not of the type of its field in the dataclass."""
    for name, adapter in _adapters(dataclass_type).items():
        if name not in raw:
            continue
        try:
            adapter.validate_python(raw[name])
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False)[0]
            place, value = _fault_location(name, raw[name], fault["loc"])
            message = f"{fault['msg'][:1].lower()}{fault['msg'][1:]}"
            raise UsageError(f"{place} is {toml_type(value)}: {message}", "see the recipe") from None


@cache
def _adapters(dataclass_type: type) -> dict[str, TypeAdapter[Any]]:
    """Returns an adapter for each field. Types of this package that are not dataclasses are checked by isinstance."""
    hints = get_type_hints(dataclass_type)
    return {entry.name: _adapter(hints[entry.name]) for entry in fields(dataclass_type)}  # type: ignore[arg-type]


def _adapter(hint: Any) -> TypeAdapter[Any]:
    if hasattr(hint, "__dataclass_fields__") or hasattr(hint, "model_fields"):  # these bring settings of their own
        return TypeAdapter(hint)
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))


def _fault_location(name: str, value: Any, path: Sequence[Any]) -> tuple[str, Any]:
    """Returns where the fault is, and the value there. Skips the alternatives of unions, which paths name too."""
    keys = [name]
    for step in path:
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            value = value[step]
            keys.append(str(step))
    return ".".join(keys), value

"""The base of all recipes: a paper's figures, how ours are measured, and the result with both side by side.

A kind of recipe is a frozen dataclass in kinds/ whose fields are the entries of the recipe's file.
"""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel

from milkglass import files
from milkglass.errors import UsageError
from milkglass.experiments.recipe_file import from_entries, settings
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.runs import RunFolder

UNDEFINED_SHARE = "a share of nothing, such as the precision of a class that no answer names"
CUT = "the time of the recipe ended the attack: how far a search got is not a sample, and it has no interval"


@dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC):
    """A recipe for one table or figure of a paper. Subclasses write `about` and `measure`.

    Attributes:
        name: of its file, with ".quick" for a quick run; the result has it.
        paper: the table or figure, in words.
        model: a reference that `models/resolve.py` reads, unless the kind says otherwise.
        published: the paper's figures by name.
        asked: by figure, the demand on the run in words.
        why: why ours differ, by figure or by a pattern with *; reasons for quick runs only are in [quick.why].
        quick: the table [quick] of a quick run (recipe_file.py).
        digits: decimals of the figures in the result.
        cached: whether runs of this kind can share what takes longest.
        cuts: whether the recipe's own time may end an attack, whose figures then have no intervals.
    """

    name: str
    paper: str
    model: str
    published: Mapping[str, float] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = None

    digits: ClassVar[int] = 2
    cached: ClassVar[bool] = False
    cuts: ClassVar[bool] = False

    @classmethod
    def read(cls, path: Path, quick: bool = False) -> Self:
        """Reads a recipe's file, and checks it before anything runs.

        Raises:
            UsageError: an entry is missing, unknown, of another type, or refused by `check`.
        """
        raw = settings(path, quick)
        raw.pop("kind", None)
        recipe = from_entries(cls, cls.parsed(raw))
        recipe.check()
        return recipe

    @classmethod
    def parsed(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Returns the file's entries as values of the fields."""
        return raw

    def check(self) -> None:  # noqa: B027 - most kinds check something
        """Raises UsageError for entries that cannot be combined."""

    @abc.abstractmethod
    def about(self) -> dict[str, Any]:
        """Returns what decides the figures, as the beginning of the result."""

    @abc.abstractmethod
    def measure(self, run: RunFolder) -> list[ResultRecord]:
        """Returns the figures. What exists in the run folder is not measured again."""

    def result(self, run: RunFolder) -> dict[str, Any]:
        """Returns what the result says before its figures."""
        return self.about()

    def reproduce(self, run: RunFolder) -> Path:
        """Writes RUN/NAME.json: what was run, by which code, and each figure beside the paper's and the demand."""
        figures = [one.to_json() for one in self.figures(self.measure(run))]
        kept = {"predictions": run.predictions} if run.predictions else {}
        whole = {**self.result(run), "made": run.made(), "figures": figures, **kept}
        path = run.out / f"{self.name}.json"
        files.write(path, json.dumps(whole, indent=1) + "\n")
        return path

    @property
    def head(self) -> dict[str, Any]:
        """Returns the beginning of every result."""
        return {"recipe": self.name, "paper": self.paper, "model": self.model}

    def entries(self, *names: str) -> dict[str, Any]:
        """Returns the head, these fields as JSON, and what a quick run changed."""
        return {**self.head, **{name: _plain(getattr(self, name)) for name in names}, **self.quick_entry}

    @property
    def quick_entry(self) -> dict[str, Any]:
        return {} if self.quick is None else {"quick": self.quick}

    def figures(self, measured: Sequence[ResultRecord]) -> list[ResultRecord]:
        """Returns the rounded figures with what was published, what is asked and why they differ.

        Raises:
            UsageError: the recipe names a figure that was not measured. A quick run measures less, and only the figures
                in its `asked` are required.
        """
        expected = self.asked.keys() | (self.published.keys() if self.quick is None else set())
        if missing := sorted(expected - {one.name for one in measured}):
            raise UsageError(f"{self.name} names a figure that was not measured: {missing[0]!r}", "see the recipe")
        return [self._figure(one, one.name) for one in measured]

    def _figure(self, one: ResultRecord, name: str) -> ResultRecord:
        if math.isnan(one.value):
            return replace(one, half_width=None, undefined=one.undefined or UNDEFINED_SHARE)
        if one.half_width is not None and math.isnan(one.half_width):
            one = replace(one, half_width=None, undefined=CUT if self.cuts else UNDEFINED_SHARE)
        published = self.published.get(name)
        why = "" if published is None else reason_for(name, self.why) or ""
        return replace(one.rounded(self.digits), published=published, asked=self.asked.get(name, ""), why=why)


def _plain(value: Any) -> Any:
    """Returns settings as a table."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.model_dump() if isinstance(value, BaseModel) else value


def reason_for(name: str, why: Mapping[str, str]) -> str | None:
    """Returns the figure's own reason, or else that of the first matching pattern."""
    if name in why:
        return why[name]
    # only * stands for anything: names hold brackets and question marks
    patterns = {one.replace("[", "[[]").replace("?", "[?]"): reason for one, reason in why.items()}
    return next((reason for pattern, reason in patterns.items() if fnmatchcase(name, pattern)), None)

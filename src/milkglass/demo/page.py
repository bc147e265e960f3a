"""What a run of the demo leaves: one HTML page in three columns, result.json, and its words for the terminal.

The page needs no script and no network; the template engine escapes every text. It lies on the client's machine and
holds the (invented) private texts in the clear.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from milkglass.audit.report.page import duration, percent

IDS_SHOWN = 90  # of a text; the others are counted


@dataclass(frozen=True)
class Half:
    """One model's way through the demo: its audit of the training texts, sizes in bytes, seconds until it was tuned."""

    name: str
    ref: str
    options: Sequence[object] = field(repr=False)
    model: str
    audit: Mapping[str, Any] = field(repr=False)
    sizes: Mapping[str, int]
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """A whole run. `alone`: how many messages a linear model gets right, fitted with nothing sent."""

    version: str
    seconds: float
    sorting: Half
    classified: Sequence[Mapping[str, str]] = field(repr=False)
    alone: int
    writing: Half
    generated: Sequence[Mapping[str, str]] = field(repr=False)

    @property
    def correct(self) -> int:
        return sum(one["label"] == one["truth"] for one in self.classified)

    @property
    def answered(self) -> int:
        return sum(one["answer"] == one["truth"] for one in self.generated)

    def words(self) -> str:
        """Returns the result for the terminal."""
        asked = len(self.classified)
        lines = [
            f"{self.correct} of {asked} unseen messages sorted correctly; {self.alone} by a linear model over the "
            "client's own rows, with nothing sent",
            f"{self.answered} of {len(self.generated)} questions answered correctly in words",
            *(f"{half.ref}: {half.audit['verdict']}" for half in (self.sorting, self.writing)),
            "Obfuscation is not encryption: the more text crosses under one key, the more is read (THREATS.md).",
        ]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        document = {**asdict(self), "correct": self.correct, "answered": self.answered}
        for name in ("sorting", "writing"):
            document[name]["options"] = [str(one) for one in document[name]["options"]]
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")


def size(count: int) -> str:
    """Returns bytes for people: `12.3 MB`."""
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


def render(result: DemoResult) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "size": size, "duration": duration}
    source = files("milkglass.demo").joinpath("page.html").read_text("utf-8")
    return environment.from_string(source).render(r=result, ids_shown=IDS_SHOWN)


def write_page(path: Path, result: DemoResult) -> None:
    path.write_text(render(result), "utf-8")

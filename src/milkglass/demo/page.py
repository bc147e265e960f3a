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

COMPARISON = "comparison"  # the folder of the comparison on the client's side
IDS_SHOWN = 90  # of a text; the others are counted


@dataclass(frozen=True)
class ModelRun:
    """What one model went through: an audit of its training texts, sizes in bytes, seconds until it was tuned.

    `options` are those of commands that use its key and the server, and `model` is the fine-tuned model's name there.
    """

    name: str
    ref: str
    options: Sequence[object] = field(repr=False)
    model: str
    audit: Mapping[str, Any] = field(repr=False)
    sizes: Mapping[str, int]
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """A whole run. `compared` is the document of `milkglass compare`."""

    version: str
    seconds: float
    compared: Mapping[str, Any] = field(repr=False)
    sorting: ModelRun
    classified: Sequence[Mapping[str, str]] = field(repr=False)
    writing: ModelRun
    generated: Sequence[Mapping[str, str]] = field(repr=False)

    @property
    def correct(self) -> int:
        return sum(message["label"] == message["truth"] for message in self.classified)

    @property
    def answered(self) -> int:
        return sum(text["answer"] == text["truth"] for text in self.generated)

    @property
    def ways(self) -> list[tuple[str, float, str]]:
        """Returns each way that was compared: its title, the share that it has right, and what is read of it."""
        done = [way for way in self.compared["ways"] if way["state"] == "done"]
        return [(way["title"], way["quality"]["value"], _reading_text(way["reading"])) for way in done]

    def summary(self) -> str:
        """Returns the result for the terminal."""
        count = len(self.classified)
        lines = [
            *(f"{title}: {percent(share)} right, {remark}" for title, share, remark in self.ways),
            *self.compared["verdict"],
            f"{self.correct} of {count} unseen messages sorted correctly by the model at the server",
            f"{self.answered} of {len(self.generated)} questions answered correctly in words",
            *(f"{run.ref}: {run.audit['verdict']}" for run in (self.sorting, self.writing)),
            "Obfuscation is not encryption: the more text crosses under one key, the more is read (THREATS.md).",
        ]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        document = {**asdict(self), "correct": self.correct, "answered": self.answered}
        for name in ("sorting", "writing"):
            document[name]["options"] = [str(option) for option in document[name]["options"]]
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _reading_text(reading: Mapping[str, Any] | None) -> str:
    """Returns what the attacks read of a way, in words."""
    if reading is None:
        return "nothing is sent"
    if reading["content"] is None:
        return "not measured"
    prefix = "at least " if reading["cut"] else ""
    return f"{prefix}{percent(reading['content']['value'])} of names and content words read"


def size(count: int) -> str:
    """Returns bytes for people: `12.3 MB`."""
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


def render(demo_result: DemoResult) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "size": size, "duration": duration}
    source = files("milkglass.demo").joinpath("page.html").read_text("utf-8")
    return environment.from_string(source).render(r=demo_result, ids_shown=IDS_SHOWN, comparison=COMPARISON)


def write_page(path: Path, demo_result: DemoResult) -> None:
    path.write_text(render(demo_result), "utf-8")

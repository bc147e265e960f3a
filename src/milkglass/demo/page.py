"""The result of a demo: as an HTML page, as result.json, and as words for the terminal.

The page needs no script and no network; the template engine escapes every text. It stays on the client's machine, and
it contains the (invented) private texts in the clear.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from milkglass.audit.report.page import environment
from milkglass.metrics.percent import percent

COMPARISON = "comparison"  # the comparison's folder in the owner's folder
MAX_IDS_SHOWN = 90  # how many ids of a text the page shows


@dataclass(frozen=True)
class ModelRun:
    """Holds what the steps of one model gave, until it was fine-tuned.

    Attributes:
        name: the name of the model's files, and of the scrambled model at the server.
        ref: the original model.
        options: the options of commands that use the model's key and the server.
        model: the fine-tuned model's name at the server.
        audit: the document of the audit of its training texts.
        sizes: bytes by what they are the size of.
        seconds: the time of all steps.
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
    """Holds the result of a whole demo.

    Attributes:
        version: the version of Milkglass.
        seconds: the time of the whole demo.
        compared: the document of `milkglass compare`.
        sorting: the steps of the classifier.
        classified: the test messages, each with its `text`, `truth` and `label`.
        writing: the steps of the model that generates.
        generated: some test messages, each with its `text`, `truth` and `answer`.
    """

    version: str
    seconds: float
    compared: Mapping[str, Any] = field(repr=False)
    sorting: ModelRun
    classified: Sequence[Mapping[str, str]] = field(repr=False)
    writing: ModelRun
    generated: Sequence[Mapping[str, str]] = field(repr=False)

    @property
    def correct_count(self) -> int:
        """Returns how many test messages the classifier put on the right desk."""
        return sum(message["label"] == message["truth"] for message in self.classified)

    @property
    def right_answer_count(self) -> int:
        """Returns for how many test messages the other model named the right desk."""
        return sum(text["answer"] == text["truth"] for text in self.generated)

    @property
    def ways(self) -> list[tuple[str, str, str]]:
        """Returns the title of each way that was compared, its share of right answers, and what is read of it."""
        finished_ways = [way for way in self.compared["ways"] if way["state"] == "done"]
        return [
            (way["title"], percent(way["quality"]["value"]), _reading_text(way["reading"])) for way in finished_ways
        ]

    def summary(self) -> str:
        """Returns the result for the terminal."""
        count = len(self.classified)
        lines = [
            *(f"{title}: {share} right, {remark}" for title, share, remark in self.ways),
            *self.compared["verdict"],
            f"{self.correct_count} of {count} unseen messages sorted correctly by the model at the server",
            f"{self.right_answer_count} of {len(self.generated)} questions answered correctly in words",
            *(f"{run.ref}: {run.audit['verdict']}" for run in (self.sorting, self.writing)),
            "Obfuscation is not encryption: the more text crosses under one key, the more is read (THREATS.md).",
        ]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Writes the result as JSON."""
        document = {**asdict(self), "correct": self.correct_count, "answered": self.right_answer_count}
        for name in ("sorting", "writing"):
            document[name]["options"] = [str(option) for option in document[name]["options"]]
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _reading_text(reading: Mapping[str, Any] | None) -> str:
    """Returns what the attacks read of a way, in words. None: nothing is sent."""
    if reading is None:
        return "nothing is sent"
    if reading["content"] is None:
        return "not measured"
    return f"{percent(reading['content']['value'], reading['cut'])} of names and content words read"


def size_text(byte_count: int) -> str:
    """Returns a number of bytes in words, such as "12.3 MB"."""
    return f"{byte_count / 1e6:,.1f} MB" if byte_count >= 100_000 else f"{byte_count / 1e3:,.1f} kB"


def render(demo_result: DemoResult) -> str:
    """Returns the page's HTML."""
    templates = environment("")
    templates.filters["size"] = size_text
    template = templates.get_template("demo/page.html")
    return template.render(r=demo_result, ids_shown=MAX_IDS_SHOWN, comparison=COMPARISON)

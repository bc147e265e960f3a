"""The main job on the embedded models: obfuscate, serve, upload, fine-tune, use, attack, and show who saw what.

`run_demo` is `milkglass demo` and `make demo`. It uses what a data owner uses; the server is a process of its own that
is given a home folder and the public base model, nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.demo.result import DemoResult
from milkglass.demo.workplace import Workplace

if TYPE_CHECKING:
    from rich.console import Console

NEVER = 10_000  # steps between checkpoints: a job this short needs none on the way

SORTING = {
    "task": "classification",
    "method": "full",
    "n_epochs": 3.0,
    "batch_size": 16,
    "learning_rate": 2e-4,
    "warmup_ratio": 0.1,
    "max_length": 64,
    "logging_steps": 5,
    "save_steps": NEVER,
}
# ObfusLM's recipe made small: rank 16 in the place of 256, two layers in full at each end, the tables trained.
WRITING = {
    "task": "causal-lm",
    "method": "lora",
    "lora_rank": 16,
    "lora_alpha": 32,
    "full_first": 2,
    "full_last": 2,
    "train_tables": True,
    "max_steps": 60,
    "batch_size": 4,
    "learning_rate": 5e-4,
    "warmup_ratio": 0.1,
    "max_length": 128,
    "logging_steps": 2,
    "save_steps": NEVER,
}


@dataclass(frozen=True)
class DemoPlan:
    """asked: test messages to classify. prompts: to answer, with `new_tokens` at most each."""

    sorting: Mapping[str, Any]
    writing: Mapping[str, Any]
    asked: int
    prompts: int
    new_tokens: int


USUAL = DemoPlan(SORTING, WRITING, asked=120, prompts=6, new_tokens=32)
QUICK = DemoPlan(
    SORTING | {"max_steps": 6, "logging_steps": 3},
    WRITING | {"max_steps": 2, "logging_steps": 1},
    asked=24,
    prompts=2,
    new_tokens=12,
)


def run_demo(out: Path, quick: bool = False, console: Console | None = None) -> DemoResult:
    """Do all of it; leaves `out`/index.html and `out`/result.json. Raises MilkglassError.

    The server is stopped whatever happens, also on Ctrl-C and on SIGTERM.
    """
    from rich.console import Console

    from milkglass.demo.page import show, write_page

    # Threads that wait by spinning made a training step five times slower where other programs used the cores, too.
    # The server inherits this; it counts only where torch is not loaded yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = console or Console()
    console.print("Milkglass demo: an invented clinic, two models, one server that must not read along.")
    with _stoppable(), Workplace.claim(out) as place:
        result = _everything(place, QUICK if quick else USUAL, console)
        result.write(out / "result.json")
        write_page(out / "index.html", result)
    show(console, result, out / "index.html")
    return result


def _everything(place: Workplace, plan: DemoPlan, console: Console) -> DemoResult:
    """The heavy imports are here, so that a wrong folder is refused at once."""
    from milkglass.client.remote.remote import Remote
    from milkglass.demo.half import DemoHalf, sort, write
    from milkglass.demo.journal import Journal
    from milkglass.demo.service import Service
    from milkglass.models.resolve import resolve

    started = time.monotonic()
    with Journal(console) as journal:
        with journal.waiting("unpack the embedded models"):
            base = place.provide(resolve("demo:smollm2"))
        with Service(place.server, [base], place.log) as service:  # it starts while the client scrambles
            first = DemoHalf.begin("demo:minilm", place.client / "sorting", False, journal)
            second = DemoHalf.begin("demo:smollm2", place.client / "writing", True, journal)
            with Remote(service.url, service.token) as remote:
                sorter, classified, (correct, alone), labels = sort(first, remote, plan.sorting, plan.asked)
                writer, generated = write(second, remote, plan.writing, plan.prompts, plan.new_tokens)
    return DemoResult(
        version=version("milkglass"),
        seconds=time.monotonic() - started,
        classifier=sorter,
        asked=plan.asked,
        correct=correct,
        alone=alone,
        labels=labels,
        classified=classified,
        generator=writer,
        generated=generated,
    )


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM leaves through every `with`, so that the server doesn't outlive the demo."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

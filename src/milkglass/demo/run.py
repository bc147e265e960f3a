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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from milkglass.demo.plan import QUICK, USUAL, DemoPlan
from milkglass.demo.result import DemoResult
from milkglass.demo.workplace import Workplace

if TYPE_CHECKING:
    from rich.console import Console


def run_demo(out: Path, quick: bool = False, console: Console | None = None) -> DemoResult:
    """Do all of it; leaves `out`/index.html and `out`/result.json. Raises MilkglassError.

    The server is stopped whatever happens, also on Ctrl-C and on SIGTERM.
    """
    from rich.console import Console

    from milkglass.demo.page import write_page
    from milkglass.demo.terminal import show

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
    from milkglass.demo.half import DemoHalf
    from milkglass.demo.journal import Journal
    from milkglass.demo.service import Service
    from milkglass.demo.sorting import sort
    from milkglass.demo.writing import write
    from milkglass.models.resolve import resolve

    started = time.monotonic()
    with Journal(console) as journal:
        with journal.waiting("unpack the embedded models"):
            base = place.provide(resolve("demo:smollm2"))
        with Service(place.server, [base], place.log) as service:  # it starts while the client scrambles
            first = DemoHalf.begin("demo:minilm", place.client / "sorting", False, journal)
            second = DemoHalf.begin("demo:smollm2", place.client / "writing", True, journal)
            with Remote(service.url, service.token) as remote:
                sorter, classified, correct, labels = sort(first, remote, plan.sorting, plan.asked)
                writer, generated = write(second, remote, plan.writing, plan.prompts, plan.new_tokens)
    return DemoResult(
        version=version("milkglass"),
        seconds=time.monotonic() - started,
        classifier=sorter,
        asked=plan.asked,
        correct=correct,
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

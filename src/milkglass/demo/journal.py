"""What the demo tells while it runs: a bar a stage, a line a finished step, and the loss as the server reports it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from milkglass.demo.result import DemoStep
from milkglass.progress import Progress


class Journal:
    """Use as a context. Bars appear only where someone watches; finished steps are printed always."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("  {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Bars(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Journal:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    @contextmanager
    def step(self, into: list[DemoStep], name: str) -> Iterator[list[str]]:
        """Time what happens inside; what is put into the list becomes the step's detail. Bars of it vanish after."""
        details: list[str] = []
        self._progress.add_task(name, total=None)
        started = time.monotonic()
        try:
            yield details
        finally:
            for task in list(self._progress.task_ids):
                self._progress.remove_task(task)
        done = DemoStep(name, time.monotonic() - started, ", ".join(details))
        into.append(done)
        self.console.print(f"  [green]done[/] {name} [dim]{done.seconds:.1f} s  {done.detail}[/]", highlight=False)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """A bar for something that is not a step of the job."""
        task = self._progress.add_task(name, total=None)
        try:
            yield
        finally:
            self._progress.remove_task(task)

    def stage(self, name: str, total: int) -> Progress:
        """A bar, in the shape that the client's classes ask for."""
        task = self._progress.add_task(name, total=total)
        return lambda done: self._progress.advance(task, done)

    def follow(self, events: Iterator[Mapping[str, Any]]) -> tuple[float, ...]:
        """Show a job's events to the end; the losses that it reported."""
        losses: list[float] = []
        task = self._progress.add_task("training", total=None)
        for event in events:
            data = event.get("data") or {}
            if data.get("loss") is not None:
                losses.append(float(data["loss"]))
                self._progress.update(
                    task,
                    total=data.get("total_steps"),
                    completed=data.get("step"),
                    description=f"loss {losses[-1]:.3f}, {data.get('eta_seconds') or 0:.0f} s left",
                )
        return tuple(losses)

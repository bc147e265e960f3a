"""Shows the progress of a fine-tuning job until its end, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.ui.options import KeyOptions, ServerOptions
from milkglass.cli.ui.terminal import (
    LINE_INTERVAL_SECONDS,
    emit,
    is_stderr_terminal,
    note,
    progress_bars,
    report_activity,
)
from milkglass.progress import duration_text

if TYPE_CHECKING:
    from milkglass.client.remote.remote import Remote

Fetch = Annotated[Path | None, typer.Option("--fetch", help="Download the result, which is scrambled, to this folder.")]
NO_ACCURACY_NOTE = (
    "accuracy is not known, since no rows were kept for it: give --validation FILE or --hold-out the next time; "
    "`milkglass compare MODEL DATA` estimates it on this machine"
)
METRIC_NAMES = ("loss", "train_loss", "eval_loss", "accuracy", "pearson", "eval_accuracy")
CLASSES_HINT = "figures of each class: the same command with --key KEYFILE, which has the classes' names"
ShowEvent = Callable[[Mapping[str, Any]], None]  # shows an event of a job


def finish_job(
    remote: Remote,
    job_id: str,
    fetch: Path | None,
    server: ServerOptions,
    as_json: bool,
    next_use: tuple[str, KeyOptions] | None = None,
    max_bytes: Callable[[], int] | None = None,
    labels: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Follows a job to its end, downloads the model if `fetch` is set, and prints the result.

    The result is the model's name, its figures, and with `labels` its figures for each class.

    Args:
        fetch: the folder for the model. None: it is not downloaded.
        server: the options of the server, for the commands that are suggested.
        next_use: the command that uses the model and the options of its key, for a suggestion.
        max_bytes: returns the most bytes that the model can have. It is called before a download.
        labels: the numbers of the classes by name. Empty: not known.
    """
    from milkglass.cli.ui import label_report
    from milkglass.metrics.confusion import ConfusionMatrix

    latest: dict[str, Any] = {}
    evaluations: list[Mapping[str, Any]] = []
    try:
        with report_activity(as_json, "train"), _progress_display(as_json) as show:
            for event in remote.follow(job_id):
                latest.update(event["data"])
                evaluations += [event["data"]] if "eval_loss" in event["data"] else []
                show(event)
    except KeyboardInterrupt:
        _say_interrupted(remote, job_id, server, None if next_use is None else next_use[1])
        raise
    finished_job = remote.result(job_id)
    model_name = str(finished_job["fine_tuned_model"])
    if fetch is not None:
        with progress_bars(as_json) as stage:
            remote.fetch_model(model_name, fetch, stage, None if max_bytes is None else max_bytes())
    kept_metrics = finished_job["metrics"]  # of the weights that are kept, which may not be those of the last epoch
    metrics = {name: value for name, value in {**latest, **kept_metrics}.items() if name in METRIC_NAMES}
    best_evaluation = next(
        (evaluation for evaluation in evaluations if evaluation["eval_loss"] == kept_metrics.get("eval_loss")), {}
    )
    confusion = ConfusionMatrix.from_counts(
        best_evaluation.get("confusion"), {number: name for name, number in labels.items()}
    )
    document = {
        "job": job_id,
        "model": model_name,
        "trained_tokens": finished_job.get("trained_tokens"),
        "steps": latest.get("step"),
        "metrics": metrics,
        **({} if confusion is None else {"classes": label_report.report_document(confusion)}),
        "fetched": None if fetch is None else str(fetch),
    }
    lines = [f"fine-tuned model: {model_name}"]
    lines += [f"  steps: {steps_text(latest)}"] if "step" in latest else []
    lines += [f"  {name}: {value:.4f}" for name, value in metrics.items() if value is not None]
    lines += [] if confusion is None else ["", *label_report.report_lines(confusion), ""]
    lines += [f"  {CLASSES_HINT}"] if confusion is None and "confusion" in best_evaluation and not labels else []
    lines += [f"  {NO_ACCURACY_NOTE}"] if labels and "eval_loss" not in metrics else []
    lines += [f"  fetched to {fetch}"] if fetch else []
    lines += [f"next: milkglass {next_use[0]} {model_name} TEXT {next_use[1]} {server}"] if next_use else []
    emit(as_json, document, "\n".join(lines))


def follow_hint(job_id: str, server: ServerOptions, key: KeyOptions | None = None) -> str:
    """Returns the words that name the command that follows a job."""
    return f"come back with: milkglass job {job_id} --follow {server}" + ("" if key is None else f" {key}")


def steps_text(progress: Mapping[str, Any]) -> str:
    """Returns the step and, if it is known, the number of steps, such as "7 of 30"; "" if the step is not known."""
    step, total = progress.get("step"), progress.get("total_steps")
    return "" if step is None else str(step) if total is None else f"{step} of {total}"


def _say_interrupted(remote: Remote, job_id: str, server: ServerOptions, key: KeyOptions | None) -> None:
    """Prints after Ctrl-C that the job goes on. On a terminal it asks first, and cancels the job for a no."""
    if is_stderr_terminal():
        try:
            goes_on = typer.confirm("\nLeave the job running on the server?", default=True, err=True)
        except typer.Abort:
            goes_on = True
        if not goes_on:
            remote.cancel(job_id)
            note(f"cancelled {job_id}")
            return
    note(f"the job goes on; {follow_hint(job_id, server, key)}")


@contextmanager
def _progress_display(as_json: bool) -> Iterator[ShowEvent]:
    """Yields a function that shows a job's events: a bar on a terminal, occasional lines elsewhere, nothing as JSON."""
    if as_json:
        yield lambda event: None
    elif is_stderr_terminal():
        with _progress_bar() as show:
            yield show
    else:
        yield _EventLines()


class _EventLines:
    """Prints lines: for the first and the last step, for other steps at intervals, and for all other events."""

    def __init__(self) -> None:
        self._next_time, self._has_ended = 0.0, False

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Prints an event of the server, unless it is a step and no line is due."""
        progress = event["data"]
        is_last = progress.get("step") is not None and progress.get("step") == progress.get("total_steps")
        if progress.get("step") is not None:
            if not (is_last and not self._has_ended) and time.monotonic() < self._next_time:
                return
            self._next_time = time.monotonic() + LINE_INTERVAL_SECONDS
            self._has_ended = self._has_ended or is_last
        seconds_left = progress.get("eta_seconds")
        note(event["message"] + (f", about {duration_text(seconds_left)} left" if seconds_left else ""))


@contextmanager
def _progress_bar() -> Iterator[ShowEvent]:
    """Yields a function that shows a job's steps as a bar with loss and time left, and other events as lines."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class CountdownColumn(ProgressColumn):
        """Shows the time left, which it counts down between two events of the server."""

        def render(self, task: Task) -> Text:
            end = task.fields["end"]
            return Text("" if end is None else f"{duration_text(max(0.0, end - time.monotonic()))} left")

    console = Console(stderr=True)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}", markup=False),
        CountdownColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=None, loss="", end=None)

        def show(event: Mapping[str, Any]) -> None:
            event_data = event["data"]
            if (step := event_data.get("step")) is None:
                console.print(event["message"], markup=False, highlight=False)
                return
            loss, seconds_left, total = (event_data.get(name) for name in ("loss", "eta_seconds", "total_steps"))
            fields: dict[str, Any] = {} if total is None else {"total": total}
            fields |= {} if loss is None else {"loss": f"loss {loss:.4f}"}
            fields |= {} if seconds_left is None else {"end": time.monotonic() + seconds_left}
            progress.update(task, completed=step, **fields)

        yield show

"""The output of commands: results on stdout, all else on stderr, and progress bars only on a terminal."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.client.remote.strict_json import clean_text, escape_unprintable
from milkglass.errors import MilkglassError, UsageError
from milkglass.progress import Heartbeat, Progress, Stage, TimeLeft, duration_text, no_stage

if TYPE_CHECKING:
    from milkglass.client.remote.remote import Remote
    from milkglass.client.results import Classified

FIRST_LINE_SECONDS, LINE_INTERVAL_SECONDS = 3.0, 10.0  # until the first line of progress, and between two lines
INTERRUPT_EXIT_CODE = 130  # the exit code of a command that Ctrl-C ended
MAX_CELL_CHARACTERS = 128  # characters of one field in a table: as many as an id may have
SecondsLeft = Callable[[], float]  # returns the most seconds that can be left

_HEARTBEATS: list[Heartbeat] = []  # holds the heartbeat of the running command, if it has one


@contextmanager
def report_activity(is_quiet: bool = False, activity: str = "") -> Iterator[None]:
    """Prints to stderr that work goes on, whenever the command printed nothing for some seconds.

    Inside another such context it only changes the activity that the other one names.

    Args:
        is_quiet: whether nothing is printed.
        activity: what is being done. "": not known, or the same as in the outer context.
    """
    if is_quiet:
        yield
        return
    if _HEARTBEATS:
        previous, _HEARTBEATS[0].activity = _HEARTBEATS[0].activity, activity or _HEARTBEATS[0].activity
        try:
            yield
        finally:
            if _HEARTBEATS:
                _HEARTBEATS[0].activity = previous
        return
    heartbeat = Heartbeat(lambda line: print(line, file=sys.stderr, flush=True))
    heartbeat.activity = activity
    _HEARTBEATS.append(heartbeat)
    heartbeat.begin()
    try:
        yield
    finally:
        _HEARTBEATS.remove(heartbeat)
        heartbeat.end()


def _note_output() -> None:
    """Tells the heartbeat that something was printed just now."""
    for heartbeat in _HEARTBEATS:
        heartbeat.note_words()


def set_activity(activity: str) -> None:
    """Tells the heartbeat what is being done."""
    for heartbeat in _HEARTBEATS:
        heartbeat.activity = activity


def say(text: str = "") -> None:
    """Prints a line to stdout."""
    _note_output()
    print(text, flush=True)


def text_for_stdout(text: str) -> str:
    """Returns a model's text for stdout: for a terminal without control characters, for a pipe unchanged."""
    return clean_text(text) if sys.stdout.isatty() else text


def cell_text(field: object) -> str:
    """Returns a field of a server's record for a table, "?" for None.

    The field is cut to MAX_CELL_CHARACTERS. Its characters were made safe when the answer was read.
    """
    return "?" if field is None else str(field)[:MAX_CELL_CHARACTERS]


def json_text(document: Mapping[str, Any]) -> str:
    """Returns a document as one line of JSON. Characters that cannot be printed are escaped, all others are not."""
    return escape_unprintable(json.dumps(document, ensure_ascii=False))


def confirm(question: str, is_confirmed: bool) -> None:
    """Asks before something is deleted, unless --yes confirmed it already.

    Raises:
        UsageError: stdin is not a terminal.
        typer.Abort: the answer is no.
    """
    if is_confirmed:
        return
    if not _is_stdin_terminal():
        raise UsageError("nothing was deleted: there is no terminal to ask at", "give --yes if you are sure")
    import typer

    typer.confirm(question, default=False, abort=True, err=True)


def delete_object(remote: Remote, route: str, object_id: str, question: str, is_confirmed: bool, as_json: bool) -> None:
    """Deletes an object of the server after `confirm`, and prints that it is deleted."""
    remote.require(route, object_id)  # a missing object is reported before anyone is asked
    confirm(question, is_confirmed)
    remote.delete(route, object_id)
    emit(as_json, {"id": object_id, "deleted": True}, f"deleted: {object_id}")


def _is_stdin_terminal() -> bool:
    """Returns whether stdin is a terminal."""
    return sys.stdin.isatty()


def note(text: str) -> None:
    """Prints a line to stderr."""
    _note_output()
    print(text, file=sys.stderr, flush=True)


def note_after_interrupt(text: str) -> None:
    """Prints a line to stderr after Ctrl-C: on a terminal below the "^C" that it shows."""
    note(f"\n{text}" if is_stderr_terminal() else text)


def emit(as_json: bool, document: Mapping[str, Any], text: Callable[[], str] | str) -> None:
    """Prints a result to stdout: the document as one line of JSON, or the text.

    Args:
        as_json: whether the document is printed.
        document: the result by field, as it is printed as JSON.
        text: the text, or a function that makes it. It is called only if the text is printed.
    """
    say(json_text(document) if as_json else text if isinstance(text, str) else text())


def report_error(error: MilkglassError, as_json: bool) -> None:
    """Prints an error to stderr: as one line of JSON, or as its message and hint."""
    if as_json:
        fields = {name: getattr(error, name) for name in ("message", "hint", "exit_code")}
        note(json_text({"error": {"type": type(error).__name__, **fields}}))
        return
    note(f"error: {error.message}")
    if error.hint:
        note(f"  hint: {error.hint}")
    if error.for_terminal and is_stderr_terminal():  # not into a file, which others may read later
        note(f"  {error.for_terminal}")


def is_stderr_terminal() -> bool:
    """Returns whether stderr is a terminal."""
    return sys.stderr.isatty()


def no_limit() -> float:
    """Returns infinity: any number of seconds can be left."""
    return math.inf


def progress_lines(name: str, total: int, max_seconds_left: SecondsLeft = no_limit) -> Progress:
    """Starts a stage that prints a line to stderr now and then, with the share that is done and the time left.

    A stage that ends within FIRST_LINE_SECONDS prints nothing.

    Args:
        total: the amount of work. 0: not known; one line is printed at once.
        max_seconds_left: returns the most seconds that can be left.
    """
    if not total:
        note(f"{name} ...")
        set_activity(name)
        return lambda step: None
    set_activity(name)
    work_done, next_time, time_left = 0, time.monotonic() + FIRST_LINE_SECONDS, TimeLeft(total)
    time_left.estimate(0)

    def advance(step: int) -> None:
        nonlocal work_done, next_time
        is_first, work_done = not work_done, work_done + step
        now = time.monotonic()
        seconds_left = time_left.estimate(work_done) if is_first or now >= next_time else None
        if now >= next_time:
            note(f"{name}: {100 * work_done / max(1, total):.0f} %{_time_left_text(seconds_left, max_seconds_left())}")
            next_time = now + LINE_INTERVAL_SECONDS

    return advance


def _time_left_text(seconds: float | None, max_seconds: float) -> str:
    """Returns the estimated seconds in words; "" for less than 1 s.

    If they are not known or exceed `max_seconds`, it is taken.
    """
    if seconds is None or seconds > max_seconds:
        return f", at most {duration_text(max_seconds)} of the budget left" if 1 <= max_seconds < math.inf else ""
    return f", about {duration_text(seconds)} left" if seconds >= 1 else ""


@contextmanager
def progress_bars(is_quiet: bool = False, max_seconds_left: SecondsLeft = no_limit) -> Iterator[Stage]:
    """Yields a function that starts a stage: a progress bar on a terminal, occasional lines on another stderr.

    Args:
        is_quiet: whether nothing is shown.
        max_seconds_left: returns the most seconds that can be left.
    """
    if is_quiet:
        yield no_stage
        return
    with report_activity(), _visible_stage(max_seconds_left) as stage:
        yield stage


@contextmanager
def _visible_stage(max_seconds_left: SecondsLeft) -> Iterator[Stage]:
    """Implements `progress_bars` where something is shown."""
    if not is_stderr_terminal():
        yield partial(progress_lines, max_seconds_left=max_seconds_left)
        return
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class TimeLeftColumn(ProgressColumn):
        """Shows the time that is left, or the most that can be left if that is less."""

        def render(self, task: Task) -> Text:
            seconds_left = task.time_remaining
            if seconds_left is None or task.finished:
                return Text("")
            return Text(f"{duration_text(max(0.0, min(seconds_left, max_seconds_left())))} left")

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeLeftColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as progress:

        def stage(name: str, total: int) -> Progress:
            task = progress.add_task(name, total=total or None)
            set_activity(name)

            def advance(step: int) -> None:
                _note_output()
                if total:
                    progress.advance(task, step)
                else:
                    progress.update(task, total=1, completed=1)

            return advance

        yield stage


@contextmanager
def note_resumption(folder: Path, kept_work: str = "what was finished is") -> Iterator[None]:
    """Prints to stderr, if the command is interrupted, where its work is kept and that the same command goes on.

    Inside `exit_on_sigterm` SIGTERM interrupts a command, too.

    Args:
        folder: where the work is kept. If it does not exist, nothing is printed.
        kept_work: the subject and the verb of the message.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if folder.exists():
            note(f"stopped; {kept_work} kept in {folder}, the same command again goes on")
        raise


def table_text(rows: list[tuple[str, ...]]) -> str:
    """Returns rows of equal length as lines of text with padded columns.

    Args:
        rows: the cells of each row. There must be a row.
    """
    widths = [max(len(text) for text in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def megabytes_text(byte_count: object) -> str:
    """Returns a number of bytes in megabytes, or "?" for anything else."""
    return f"{byte_count / 1e6:,.1f} MB" if isinstance(byte_count, int | float) else "?"


def local_time_text(seconds: object) -> str:
    """Returns seconds since 1970 as a local date and time, or "?" for anything else."""
    if not isinstance(seconds, int | float) or not 0 < seconds < 1 << 33:
        return "?"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def print_answer(pieces: Iterable[str], is_shown: bool = True) -> str:
    """Writes each piece of an answer to stdout as it arrives, and returns the whole text.

    An empty answer is explained on stderr.

    Args:
        is_shown: whether the pieces are written to stdout.
    """
    text = ""
    for piece in pieces:
        text += piece
        _note_output()
        if is_shown:
            sys.stdout.write(text_for_stdout(piece))
            sys.stdout.flush()
    if not text:
        note(
            "(the model ended at once, without a word: usual after few steps of fine-tuning; "
            "train on, until the loss no longer falls)"
        )
    return text


def print_classifications(results: Sequence[Classified], as_json: bool, row_names: Sequence[str] = ()) -> None:
    """Prints a line "label <tab> probability", or a score, for each text; or one JSON document.

    Args:
        row_names: the name of each text, for a last column; "" for none. Empty: no text has a name.
    """
    names = row_names or [""] * len(results)
    if as_json:
        documents = [classified.document() for classified in results]
        rows = zip(documents, names, strict=True)
        say(json_text({"results": [{**document, **({"row": name} if name else {})} for document, name in rows]}))
        return
    for result, name in zip(results, names, strict=True):
        label = " ".join(result.label.split())  # one line an answer, whatever the label
        answer = f"{label}\t{result.probability:.3f}" if result.score is None else f"{result.score:.4g}"
        say(f"{answer}\t{name}" if name else answer)

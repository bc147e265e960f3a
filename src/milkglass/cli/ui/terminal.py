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

from milkglass.client.remote.strict_json import escaped, running_text
from milkglass.errors import MilkglassError, UsageError
from milkglass.progress import Heartbeat, Progress, Stage, TimeLeft, duration, no_stage

if TYPE_CHECKING:
    from milkglass.client.remote.remote import Remote
    from milkglass.client.results import Classified

FIRST_LINE, LINE_INTERVAL = 3.0, 10.0  # seconds until the first line of progress, and between two
INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended
MAX_CELL_LETTERS = 128  # characters of one field in a table: as many as an id may have


_HEARTBEATS: list[Heartbeat] = []  # the one of the command that is at work, if it has one


@contextmanager
def at_work(quiet: bool = False, activity: str = "") -> Iterator[None]:
    """Says on stderr that work goes on whenever the command was silent for some seconds; nothing if it is `quiet`.

    Inside another one it only names what is being done.
    """
    if quiet:
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
    beat = Heartbeat(lambda words: print(words, file=sys.stderr, flush=True))
    beat.activity = activity
    _HEARTBEATS.append(beat)
    beat.begin()
    try:
        yield
    finally:
        _HEARTBEATS.remove(beat)
        beat.end()


def _note_output() -> None:
    for beat in _HEARTBEATS:
        beat.note_words()


def _set_activity(name: str) -> None:
    for beat in _HEARTBEATS:
        beat.activity = name


def say(text: str = "") -> None:
    """Prints a line to stdout."""
    _note_output()
    print(text, flush=True)


def shown(text: str) -> str:
    """Returns text of a model for stdout: without control characters on a terminal, unchanged in a pipe."""
    return running_text(text) if sys.stdout.isatty() else text


def cell(field: object) -> str:
    """Returns a field of a server's record for a table. Its characters were made safe when the answer was read."""
    return "?" if field is None else str(field)[:MAX_CELL_LETTERS]


def json_text(document: Mapping[str, Any]) -> str:
    """Returns one line of JSON. Characters that cannot be printed are escaped, all others are not."""
    return escaped(json.dumps(document, ensure_ascii=False))


def confirm(question: str, yes: bool) -> None:
    """Asks before something is destroyed. Raises UsageError if there is no terminal, typer.Abort for a no."""
    if yes:
        return
    if not _asked_at_a_terminal():
        raise UsageError("nothing was deleted: there is no terminal to ask at", "give --yes if you are sure")
    import typer

    typer.confirm(question, default=False, abort=True, err=True)


def erase(remote: Remote, route: str, name: str, question: str, yes: bool, as_json: bool) -> None:
    """Deletes an object of the server after confirmation."""
    remote.require(route, name)  # one that is not there is reported before anyone is asked
    confirm(question, yes)
    remote.delete(route, name)
    emit(as_json, {"id": name, "deleted": True}, f"deleted: {name}")


def _asked_at_a_terminal() -> bool:
    return sys.stdin.isatty()


def note(text: str) -> None:
    """Prints a line to stderr."""
    _note_output()
    print(text, file=sys.stderr, flush=True)


def note_apart(text: str) -> None:
    """Prints a line after Ctrl-C, on a new line because a terminal shows "^C" at the cursor."""
    note(f"\n{text}" if watched() else text)


def emit(as_json: bool, document: Mapping[str, Any], human: Callable[[], str] | str) -> None:
    """Prints one JSON document, or words, to stdout."""
    say(json_text(document) if as_json else human if isinstance(human, str) else human())


def report(error: MilkglassError, as_json: bool) -> None:
    """Prints an error to stderr."""
    if as_json:
        fields = {name: getattr(error, name) for name in ("message", "hint", "exit_code")}
        note(json_text({"error": {"type": type(error).__name__, **fields}}))
        return
    note(f"error: {error.message}")
    if error.hint:
        note(f"  hint: {error.hint}")


def watched() -> bool:
    """Returns whether stderr is a terminal."""
    return sys.stderr.isatty()


SecondsLeft = Callable[[], float]  # returns the most seconds that can be left


def unbounded() -> float:
    return math.inf


def occasional_lines(name: str, total: int, limit: SecondsLeft = unbounded) -> Progress:
    """Starts a stage that prints a line with the time left now and then, for a log, and nothing if it ends soon.

    Of an unknown size, 0, one line is printed at once. `limit` returns the most seconds that can be left.
    """
    if not total:
        note(f"{name} ...")
        _set_activity(name)
        return lambda more: None
    _set_activity(name)
    count, due, time_left = 0, time.monotonic() + FIRST_LINE, TimeLeft(total)
    time_left.estimate(0)

    def advance(step: int) -> None:
        nonlocal count, due
        is_first, count = not count, count + step
        now = time.monotonic()
        seconds = time_left.estimate(count) if is_first or now >= due else None
        if now >= due:
            note(f"{name}: {100 * count / max(1, total):.0f} %{_time_left_text(seconds, limit())}")
            due = now + LINE_INTERVAL

    return advance


def _time_left_text(seconds: float | None, limit: float) -> str:
    if seconds is None or seconds > limit:
        return f", at most {duration(limit)} of the budget left" if 1 <= limit < math.inf else ""
    return f", about {duration(seconds)} left" if seconds >= 1 else ""


@contextmanager
def bars(as_json: bool = False, limit: SecondsLeft = unbounded) -> Iterator[Stage]:
    """Yields progress bars on stderr, one for each stage; occasional lines without a terminal; nothing with --json."""
    if as_json:
        yield no_stage
        return
    with at_work(), _stages(limit) as stages:
        yield stages


@contextmanager
def _stages(limit: SecondsLeft) -> Iterator[Stage]:
    if not watched():
        yield partial(occasional_lines, limit=limit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Remaining(ProgressColumn):
        """Shows the time that is left, or the limit if that is less."""

        def render(self, task: Task) -> Text:
            seconds_left = task.time_remaining
            if seconds_left is None or task.finished:
                return Text("")
            return Text(f"{duration(max(0.0, min(seconds_left, limit())))} left")

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Remaining())
    with Bars(*columns, console=Console(stderr=True), transient=True) as progress:

        def stage(name: str, total: int) -> Progress:
            task = progress.add_task(name, total=total or None)
            _set_activity(name)

            def advance(step: int) -> None:
                _note_output()
                if total:
                    progress.advance(task, step)
                else:
                    progress.update(task, total=1, completed=1)

            return advance

        yield stage


@contextmanager
def resumable(folder: Path, kept: str = "what was finished is") -> Iterator[None]:
    """Says, if the command is interrupted, where its work is kept and that it can be continued."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.exists():
            note(f"stopped; {kept} kept in {folder}, the same command again goes on")
        raise


def table(rows: list[tuple[str, ...]]) -> str:
    """Returns rows as padded columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def megabytes(count: object) -> str:
    return f"{count / 1e6:,.1f} MB" if isinstance(count, int | float) else "?"


def percent(share: float) -> str:
    """Returns a share as a percentage, or "-" for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def moment(seconds: object) -> str:
    """Returns seconds since 1970 as a local date and time."""
    if not isinstance(seconds, int | float) or not 0 < seconds < 1 << 33:
        return "?"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def show_pieces(pieces: Iterable[str], show: bool = True) -> str:
    """Writes an answer to stdout in pieces, and returns its text."""
    text = ""
    for piece in pieces:
        text += piece
        _note_output()
        if show:
            sys.stdout.write(shown(piece))
            sys.stdout.flush()
    if not text:
        note(
            "(the model ended at once, without a word: usual after few steps of fine-tuning; "
            "train on, until the loss no longer falls)"
        )
    return text


def show_classified(results: Sequence[Classified], as_json: bool, marks: Sequence[str] = ()) -> None:
    """Prints a line "label <tab> probability" for each text, or a score; `marks` name the rows in a last column."""
    row_names = marks or [""] * len(results)
    if as_json:
        documents = [classified.document() for classified in results]
        rows = zip(documents, row_names, strict=True)
        say(json_text({"results": [{**document, **({"row": mark} if mark else {})} for document, mark in rows]}))
        return
    for result, mark in zip(results, row_names, strict=True):
        answer = f"{result.label}\t{result.probability:.3f}" if result.score is None else f"{result.score:.4g}"
        say(f"{answer}\t{mark}" if mark else answer)

"""Options for the columns of data files, and for the delimiter of tables.

Commands open a key first, which takes half a second. They then read files whole before they load a model, so that a
fault in a line is reported at once.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass.cli.ui.terminal import note
from milkglass.client.remote.strict_json import running_text

if TYPE_CHECKING:
    from milkglass.rows.data_file import DataFile
    from milkglass.rows.examples import Summary

COMMONEST_SHOWN, RAREST_SHOWN = 6, 3  # classes that are shown if there are more
MAX_CLASS_LETTERS = 40  # characters of a class's name
ROWS = "JSON Lines or a JSON list, CSV, TSV or Parquet"
Delimiter = Annotated[
    str | None,
    typer.Option(
        "--delimiter",
        help="Between the cells of a table: a sign, or comma, semicolon, tab or pipe.  [default: found from its rows]",
    ),
]


@dataclass(frozen=True)
class ColumnOptions:
    """The columns to read in the user's files."""

    text_column: Annotated[
        str | None, typer.Option("--text-column", help="The column of texts.  [default: text or sentence]")
    ] = None
    label_column: Annotated[
        str | None, typer.Option("--label-column", help="The column of labels.  [default: label]")
    ] = None
    pair_column: Annotated[
        str | None, typer.Option("--pair-column", help="The column of second texts.  [default: text_pair or sentence2]")
    ] = None
    delimiter: Delimiter = None
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Leave out rows whose text, label or answer is empty.")
    ] = False

    def file(self, path: Path) -> DataFile:
        """Returns the file with these columns.

        Raises:
            UsageError: the file does not exist, or has no columns.
            EmptyText: the file is empty.
        """
        from milkglass.rows.data_file import DataFile
        from milkglass.rows.tables import delimiter_named

        sign = None if self.delimiter is None else delimiter_named(self.delimiter)
        result = DataFile(path, self.text_column, self.label_column, self.pair_column, sign, self.skip_empty)
        result.require()
        return result

    def training(self, path: Path, task: str | None = None) -> tuple[DataFile, Summary]:
        """Reads training data once, and returns it with its summary. Raises what `checked` raises."""
        from milkglass.rows.examples import checked

        file = self.file(path)
        result = checked(file, task)
        _say(file, result, labels=task != "causal-lm")
        if result.labels:
            note(f"{file.name}: {classes_found(result)}")
        return file, result

    def texts(self, path: Path, labels: bool = False) -> DataFile:
        """Reads rows of any kind, or lines of text, once. Raises what `summarise` raises.

        Args:
            labels: whether the labels are used.
        """
        return _read(self.file(path), labels)

    def others(self, path: Path | None) -> DataFile | None:
        """Reads a further file of the command, if there is one. It may have no columns."""
        return None if path is None else _read(self.second(path))

    def second(self, path: Path) -> DataFile:
        """Returns a further file of the command with the options that apply to its kind. Raises what `file` raises."""
        from milkglass.rows.data_file import TABLES

        kind = path.suffix.lower()
        if kind == ".txt":
            return ColumnOptions().file(path)
        return (self if kind in TABLES else replace(self, delimiter=None)).file(path)

    def words(self) -> str:
        """Returns the options that were set, as on a command line, with a blank before."""
        words = list[str]()
        for name, value in self.decides().items():
            words += [f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else [])]
        return f" {shlex.join(words)}" if words else ""

    def decides(self) -> dict[str, str | bool]:
        """Returns the options that were set. They must be unchanged when a stopped command goes on."""
        return {name: value for name, value in vars(self).items() if value}


def _read(file: DataFile, labels: bool = False) -> DataFile:
    from milkglass.rows.examples import summarise

    _say(file, summarise(file), labels)
    return file


def _say(file: DataFile, summary: Summary, labels: bool) -> None:
    say_read(file, labels)
    say_skipped(file.name, summary.blank, summary.empty)


def classes_found(summary: Summary) -> str:
    """Returns the labels and in how many rows each occurs, the commonest first: "2 classes: billing 40, null 1"."""
    often = sorted(zip(summary.labels, summary.counts, strict=True), key=lambda one: -one[1])
    words = [f"{running_text(name)[:MAX_CLASS_LETTERS]} {count:,}" for name, count in often]
    shown = words
    if len(words) > COMMONEST_SHOWN + RAREST_SHOWN:
        middle = f"and {len(words) - COMMONEST_SHOWN - RAREST_SHOWN:,} more"
        shown = [*words[:COMMONEST_SHOWN], middle, f"the rarest: {words[-RAREST_SHOWN]}", *words[1 - RAREST_SHOWN :]]
    return f"{len(words):,} class{'' if len(words) == 1 else 'es'}: {', '.join(shown)}"


def say_read(file: DataFile, labels: bool = True, identifier: str | None = None) -> None:
    """Prints which columns of a table are read and which are not."""
    if words := file.columns_read(labels, identifier):
        note(f"{file.name}: {words}")


def say_skipped(name: str, blank: int, empty: int = 0) -> None:
    for count, noun in ((blank, "blank line"), (empty, "row with an empty field")):
        if count:
            nouns = noun if count == 1 else noun.replace("line", "lines").replace("row", "rows")
            note(f"{count:,} {nouns} of {name} skipped")

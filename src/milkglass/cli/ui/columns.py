"""Options for the columns of data files, and for the delimiter of tables.

Commands open a key first, which takes half a second. They then read files whole before they load a model, so that a
fault in a line is reported at once.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass.cli.ui.terminal import note
from milkglass.client.remote.strict_json import clean_text
from milkglass.errors import first_few
from milkglass.rows.labels import is_number

if TYPE_CHECKING:
    from milkglass.rows.data_file import DataFile
    from milkglass.rows.examples import Summary

COMMA_NUMBER_PATTERN = re.compile(r"[+-]?[0-9]+,[0-9]+")
MIN_COMMON_ROWS = 20  # rows of one label, beside which a label of one row may be misspelt
COMMONEST_COUNT, RAREST_COUNT = 6, 3  # how many of the commonest and of the rarest classes are shown of many
MAX_CLASS_CHARACTERS = 40  # characters of a class's name that are shown
ROW_FORMATS = "JSON Lines or a JSON list, CSV, TSV or Parquet"
Delimiter = Annotated[
    str | None,
    typer.Option(
        "--delimiter",
        help="Between the cells of a table: a sign, or comma, semicolon, tab or pipe.  [default: found from its rows]",
    ),
]


@dataclass(frozen=True)
class ColumnOptions:
    """Reads the user's files by the options that name their columns, and say how rows are read."""

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

    def data_file(self, path: Path) -> DataFile:
        """Returns the file with the columns that are read of it.

        Raises:
            UsageError: the file does not exist, or columns or a delimiter are set and it has none.
            EmptyText: the file is empty.
        """
        from milkglass.rows.data_file import DataFile
        from milkglass.rows.tables import parse_delimiter

        delimiter = None if self.delimiter is None else parse_delimiter(self.delimiter)
        data_file = DataFile(path, self.text_column, self.label_column, self.pair_column, delimiter, self.skip_empty)
        data_file.require()
        return data_file

    def read_training(self, path: Path, task: str | None = None) -> tuple[DataFile, Summary]:
        """Reads training data once, prints its columns and classes, and returns the file with its summary.

        Args:
            path: the file.
            task: the task of the model. None: decided by the rows.

        Raises what `data_file` and `checked_summary` raise.
        """
        from milkglass.rows.examples import checked_summary

        file = self.data_file(path)
        summary = checked_summary(file, task)
        _note_reading(file, summary, reads_labels=task != "causal-lm")
        if summary.labels:
            note(f"{file.name}: {classes_text(summary)}")
            if warning := label_warning(summary):
                note(warning)
        return file, summary

    def read_texts(self, path: Path, reads_labels: bool = False) -> DataFile:
        """Reads rows of any kind, or lines of text, once, prints the columns, and returns the file.

        Args:
            reads_labels: whether the labels are used.

        Raises what `data_file` and `summarise` raise.
        """
        return _check_rows(self.data_file(path), reads_labels)

    def read_optional(self, path: Path | None) -> DataFile | None:
        """Reads a second file of the command, if there is one, as `read_texts` does.

        See `other_file` for its options.
        """
        return None if path is None else _check_rows(self.other_file(path))

    def other_file(self, path: Path) -> DataFile:
        """Returns a second file of the command, with those of these options that files of its format have.

        A file of lines of text has no columns, and only tables have a delimiter. Raises what `data_file` raises.
        """
        from milkglass.rows.data_file import TABLE_SUFFIXES

        suffix = path.suffix.lower()
        if suffix == ".txt":
            return ColumnOptions().data_file(path)
        return (self if suffix in TABLE_SUFFIXES else replace(self, delimiter=None)).data_file(path)

    def option_text(self) -> str:
        """Returns the options that are set, as on a command line, with a space before them; "" if none is set."""
        arguments = list[str]()
        for name, value in self.changed_fields().items():
            arguments += [f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else [])]
        return f" {shlex.join(arguments)}" if arguments else ""

    def changed_fields(self) -> dict[str, str | bool]:
        """Returns the fields that are set, by name. They must be the same when a stopped command goes on."""
        return {name: value for name, value in vars(self).items() if value}


def _check_rows(file: DataFile, reads_labels: bool = False) -> DataFile:
    """Reads all rows of a file, prints its columns, and returns it. Raises what `summarise` raises."""
    from milkglass.rows.examples import summarise

    _note_reading(file, summarise(file), reads_labels)
    return file


def _note_reading(file: DataFile, summary: Summary, reads_labels: bool) -> None:
    """Prints which columns of a file are read, and how many of its rows are skipped."""
    note_columns(file, reads_labels)
    note_skipped(file.name, summary.blank_count, summary.empty_count)


def classes_text(summary: Summary) -> str:
    """Returns the labels and in how many rows each occurs, the commonest first: "2 classes: billing 40, null 1".

    Of many classes only the commonest and the rarest are named.
    """
    commonest_first = sorted(zip(summary.labels, summary.label_counts, strict=True), key=lambda entry: -entry[1])
    one_line_names = [" ".join(clean_text(name).split()) for name, _ in commonest_first]
    classes = [
        f"{name[:MAX_CLASS_CHARACTERS]} {count:,}"
        for name, (_, count) in zip(one_line_names, commonest_first, strict=True)
    ]
    shown_classes = classes
    if len(classes) > COMMONEST_COUNT + RAREST_COUNT:
        commonest, (first_rare, *other_rare) = classes[:COMMONEST_COUNT], classes[-RAREST_COUNT:]
        hidden_count = len(classes) - COMMONEST_COUNT - RAREST_COUNT
        shown_classes = [*commonest, f"and {hidden_count:,} more", f"the rarest: {first_rare}", *other_rare]
    return f"{len(classes):,} class{'' if len(classes) == 1 else 'es'}: {', '.join(shown_classes)}"


def label_warning(summary: Summary) -> str:
    """Returns a warning if labels may be misread, else "".

    It is given for labels that are numbers with a decimal comma, for a few labels that are no numbers among many that
    are, for labels that differ only in capitals, spaces or encoding, and for labels that occur once.
    """
    fractions = [name for name in summary.labels if COMMA_NUMBER_PATTERN.fullmatch(name)]
    if fractions and all(name in fractions or name.isdigit() for name in summary.labels):
        return (
            "warning: the labels are numbers with a decimal comma, and each is taken for a class; scores are written "
            "with a point, 0.5 in place of 0,5"
        )
    numbers = [name for name in summary.labels if is_number(name)]
    others = [name for name in summary.labels if not is_number(name)]
    if others and 2 * len(numbers) >= len(summary.labels) and any(not name.isdigit() for name in numbers):
        shown_others = first_few([repr(clean_text(name)[:MAX_CLASS_CHARACTERS]) for name in others])
        return (
            f"warning: {len(numbers):,} of {len(summary.labels):,} labels are numbers, and not {shown_others}: each is "
            "taken for a class; for scores, write a number in place of these, or leave their rows out"
        )
    folded = Counter(map(_folded, summary.labels))
    shown = {name: repr(clean_text(name)[:MAX_CLASS_CHARACTERS]) for name in summary.labels}
    if alike := [shown[name] for name in summary.labels if folded[_folded(name)] > 1]:
        difference = "capitals, spaces or the encoding of a character alone"
        return f"warning: some labels differ in {difference}: {first_few(alike)}; each is a class"
    rare = [shown[name] for name, count in zip(summary.labels, summary.label_counts, strict=True) if count == 1]
    if not rare or max(summary.label_counts) < MIN_COMMON_ROWS:
        return ""
    fault = "a label occurs" if len(rare) == 1 else f"{len(rare):,} labels occur"
    return f"warning: {fault} in one row only: {first_few(rare)}; misspelt?"


def _folded(name: str) -> str:
    """Returns a label without what the eye does not see: capitals, spaces, invisible characters, ways of encoding."""
    visible = "".join(letter for letter in unicodedata.normalize("NFKC", name) if unicodedata.category(letter) != "Cf")
    return " ".join(visible.split()).casefold()


def note_columns(file: DataFile, reads_labels: bool = True, id_column: str | None = None) -> None:
    """Prints which columns of a file are read and which are not; nothing for lines of text."""
    if description := file.columns_text(reads_labels, id_column):
        note(f"{file.name}: {description}")


def note_second_text(file: DataFile) -> None:
    """Prints a warning if a column that is not read looks like second texts, so that rows may be pairs."""
    from milkglass.rows.place import shown_name

    if column := file.likely_second_text():
        note(
            f"warning: the column {shown_name(column)} is not read, and looks like a second text: if rows are pairs, "
            f"give --pair-column {shlex.quote(column)}"
        )


def note_skipped(name: str, blank_count: int, empty_count: int = 0) -> None:
    """Prints how many blank lines of a file were skipped, and how many rows with an empty field, if any were."""
    for count, noun in ((blank_count, "blank line"), (empty_count, "row with an empty field")):
        if count:
            nouns = noun if count == 1 else noun.replace("line", "lines").replace("row", "rows")
            note(f"{count:,} {nouns} of {name} skipped")

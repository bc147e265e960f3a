"""`milkglass data`: a file of the user's own, or a public data set, as JSON Lines that all commands read."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass import files
from milkglass.cli.ui.columns import (
    ROW_FORMATS,
    ColumnOptions,
    classes_text,
    label_warning,
    note_second_text,
    note_skipped,
)
from milkglass.cli.ui.options import AsJson, changed_options, refuse_unused, with_options
from milkglass.cli.ui.terminal import emit, note, table_text
from milkglass.errors import CodecError, UsageError, missing_file_hint

if TYPE_CHECKING:
    from milkglass.rows.data_file import DataFile
    from milkglass.rows.examples import Summary

MAX_QUOTED_SHARE = 0.02  # of the texts of a TSV; if more stand in quotation marks, it is said
MIN_NAMED_SHARE = 0.02  # of the texts; if fewer have a word that is taken for a name, it is said
MAX_ESCAPED_SHARE = 0.02  # of the texts; if more have characters that are escaped as in HTML, it is said
DIFFERING_SHARE, FIVE_WAYS_Z = 0.25, 2.6  # see `_few_rows_warning`
MAX_UNSAID_DIFFERENCE = 0.1  # of right answers; rows that tell only larger differences are pointed out


@with_options
def data(
    name: Annotated[str | None, typer.Argument(help=f"A data set's name, or a file of yours: {ROW_FORMATS}.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="The folder that has the data set's own files.")] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Fetch it from the hub, by the library datasets.")] = False,
    split: Annotated[
        str | None,
        typer.Option("--split", help="train, validation or test, as the data set has them.  [default: train]"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The JSON Lines file to write.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Write only this many rows.")] = None,
    unescape: Annotated[
        bool, typer.Option("--unescape", help="Replace escapes of HTML, such as &amp;, by their characters.")
    ] = False,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Write a file of yours, or a data set, as JSON Lines that every command reads without options of columns.

    The first step with your own rows: it says which columns are read. No name: list the data sets. Nothing is sent
    anywhere; --hub fetches.
    """
    if name is None:
        options = {"--from": source, "--hub": hub, "--split": split, "--out": out, "--rows": rows}
        options |= {"--unescape": unescape}
        refuse_unused("to list the data sets", {**options, **changed_options(columns)})
        _print_data_sets(as_json)
        return
    if out is None:
        raise UsageError("--out is missing", "give --out FILE.jsonl, the file to write")
    files.require_new(out)
    if out.suffix != ".jsonl":
        raise UsageError(f"{out.name} would be JSON Lines under another name", "give --out a name that ends in .jsonl")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", "make it first")

    from milkglass.rows.data_file import SUFFIXES

    if Path(name).suffix.lower() in {*SUFFIXES} - {""} or Path(name).is_file():
        if source is not None or hub:
            raise UsageError(f"{name} is a file: --from and --hub are for data sets by name", "leave them out")
        refuse_unused("of a file of yours", {"--split": split})
        _write_own_rows(columns.data_file(Path(name)), out, rows, unescape, as_json)
        return
    from milkglass.rows.sets import catalogue as sets
    from milkglass.rows.write import write_examples

    if Path(name).is_dir():
        raise UsageError(f"{name} is a folder", "give a file of yours, or a data set by name with --from FOLDER")
    if columns.changed_fields() and name not in sets.PUBLIC_DATASETS:
        raise UsageError(
            f"there is no file {name}, and no data set of that name", missing_file_hint(Path(name), "check the path")
        )
    if columns.changed_fields():
        raise UsageError(f"{name} is a data set, whose columns are known", "leave out the options of columns")
    refuse_unused("of a data set", {"--unescape": unescape})
    are_scores = sets.dataset_named(name).task == "regression"
    if (source is None) != hub:
        fault = "both --from and --hub were given" if hub else f"where is the data set {name}?"
        raise UsageError(fault, "give --from FOLDER, or --hub")
    count = write_examples(sets.load_split(name, source, split or "train", note), out, are_scores, rows)
    emit(as_json, {"out": str(out), "rows": count}, f"{count:,} rows in {out}")


def _write_own_rows(source: DataFile, out: Path, max_rows: int | None, unescapes: bool, as_json: bool) -> None:
    """Writes the user's rows, or the first `max_rows`, as JSON Lines. Prints the columns that are read, and classes.

    Args:
        unescapes: whether escapes of HTML are replaced.
    """
    from milkglass.rows.escapes import unescape_example
    from milkglass.rows.examples import MIN_COMPARISON_ROWS, read_examples, read_texts, summarise
    from milkglass.rows.repeats import Repeats
    from milkglass.rows.write import write_examples
    from milkglass.sanitizers.masking import FOREIGN_TEXTS, LanguageTally

    blank, empty, columns = list[int](), list[int](), source.columns_by_role()
    # Pairs without labels are no training data: they are texts to classify
    reader = read_texts if columns["label"] is None and columns["text_pair"] is not None else read_examples
    examples = reader(source, on_blank=blank.append, on_empty=empty.append)
    written_examples = map(unescape_example, examples) if unescapes else examples
    count = write_examples(written_examples, out, max_count=max_rows)
    note_skipped(source.name, len(blank), len(empty))
    columns_text = f"; {source.columns_text()}" if source.suffix != ".txt" else ""
    emit(as_json, {"out": str(out), "rows": count, "columns": columns}, f"{count:,} rows in {out}{columns_text}")
    if as_json or reader is not read_examples:
        return
    note_second_text(source)
    summary = summarise(out)
    texts = [row.text for row in read_examples(out)]
    for warning in filter(None, (_quotes_warning(source, texts), _escapes_warning(texts))):
        note(warning)
    if summary.kind != "chat" and (warning := _no_names_warning(texts)):
        note(warning)
    if LanguageTally.of(texts).has_foreign_texts():
        note(f"warning: {FOREIGN_TEXTS}")
    if summary.labels:
        note(classes_text(summary))
        if warning := label_warning(summary):
            note(warning)
    repeats = Repeats.of(read_examples(out))
    different_count = summary.row_count - repeats.equal_count
    counted_once = " (`milkglass compare` counts them once)" if repeats.equal_count and summary.kind != "text" else ""
    if notes := [*filter(None, (repeats.equal_text() + counted_once, repeats.contradiction_text()))]:
        note(f"warning: {'; '.join(notes)}")
    if (
        summary.labels
        and different_count >= 2 * MIN_COMPARISON_ROWS
        and (warning := _few_rows_warning(different_count))
    ):
        note(warning)
    if summary.labels or summary.kind == "chat":
        note(_next_step(summary, out, different_count))


def _quotes_warning(source: DataFile, texts: Sequence[str]) -> str:
    """Returns a warning if many texts of a TSV stand in quotation marks, as a spreadsheet writes them, else ""."""
    from milkglass.rows.tables import quotes_are_text

    if not quotes_are_text(source.path, source.delimiter or "\t"):
        return ""
    quoted_count = sum(len(text) > 1 and text[0] == text[-1] == '"' for text in texts)
    if quoted_count < MAX_QUOTED_SHARE * len(texts):
        return ""
    return (
        f"warning: {quoted_count:,} of {len(texts):,} texts begin and end with quotation marks, which are part of the "
        "text in a TSV; if a spreadsheet wrote them, save the file as CSV"
    )


def _escapes_warning(texts: Sequence[str]) -> str:
    """Returns a warning if many texts have characters that are escaped as in HTML, else ""."""
    from milkglass.rows.escapes import first_escape

    escapes = [*filter(None, map(first_escape, texts))]
    if not escapes or len(escapes) < MAX_ESCAPED_SHARE * len(texts):
        return ""
    return (
        f"warning: {len(escapes):,} of {len(texts):,} texts have characters that are escaped as in HTML, such as "
        f"{escapes[0]!r}; they count among the words and numbers that are read; --unescape replaces them"
    )


def _no_names_warning(texts: Sequence[str]) -> str:
    """Returns a warning if next to no text has a word that is taken for a name, else ""."""
    from milkglass.client.data.texts import NAME_RULE, has_name

    named_count = sum(map(has_name, texts))
    if named_count >= MIN_NAMED_SHARE * len(texts):
        return ""
    return (
        f"warning: {named_count:,} of {len(texts):,} texts have a word that is taken for a name ({NAME_RULE}): what is "
        "read of names in lower case is not measured apart, and masking finds fewer of them"
    )


def _few_rows_warning(different_count: int) -> str:
    """Returns a warning if a comparison of so many rows can tell large differences of its ways only, else "".

    Where the answers of two ways differ in a quarter of the rows, the interval of the difference of right answers is
    about z sqrt(1/4 / n) wide to each side; z = 2.6 is that of five ways compared. On tweets, news and MRPC, changed
    text and text as it is had other answers in 4 to 38 % of the rows (log, 2026-11-29).
    """
    from milkglass.rows.examples import comparison_row_count

    held_out_count = comparison_row_count(different_count)
    smallest_difference = FIVE_WAYS_Z * math.sqrt(DIFFERING_SHARE / held_out_count)
    if smallest_difference < MAX_UNSAID_DIFFERENCE:
        return ""
    return (
        f"warning: `milkglass compare` tests with {held_out_count} of these rows: of two ways of using a model, it may "
        f"not see which is better unless they differ by some {100 * smallest_difference:.0f} points. Four times as "
        "many rows halve that"
    )


def _next_step(summary: Summary, rows: Path, different_count: int) -> str:
    """Returns the next command for these rows, `milkglass compare`, or why it would refuse them.

    Args:
        different_count: how many rows equal no earlier one.
    """
    from milkglass.rows.data_file import DataFile
    from milkglass.rows.examples import MIN_COMPARISON_ROWS, require_classes

    if summary.labels:
        try:
            require_classes(DataFile(rows), summary)
        except CodecError as error:
            return f"warning: `milkglass compare` would refuse these rows: {error.message}; {error.hint}"
    if different_count < 2 * MIN_COMPARISON_ROWS:
        least = 2 * MIN_COMPARISON_ROWS
        return f"warning: `milkglass compare` needs {least} different rows at least, and there are {different_count}"
    model = "demo:minilm" if summary.labels else "demo:smollm2"
    return f"next: milkglass compare {model} {shlex.quote(str(rows))} --quick"


def _print_data_sets(as_json: bool) -> None:
    """Prints the public data sets, as a table or as JSON."""
    from milkglass.rows.sets.catalogue import PUBLIC_DATASETS

    source_of = {entry.name: "" if entry.hub is None else f"hf:{entry.hub.path}" for entry in PUBLIC_DATASETS.values()}
    entries = [
        {"name": entry.name, "task": entry.task, "splits": list(entry.splits), "labels": list(entry.labels),
         "about": entry.about, "metrics": list(entry.metrics), "licence": entry.licence,
         "published": source_of[entry.name]}
        for entry in PUBLIC_DATASETS.values()
    ]  # fmt: skip
    header = ("name", "task", "splits", "published", "licence", "about")
    rows = [
        (entry.name, entry.task, ", ".join(entry.splits), source_of[entry.name], entry.licence, entry.about)
        for entry in PUBLIC_DATASETS.values()
    ]
    emit(as_json, {"data_sets": entries}, table_text([header, *rows]))

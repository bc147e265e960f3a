"""Reads the texts that a command classifies: arguments, lines of stdin or of a file, or rows of a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from milkglass.cli.ui.columns import ColumnOptions, note_columns, note_skipped
from milkglass.cli.ui.options import require_file
from milkglass.errors import EmptyText, UsageError
from milkglass.rows.lines import InputRow, input_lines, input_row, require_no_messages, rows_of_arguments


def texts_to_classify(
    texts: Sequence[str] | None, source: Path | None, columns: ColumnOptions, id_column: str | None = None
) -> list[InputRow]:
    """Returns the texts of the arguments, or else of a file or stdin: a row for each line, or for each row of a table.

    A blank line is refused and not skipped, because answers must match the lines.

    Args:
        source: the file, which is read if there are no arguments, `texts`. None: stdin.
        id_column: the column of a table that names its rows. None: `id`, if there is one.

    Raises:
        CodecError: a text is blank, or a row cannot be read.
        UsageError: the file does not exist, or options name columns of texts that have none.
    """
    has_column_options = bool(columns.changed_fields()) or id_column is not None
    if not texts and source is not None and _is_table(source, has_column_options):
        return _table_rows(source, columns, id_column)
    if has_column_options:
        raise UsageError("the texts have no columns", "leave out the options of columns, or give a table")
    rows = rows_of_arguments(texts) if texts else [input_row(*line) for line in input_lines(source, sys.stdin)]
    if not rows:
        raise EmptyText(f"{'stdin' if source is None else source.name} is empty", "write a text a line")
    for row in rows:
        if not row.text.strip() and not row.messages:
            raise EmptyText(f"{row.name} is blank", "remove it: each text gets one answer")
    require_no_messages(rows, 'a classifier reads {"text": ...}')
    return rows


def _is_table(source: Path, has_column_options: bool) -> bool:
    """Returns whether a file is read as rows with columns. Read as lines, its header and labels would become texts.

    Args:
        has_column_options: whether options name columns. Then JSON Lines are read as rows too.
    """
    from milkglass.rows.data_file import JSON_SUFFIXES, SUFFIXES, refuse_spreadsheet
    from milkglass.rows.tables import is_json_list

    require_file(source, "give a file with a text a line, or a table")
    refuse_spreadsheet(source)
    suffix = source.suffix.lower()
    if suffix not in SUFFIXES or suffix in ("", ".txt"):
        return False
    return suffix not in JSON_SUFFIXES or has_column_options or is_json_list(source)


def _table_rows(source: Path, columns: ColumnOptions, id_column: str | None) -> list[InputRow]:
    """Returns the rows of a table without their labels, and prints which columns are read."""
    from milkglass.rows.examples import ID_COLUMN, read_texts

    file = columns.data_file(source)
    blank, empty = list[int](), list[int]()
    rows = list(read_texts(file, blank.append, id_column, empty.append))
    note_columns(file, False, id_column or (ID_COLUMN if any(row.row_id for row in rows) else None))
    note_skipped(file.name, len(blank), len(empty))
    return [InputRow(str(row.place(file)), row.text, row.pair, output_id=row.row_id or str(row.line)) for row in rows]

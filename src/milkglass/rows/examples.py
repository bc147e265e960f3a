"""Reads and checks the user's data row by row.

All rows of a file have one of these shapes, in any kind of file that data_file.py reads:

    {"text": ..., "label": ...}                             {"text": ..., "text_pair": ..., "label": ...}
    {"messages": [{"role": ..., "content": ...}]}           {"instruction": ..., "input": ..., "output": ...}
    {"text": ...}                                           {"instruction": ..., "context": ..., "response": ...}

`sentence`, or a column that the user names, can stand for `text`. TSV is read without quoting, as GLUE writes it. Files
are read a row at a time and may have any size. Messages name the file and the line and never quote it, because a
traceback or a log must not contain private text. Label names stay on the client; the server sees their numbers. The
labels of a regression are numbers, 2.5 or "2.5"; the server sees them standardised (rows/labels.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.progress import Progress, no_progress
from milkglass.rows.data_file import CHAT_COLUMNS, JSON_SUFFIXES, TEXT_COLUMNS, DataFile, InstructionColumns, Source
from milkglass.rows.labels import LabelCells, Scale, has_fraction, is_number
from milkglass.rows.messages import Message, conversation_of
from milkglass.rows.place import Place, Row, fields_hint, is_missing, text_of, with_fields

RowKind = Literal["labelled", "chat", "text"]
WEIGHT_FIELDS = ("weight", "sample_weight", "train", "loss", "mask")  # fields by which other trainers weigh a row
TABLE_WEIGHTS = WEIGHT_FIELDS[:2]
FOREIGN_FORMATS = {
    ("conversations",): "ShareGPT's conversations",
    ("prompt", "completion"): "a prompt and a completion",
    ("prompt", "chosen"): "a prompt and preferred answers",
}
MESSAGES_HINT = 'write {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
MIN_ROWS_TO_JUDGE = 20  # rows from which on labels that mostly occur once are taken for ids
MIN_COMPARISON_ROWS = 40  # the fewest rows that a comparison holds out, and the fewest that it trains with
COMPARISON_SHARE = 0.2  # the share of the rows that a comparison holds out (`comparison_row_count`)
ID_COLUMN = "id"  # the column with the names of a table's rows
# How messages call the rows of each kind
ROW_NOUNS: dict[RowKind, str] = {"labelled": "texts with labels", "chat": "conversations", "text": "texts alone"}


@dataclass(frozen=True)
class Example:
    """Holds one row: a text, perhaps with `pair` and `label`, or a conversation.

    Attributes:
        line: the row's number from 1, for messages.
        kind: "labelled" for a text with a label, "chat" for a conversation, "text" for a text alone.
        text: the text, or the first one of a pair; "" for a conversation.
        pair: the second text of a pair.
        label: the name of the label, or a regression's score as text.
        messages: the messages of a conversation.
        tools: the functions that a conversation offers to the model.
        noun: what the number counts: a line, an entry of a JSON list, a row of Parquet.
        row_id: the row's id in the table, if it was read.
    """

    line: int
    kind: RowKind
    text: str = ""
    pair: str | None = None
    label: str | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    noun: str = "line"
    row_id: str = ""

    def place(self, source: Source) -> Place:
        """Returns the place of the row in a file, for messages."""
        return Place(source.name, self.line, self.noun)


@dataclass(frozen=True)
class Summary:
    """Describes what a file holds: its kind of rows, how many there are, and their labels.

    Attributes:
        kind: the kind of all rows.
        row_count: how many rows there are, without those that were left out.
        has_pairs: whether rows have second texts.
        labels: the label names, in order (numbers by value).
        scale: the scale of a regression's scores, which has no labels.
        blank_count: how many blank lines were skipped.
        empty_count: how many rows were left out because of an empty field.
        label_counts: in how many rows each of `labels` occurs.
    """

    kind: RowKind
    row_count: int
    has_pairs: bool
    labels: tuple[str, ...]
    scale: Scale | None = None
    blank_count: int = 0
    empty_count: int = 0
    label_counts: tuple[int, ...] = ()

    @property
    def task(self) -> Literal["classification", "regression", "causal-lm"]:
        """Returns the task that such rows are for."""
        if self.kind != "labelled":
            return "causal-lm"
        return "classification" if self.scale is None else "regression"


def read_examples(
    source: Source, are_scores: bool = False, on_blank: Progress = no_progress, on_empty: Progress = no_progress
) -> Iterator[Example]:
    """Reads and checks the rows of a file, and yields them one at a time.

    Args:
        source: the file.
        are_scores: whether labels are the numbers of a regression.
        on_blank: receives a 1 for each blank line that is skipped.
        on_empty: receives a 1 for each row that the file's `skip_empty` leaves out.

    Raises:
        CodecError: a row has another shape than the file. The message names the file and the line.
        EmptyText: there is no row.
        UsageError: files of this kind are not read.
    """
    file = DataFile.of(source)
    header, cells = _columns_and_label_cells(file, are_scores)
    first_example: Example | None = None
    for place, example in _filled_examples(
        file, lambda place, row: _read_example(file, place, row, header, cells), on_blank, on_empty
    ):
        first_example = first_example or example
        if (example.kind, example.pair is None) != (first_example.kind, first_example.pair is None):
            raise CodecError(
                f"{place} holds another kind of row than {first_example.noun} {first_example.line}",
                "give one kind of row a file",
            )
        yield example


def examples_of(source: Source, max_rows: int | None = None) -> list[Example]:
    """Returns the rows of a file, or its first `max_rows` rows. Raises what `read_examples` raises."""
    return list(islice(read_examples(source), max_rows))


def read_texts(
    source: Source, on_blank: Progress = no_progress, identifier: str | None = None, on_empty: Progress = no_progress
) -> Iterator[Example]:
    """Yields the texts and second texts of a file, and ignores labels. Raises what `read_examples` raises.

    Args:
        source: the file.
        on_blank: receives a 1 for each blank line that is skipped.
        identifier: the column of the rows' ids. None: `id`, if there is one.
        on_empty: receives a 1 for each row that the file's `skip_empty` leaves out.
    """
    file = DataFile.of(source)
    header = _columns_and_label_cells(file, are_scores=True)[0]

    def example(place: Place, row: Row) -> Example:
        column = file.pair_column(row)
        text = _row_text(file, place, row, header)
        pair = None if column is None else text_of(place, row, column)
        return Example(place.number, "text", text, pair, noun=place.noun, row_id=_row_id_of(place, row, identifier))

    for _, row_example in _filled_examples(file, example, on_blank, on_empty):
        yield row_example


def _filled_examples(
    file: DataFile, build_example: Callable[[Place, Row], Example], on_blank: Progress, on_empty: Progress
) -> Iterator[tuple[Place, Example]]:
    """Yields the examples of the rows. Rows with an empty field are refused, or left out if the file skips them."""
    row_count, skipped_reason = 0, None
    for place, row in file.rows(on_blank):
        try:
            example = build_example(place, row)
        except EmptyText as error:
            if not file.skip_empty:
                raise EmptyText(error.message, f"{error.hint}, or leave out all such rows with --skip-empty") from None
            skipped_reason = error.message
            on_empty(1)
            continue
        row_count += 1
        yield place, example
    if row_count:
        return
    if skipped_reason is None:
        raise EmptyText(f"{file.name} has no rows", "give at least one")
    raise EmptyText(f"{file.name} has no rows but those that --skip-empty leaves out: {skipped_reason}", "fill some")


def _columns_and_label_cells(file: DataFile, are_scores: bool) -> tuple[tuple[str, ...], LabelCells]:
    """Returns the columns of all rows, and how the cells of labels are read.

    Reading ends silently at a row that cannot be read: `read_examples` raises the error.
    """
    names: dict[str, None] = {}

    def cells() -> Iterator[Any]:
        with suppress(CodecError):
            for _, row in file.rows():
                names.update(dict.fromkeys(row))
                column = file.label_column(names)
                if file.suffix not in JSON_SUFFIXES and (column is None or are_scores):
                    return  # all rows have the same columns
                yield None if column is None else row.get(column)

    remaining_cells = cells()
    label_cells = LabelCells.of(remaining_cells)
    if file.suffix in JSON_SUFFIXES:
        deque(remaining_cells, maxlen=0)  # each row may have columns of its own
    return tuple(names), LabelCells(are_scores=True) if are_scores else label_cells


def summarise(source: Source, are_scores: bool = False) -> Summary:
    """Reads and checks all rows of a file, and returns what it holds. Raises what `read_examples` raises.

    Args:
        source: the file.
        are_scores: whether labels are the numbers of a regression. Then CodecError is raised for a row without one.
    """
    blank_lines, empty_rows = list[int](), list[int]()
    row_count, example = 0, None

    def examples() -> Iterator[Example]:
        nonlocal row_count, example
        for example in read_examples(source, are_scores, blank_lines.append, empty_rows.append):
            if are_scores and example.label is None:
                raise CodecError(
                    f"{example.place(source)} has no label",
                    "a regression needs a number in every row; --label-column names the column of labels",
                )
            row_count += 1
            yield example

    scale = Scale.of(float(str(row.label)) for row in examples()) if are_scores else None
    rows_by_label = (
        Counter(row.label for row in examples() if row.label is not None) if scale is None else Counter[str]()
    )
    assert example is not None  # read_examples refuses an empty file
    names = (*sort_labels(rows_by_label),)
    counts = tuple(rows_by_label[name] for name in names)
    return Summary(
        example.kind, row_count, example.pair is not None, names, scale, len(blank_lines), len(empty_rows), counts
    )


def sort_labels(labels: Collection[str]) -> list[str]:
    """Returns labels in order: whole numbers by value, of any length, and names by alphabet."""
    numeric = all(name.isascii() and name.isdigit() for name in labels)
    return sorted(labels, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name) if numeric else name)


def comparison_row_count(row_count: int) -> int:
    """Returns how many of `row_count` different rows a comparison holds out to ask about."""
    return max(MIN_COMPARISON_ROWS, round(COMPARISON_SHARE * row_count))


def require_classes(source: Source, summary: Summary) -> None:
    """Raises CodecError for labels from which nothing can be learnt.

    These are the numbers of a regression, a single label, or labels that mostly occur once, such as ids and names.
    """
    require_no_fractions(source, summary)
    _require_two_labels(source, summary)
    label_count, column = len(summary.labels), _column_of_labels(source)
    single_count = sum(rows == 1 for rows in summary.label_counts)
    if label_count == summary.row_count > 2 or (
        summary.row_count >= MIN_ROWS_TO_JUDGE and 2 * single_count > summary.row_count
    ):
        raise CodecError(
            f"{column} has {label_count:,} labels in {summary.row_count:,} rows, and {single_count:,} of them are in "
            "one row only",
            "does it hold ids, or texts? --label-column NAME takes another column",
        )


def _require_two_labels(source: Source, summary: Summary) -> None:
    """Raises CodecError if all rows have one label."""
    if len(summary.labels) < 2:
        raise CodecError(f"{_column_of_labels(source)} has 1 label only", "classification needs at least 2")


def require_no_fractions(source: Source, summary: Summary) -> None:
    """Raises CodecError if all labels are numbers and some have a fraction, as in a regression."""
    if any(has_fraction(name) for name in summary.labels) and all(is_number(name) for name in summary.labels):
        raise CodecError(
            f"{_column_of_labels(source)} holds numbers with a fraction, {len(summary.labels):,} different ones",
            "for numbers of a regression say `--task regression`, for names such as versions `--task classification`; "
            "a command without --task takes names and whole numbers",
        )


def _column_of_labels(source: Source) -> str:
    """Returns the column of labels and its file as words of a message."""
    return f"the column {DataFile.of(source).label or 'label'} of {source.name}"


def no_labels_error(source: Source, summary: Summary) -> CodecError:
    """Returns the error for data without the labels that are needed. It names the columns."""
    fault = f"{source.name} has no labels: its rows are {ROW_NOUNS[summary.kind]}"
    if summary.kind != "text" or DataFile.of(source).suffix == ".txt":
        return CodecError(fault, 'give rows with a "text" and a "label"')
    (place, row), named = next(DataFile.of(source).rows()), DataFile.of(source).named_columns
    columns = fields_hint(place, row, named)
    return with_fields(CodecError(fault, f"{columns}; --label-column names the column of labels"), place, row, named)


def checked_summary(source: Source, task: str | None) -> Summary:
    """Returns the summary of a file for a task, after checking every row before anything is written or sent.

    Args:
        source: the file.
        task: "classification", "regression" or "causal-lm". None: the task that the rows are for.

    Raises:
        UsageError: there is no such file.
        CodecError: a row cannot be read, or the data are for another task.
    """
    summary = summarise(source, are_scores=task == "regression")
    if task == "classification" and summary.task != task:
        raise no_labels_error(source, summary)
    if task is not None and task != summary.task:
        raise CodecError(f"{source.name} is data for {summary.task}, not for {task}", "see `milkglass finetune --help`")
    if summary.task == "classification":
        if task is None:
            require_classes(source, summary)
        else:
            _require_two_labels(source, summary)
    return summary


def number_labels(names: Sequence[str], known_numbers: Mapping[str, int] | None) -> dict[str, int]:
    """Returns a number for each label.

    Known numbers stay if they cover all names, so that a second fine-tune, or one on part of the data, numbers the
    labels alike.
    """
    if known_numbers and set(names) <= set(known_numbers):
        return dict(known_numbers)
    return {name: number for number, name in enumerate(names)}


# --- rows -------------------------------------------------------------------------------------------------------------
def _read_example(file: DataFile, place: Place, row: Row, header: Sequence[str], cells: LabelCells) -> Example:
    """Returns the example of one row.

    Args:
        file: the file, which finds the columns.
        place: the row's place, for messages.
        row: the row.
        header: the columns of the whole file. A row without one of them has an empty cell there.
        cells: reads the cells of labels.

    Raises:
        CodecError: the row has another shape.
        EmptyText: a cell is empty.
    """
    if (chat_example := _chat_example(file, place, row)) is not None:
        return chat_example
    _require_unweighted(file, place, row)
    text = _row_text(file, place, row, header)
    pair_column, label_column = file.pair_column(row), file.label_column(header)
    pair = None if pair_column is None else text_of(place, row, pair_column)
    if label_column is None:
        if pair is not None:
            hint = f"{fields_hint(place, row, file.named_columns)}; --label-column names the column of labels"
            error = CodecError(f"{place} has a {pair_column} and no label", hint)
            raise with_fields(error, place, row, file.named_columns)
        return Example(place.number, "text", text, noun=place.noun)
    if label_column not in header:
        error = CodecError(f"{place} has no {label_column}", fields_hint(place, row, (label_column,)))
        raise with_fields(error, place, row, (label_column,))
    if label_column not in row:
        raise _missing_column_error(file, place, row, label_column)
    return Example(
        place.number, "labelled", text, pair, cells.read(place, label_column, row[label_column]), noun=place.noun
    )


def _require_unweighted(file: DataFile, place: Place, row: Row) -> None:
    """Raises CodecError for a field that gives a row a weight in training: all rows count alike.

    If the user named the columns of texts and labels, or for other columns of a table, such fields are not read.
    """
    if file.text is not None and (file.label is not None or file.label_column(row) is None):
        return
    for name in WEIGHT_FIELDS if file.suffix in JSON_SUFFIXES else TABLE_WEIGHTS:
        if name not in file.named_columns and not is_missing(row.get(name)):
            raise CodecError(
                f"{place} has {name}, which is not honoured: each row counts alike",
                f"leave {name} out, or name what is read: --text-column and --label-column",
            )


def _row_text(file: DataFile, place: Place, row: Row, header: Sequence[str]) -> str:
    """Returns a row's text. Raises EmptyText if it is empty, or if the row lacks a column that others have."""
    column = file.text_column(place, row, header)
    if column not in row and column in header:
        raise _missing_column_error(file, place, row, column)
    return text_of(place, row, column)


def _missing_column_error(file: DataFile, place: Place, row: Row, column: str) -> EmptyText:
    """Returns the error for a row that lacks a column that other rows have."""
    names = (column, *file.named_columns)
    error = EmptyText(f"{place} has no {column}", f"give it one ({fields_hint(place, row, names)})")
    return with_fields(error, place, row, names)


def _row_id_of(place: Place, row: Row, identifier: str | None) -> str:
    """Returns a row's id on one line, or "" if it has none. Raises CodecError if a named column has no id."""
    if identifier is not None and identifier not in row:
        hint = f"{fields_hint(place, row, (identifier,))}; see --id-column"
        raise with_fields(CodecError(f"{place} has no {identifier}", hint), place, row, (identifier,))
    cell = row.get(identifier or ID_COLUMN)
    cell = int(cell) if isinstance(cell, float) and cell.is_integer() else cell
    if not isinstance(cell, bool) and isinstance(cell, str | int):
        return " ".join(str(cell).split())
    if identifier is None:
        return ""
    raise CodecError(f"{place} has a {identifier} that is neither a name nor a whole number", "name another column")


def _chat_example(file: DataFile, place: Place, row: Row) -> Example | None:
    """Returns a conversation, or None if the row is not one. Raises CodecError or EmptyText for an unfit one."""
    is_named = file.text is not None and isinstance(row.get(file.text), list)
    if is_named or (file.text in (None, CHAT_COLUMNS[0]) and CHAT_COLUMNS[0] in row):
        column = file.text if is_named and file.text is not None else CHAT_COLUMNS[0]
        messages, tools = conversation_at(place, row, column, file.text is not None)
        return Example(place.number, "chat", messages=messages, tools=tools, noun=place.noun)
    if file.text is None and "instruction" in row:
        return Example(place.number, "chat", messages=_instruction_messages(place, row), noun=place.noun)
    if columns := file.question_columns(row):
        question, answer, prefix = columns
        messages = question_answer(place, row, question, answer, prefix=prefix)
        return Example(place.number, "chat", messages=messages, noun=place.noun)
    if file.text is None and not {*TEXT_COLUMNS} & {*row}:
        for names, format_name in FOREIGN_FORMATS.items():
            if {*names} <= {*row}:
                raise CodecError(f"{place} has {format_name}, which are not read", MESSAGES_HINT)
    return None


def conversation_at(
    place: Place, row: Row, column: str = CHAT_COLUMNS[0], ignores_other_columns: bool = False, is_trained: bool = True
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """Returns the messages and tools of a row, as `conversation_of` does, for the row at a place.

    Raises:
        CodecError: the row has something that cannot be honoured. The message names the place.
        EmptyText: a message has no content. The error names the place.
    """
    try:
        return conversation_of(
            _without_gaps(row) if place.noun == "row" else row, column, ignores_other_columns, is_trained
        )
    except EmptyText as error:
        raise EmptyText(f"{place} has {error.message}", error.hint) from None
    except UsageError as error:
        raise CodecError(f"{place}: {error.message}", error.hint) from None


def _without_gaps(cell: Any) -> Any:
    """Returns a value without fields that are null: in Parquet each object has the fields of all others."""
    if isinstance(cell, Mapping):
        return {name: _without_gaps(element) for name, element in cell.items() if element is not None}
    return [_without_gaps(element) for element in cell] if isinstance(cell, list) else cell


def _instruction_messages(place: Place, row: Row) -> tuple[Message, ...]:
    """Returns the conversation of a row of instructions. Raises CodecError for an unknown column that is not empty."""
    layout = InstructionColumns.of(row)
    messages = question_answer(place, row, layout.question, layout.answer, layout.extra)
    known_columns = (*layout.read, *layout.unread)
    if unknown_columns := [name for name in row if name not in known_columns and not is_missing(row[name])]:
        raise CodecError(
            f"{place} has {len(unknown_columns)} fields beside {', '.join(layout.read)}, which are not honoured",
            f"{fields_hint(place, row, known_columns)}; leave the others out, or write messages",
        )
    return messages


def question_answer(
    place: Place, row: Row, question: str, answer: str, extra: str | None = None, prefix: str = ""
) -> tuple[Message, Message]:
    """Returns a user's question and its answer as messages. Raises what `text_of` raises.

    Args:
        place: the row's place, for messages of errors.
        row: the row.
        question: the column of questions.
        answer: the column of answers.
        extra: a column that is put under the question if it is not empty.
        prefix: words before the question.
    """
    question_text, answer_text = prefix + text_of(place, row, question), text_of(place, row, answer)
    if extra is not None and not is_missing(row.get(extra)):
        question_text = f"{question_text}\n\n{text_of(place, row, extra)}"
    return {"role": "user", "content": question_text}, {"role": "assistant", "content": answer_text}

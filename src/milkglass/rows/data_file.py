"""Reads a file of the user's rows, and decides which of its columns are read.

A file is JSON Lines, one JSON list, CSV, TSV, Parquet, or lines of text. Columns that the user does not name are found
by their usual names. The delimiter of a table is found from its first rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from milkglass.errors import EmptyText, UsageError, first_few, missing_file_hint
from milkglass.progress import Progress, no_progress
from milkglass.rows.place import MAX_COLUMNS_SHOWN, Place, PlacedRows, Row, no_text_error, shown_name
from milkglass.rows.tables import delimiter_of, json_rows, parquet_rows, quotes_are_text, table_rows, text_lines

TEXT_COLUMNS, LABEL_COLUMNS = ("text", "sentence", "sentence1"), ("label",)
SECOND_TEXT_COLUMNS = ("text_pair", "sentence2")
CHAT_COLUMNS = ("messages", "instruction")
# First and second text under usual names, besides TEXT_COLUMNS and SECOND_TEXT_COLUMNS; both are read if a row has both
PAIRED_COLUMNS = (("question", "sentence"), ("premise", "hypothesis"), ("question1", "question2"))
# A question and its answer under usual names, and what is asked; they are read as a conversation
SUMMARISE_PROMPT = "Summarize the following dialogue.\n\n"
ANSWERED_COLUMNS = (
    ("dialogue", "summary", SUMMARISE_PROMPT), ("question", "answer", ""), ("prompt", "response", ""),
)  # fmt: skip
# Columns of text of any role: what is sanitized
ALL_TEXT_COLUMNS = (
    "text", "sentence", "text_pair", "sentence1", "sentence2", "instruction", "input", "output", "prompt", "response",
    "question", "question1", "question2", "answer", "premise", "hypothesis", "dialogue", "summary", "context",
)  # fmt: skip
KNOWN_COLUMNS = (*ALL_TEXT_COLUMNS, *LABEL_COLUMNS, *CHAT_COLUMNS)  # names by which a header is recognised
TABLE_SUFFIXES, JSON_SUFFIXES = (".csv", ".tsv"), (".jsonl", ".json", "")  # a file without a suffix is read as JSON
SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES, ".parquet", ".txt")
SPREADSHEET_SUFFIXES = (".xlsx", ".xls", ".xlsm", ".ods")
READ_KINDS_TEXT = ".jsonl, .json, .csv, .tsv, .parquet or .txt"


SAMPLED_ROWS, MIN_SECOND_TEXT_WORDS = 200, 3  # see `DataFile.likely_second_text`


class InstructionColumns(NamedTuple):
    """Names the columns of rows of instructions.

    Attributes:
        question: the column of instructions.
        extra: the column of what is put under an instruction, if it is not empty.
        answer: the column of answers.
        unread: columns that are left out.
    """

    question: str
    extra: str
    answer: str
    unread: tuple[str, ...]

    @property
    def read(self) -> tuple[str, str, str]:
        """Returns the columns that are read."""
        return self.question, self.extra, self.answer

    @classmethod
    def of(cls, row: Collection[str]) -> InstructionColumns:
        """Returns the layout of a row with these columns: that of Dolly if it has its answer, else that of Alpaca."""
        return DOLLY_COLUMNS if DOLLY_COLUMNS.answer in row and ALPACA_COLUMNS.answer not in row else ALPACA_COLUMNS


# The published Alpaca file repeats a row in the column text, as a prompt
ALPACA_COLUMNS = InstructionColumns("instruction", "input", "output", ("id", "text"))
DOLLY_COLUMNS = InstructionColumns("instruction", "context", "response", ("id", "category"))


def refuse_spreadsheet(path: Path) -> None:
    """Raises UsageError for a file with the suffix of a spreadsheet program."""
    if path.suffix.lower() in SPREADSHEET_SUFFIXES:
        raise UsageError(
            f"{path.name} is a spreadsheet, which is not read", 'save it as "CSV UTF-8", and give that file'
        )


@dataclass(frozen=True)
class DataFile:
    """Reads the rows of a file, and finds the columns that are used.

    Attributes:
        path: the file; a string is accepted too.
        text: the column of texts. None: found by its name, as all columns are.
        label: the column of labels.
        pair: the column of second texts.
        delimiter: the character between the cells of a table. None: found.
        skip_empty: whether rows with an empty text, label or answer are left out. Otherwise they are refused.
    """

    path: Path
    text: str | None = None
    label: str | None = None
    pair: str | None = None
    delimiter: str | None = None
    skip_empty: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        for index, name in enumerate(self.named_columns):
            if name in self.named_columns[:index]:
                raise UsageError(
                    f"the column {shown_name(name)} was given twice, for two purposes", "give each its own"
                )

    @classmethod
    def of(cls, source: Source | str) -> DataFile:
        """Returns a file of which no column is named, for a path, or a DataFile unchanged."""
        return source if isinstance(source, DataFile) else cls(Path(source))

    @property
    def name(self) -> str:
        """Returns the file's name without its folder."""
        return self.path.name

    @property
    def named_columns(self) -> tuple[str, ...]:
        """Returns the columns that the user named."""
        return tuple(name for name in (self.text, self.pair, self.label) if name is not None)

    @property
    def suffix(self) -> str:
        """Returns the suffix of the file's name. Raises UsageError if such files are not read."""
        suffix = self.path.suffix.lower()
        if suffix not in SUFFIXES:
            refuse_spreadsheet(self.path)
            raise UsageError(
                f"{self.name} is of no kind that is read",
                f'give {READ_KINDS_TEXT}, for example lines such as {{"text": "...", "label": "..."}}',
            )
        return suffix

    def require(self) -> None:
        """Checks the file and the options without reading a row.

        Raises:
            UsageError: there is no such file, such files are not read, or columns or a delimiter were named and it has
                none.
            EmptyText: the file is empty.
        """
        if self.path.is_dir():
            raise UsageError(f"{self.path} is a folder, not a file", f"give {READ_KINDS_TEXT}")
        if not self.path.is_file():
            raise UsageError(
                f"there is no file {self.path}",
                missing_file_hint(self.path, f"give the path of a {READ_KINDS_TEXT} file"),
            )
        if self.suffix == ".txt" and (self.named_columns or self.delimiter):
            raise UsageError(
                f"{self.name} is read as a text a line, without columns",
                "name a table .csv or .tsv, or leave out the options of columns",
            )
        if self.suffix not in TABLE_SUFFIXES and self.delimiter is not None:
            raise UsageError(f"{self.name} is not a table with delimiters", "leave out --delimiter")
        if not self.path.stat().st_size:
            raise EmptyText(f"{self.name} is empty", "give at least one row")

    def rows(self, on_blank: Progress = no_progress) -> PlacedRows:
        """Yields the file's rows with all columns, one at a time.

        Args:
            on_blank: receives a 1 for each blank line.

        Raises:
            UsageError: the file cannot be read.
            CodecError: a row cannot be read. It is raised when that row is reached.
            EmptyText: there is no row.
        """
        self.require()
        first_columns = (columns[0] for columns in (*PAIRED_COLUMNS, *ANSWERED_COLUMNS))
        text_columns = () if self.text else (*TEXT_COLUMNS, *CHAT_COLUMNS, *first_columns)
        if self.suffix in TABLE_SUFFIXES:
            delimiter = self.delimiter or delimiter_of(self.path, (*self.named_columns, *KNOWN_COLUMNS))
            is_quoted = not quotes_are_text(self.path, delimiter)
            return table_rows(
                self.path, self.named_columns, delimiter, is_quoted, on_blank=on_blank, text_columns=text_columns
            )
        if self.suffix == ".parquet":
            return parquet_rows(self.path, self.named_columns, text_columns)
        return text_lines(self.path, on_blank) if self.suffix == ".txt" else json_rows(self.path, on_blank)

    # --- columns of a row ---------------------------------------------------------------------------------------------
    def text_column(self, place: Place, row: Row, header: Collection[str] = ()) -> str:
        """Returns the column of texts. Raises CodecError if there is none.

        Args:
            place: the row's place, for messages.
            row: the row.
            header: columns of other rows, which are searched after those of the row.
        """
        column = self.text or self._usual_text_column(row) or self._usual_text_column(header)
        if column is None:
            raise no_text_error(place, row, self.named_columns)
        return column

    def _usual_text_column(self, row: Collection[str]) -> str | None:
        """Returns the column of texts of a usual name, or None."""
        text_and_pair = self._usual_pair_columns(row)
        return text_and_pair[0] if text_and_pair else first_present(row, TEXT_COLUMNS, self.named_columns)

    def _usual_pair_columns(self, row: Collection[str]) -> tuple[str, str] | None:
        """Returns the columns of first and second texts that go together by their names, or None."""
        if self.text is not None or TEXT_COLUMNS[0] in row:
            return None
        for first, second in PAIRED_COLUMNS:
            is_free = first not in self.named_columns and second != self.label and self.pair in (None, second)
            if is_free and {first, second} <= {*row}:
                return first, second
        return None

    def question_columns(self, row: Collection[str]) -> tuple[str, str, str] | None:
        """Returns the columns of a question and its answer, and the words before the question, or None."""
        if self.named_columns or self._usual_text_column(row) or not {*LABEL_COLUMNS}.isdisjoint(row):
            return None
        return next((names for names in ANSWERED_COLUMNS if {*names[:2]} <= {*row}), None)

    def label_column(self, row: Collection[str]) -> str | None:
        """Returns the column of labels, or None if a row with these columns has none."""
        return self.label or first_present(row, LABEL_COLUMNS, self.named_columns)

    def pair_column(self, row: Row) -> str | None:
        """Returns the column of second texts, or None if the row has none."""
        text_and_pair = self._usual_pair_columns(row)
        return self.pair or (
            text_and_pair[1] if text_and_pair else first_present(row, SECOND_TEXT_COLUMNS, self.named_columns)
        )

    def _columns_of_first_row(self) -> tuple[dict[str, str | None], list[str]]:
        """Returns the columns that are read, by their role, and all columns of the first row."""
        place, row = next(self.rows(), (None, None))
        if place is None or row is None:
            raise EmptyText(f"{self.name} has no rows", "give at least one")
        if self.text is None and (chat := first_present(row, CHAT_COLUMNS)):
            return {"text": chat, "label": None, "text_pair": None}, list(row)
        if question_columns := self.question_columns(row):
            return {"text": question_columns[0], "label": None, "text_pair": None}, list(row)
        text = self.text_column(place, row)
        return {"text": text, "label": self.label_column(row), "text_pair": self.pair_column(row)}, list(row)

    def columns_by_role(self) -> dict[str, str | None]:
        """Returns the columns that are read, by their role: "text", "label" and "text_pair".

        Raises:
            EmptyText: the file has no rows.
            CodecError: the first row cannot be read, or has no text.
        """
        return self._columns_of_first_row()[0]

    def likely_second_text(self) -> str | None:
        """Returns an unread column whose values look like second texts, such as claims beside evidence, or None.

        It is looked for beside labels only, in the first SAMPLED_ROWS rows, if no column of second texts is read: most
        of its values have MIN_SECOND_TEXT_WORDS words, and most differ.
        """
        columns_by_role = self.columns_by_role()
        if columns_by_role["label"] is None or columns_by_role["text_pair"] is not None:
            return None
        values = dict[str, list[str]]()
        for _, row in itertools.islice(self.rows(), SAMPLED_ROWS):
            for name, value in row.items():
                if name.strip() and name not in columns_by_role.values():
                    values.setdefault(name, []).append(value if isinstance(value, str) else "")
        for name, texts in values.items():
            are_long = sum(len(text.split()) >= MIN_SECOND_TEXT_WORDS for text in texts) > len(texts) / 2
            if are_long and len({*texts}) > len(texts) / 2:
                return name
        return None

    def columns_text(self, reads_labels: bool = True, identifier: str | None = None) -> str:
        """Returns which columns are read: "text from Question, label from Topic; not read: Id"; "" for lines of text.

        Args:
            reads_labels: whether labels are read.
            identifier: the column of ids that is read.
        """
        if self.suffix == ".txt":
            return ""
        columns_by_role, columns = self._columns_of_first_row()
        if question_columns := self.question_columns(columns):
            read_columns = [*question_columns[:2]]
            description = f"messages from {question_columns[0]} and {question_columns[1]}"
        elif self.text is None and (chat := columns_by_role["text"]) in CHAT_COLUMNS:
            is_instruction = chat == "instruction"
            layout = InstructionColumns.of(columns)
            read_columns = [*layout.read] if is_instruction else [CHAT_COLUMNS[0], "tools"]
            description = "messages from " + (
                f"{layout.question}, {layout.extra} (if any) and {layout.answer}" if is_instruction else CHAT_COLUMNS[0]
            )
        else:
            roles = {**columns_by_role, "label": columns_by_role["label"] if reads_labels else None, "id": identifier}
            read_columns = [name for name in roles.values() if name is not None]
            name_of_role = {role: shown_name(name) for role, name in roles.items() if name is not None}
            description = ", ".join(f"{role} from {name}" for role, name in name_of_role.items())
            description += "; no labels (--label-column)" if reads_labels and columns_by_role["label"] is None else ""
        unread_columns = [shown_name(name) for name in columns if name not in read_columns and name.strip()]
        return description + (f"; not read: {first_few(unread_columns, MAX_COLUMNS_SHOWN)}" if unread_columns else "")


Source = Path | DataFile


def first_present(row: Collection[str], names: Collection[str], excluded: Collection[str] = ()) -> str | None:
    """Returns the first of `names` that a row has and that is not excluded, or None."""
    return next((name for name in names if name in row and name not in excluded), None)

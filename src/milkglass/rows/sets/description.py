"""Describes a data set, and builds Examples from its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from milkglass.errors import CodecError, EmptyText
from milkglass.rows.examples import Example, question_answer
from milkglass.rows.place import Place, Row, text_of

Task = Literal["classification", "regression", "chat", "prompts", "text"]
# Makes an Example of a row; returns None for a known row of the published files that cannot be used.
ExampleBuilder = Callable[[Place, Row], Example | None]


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes one form in which a split was published.

    Attributes:
        files: the files that are all needed.
        read_rows: reads the files, given their paths in order.
        build: makes an Example of a row, or returns None to leave the row out.
    """

    files: tuple[str, ...]
    read_rows: Callable[..., Iterator[tuple[Place, Any]]]
    build: ExampleBuilder


def single_file_layouts(
    read_rows: Callable[..., Iterator[tuple[Place, Any]]], build: ExampleBuilder, *names: str
) -> tuple[Layout, ...]:
    """Returns a layout for each name under which one and the same file was published."""
    return tuple(Layout((name,), read_rows, build) for name in names)


@dataclass(frozen=True, slots=True)
class HubDataset:
    """Names a data set on the Hugging Face hub.

    Attributes:
        path: the data set's id on the hub, such as "nyu-mll/glue".
        config: the name of the configuration. None: it has only one.
        splits: the hub's name of each split.
        build: makes an Example of a row, or returns None to leave the row out.
    """

    path: str
    config: str | None
    splits: Mapping[str, str]
    build: ExampleBuilder


@dataclass(frozen=True, slots=True)
class PublicDataset:
    """Describes a data set: its files, its columns, its licence and how it is read.

    Attributes:
        name: the data set's name in commands and recipes.
        about: what the data set is, in words.
        task: the task that its rows are for.
        splits: the layouts in which each split was published, in the order in which they are looked for.
        columns: the columns of the original files, in the order text, pair, label.
        licence: the licence, or that none is stated.
        labels: label names, in the order of their numbers.
        metrics: the names of the metrics by which answers are scored (metrics/glue.py, metrics/text.py).
        hub: where the data set is on the hub. None: it is not there.
        flaws: why rows of the published files are left out (they are counted and reported), or "".
        other_folder_names: names of the data set's folder, besides `name`.
    """

    name: str
    about: str
    task: Task
    splits: Mapping[str, tuple[Layout, ...]]
    columns: tuple[str, ...]
    licence: str
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    hub: HubDataset | None = None
    flaws: str = ""
    other_folder_names: tuple[str, ...] = field(default=())

    @property
    def label_numbers(self) -> dict[str, int]:
        """Returns the number of each label name."""
        return {name: number for number, name in enumerate(self.labels)}

    def candidate_folders(self, folder: Path) -> list[Path]:
        """Returns the folders that may have the files: folders of the data set's name in `folder`, and `folder`."""
        return [*(folder / name for name in (self.name, *self.other_folder_names)), folder]


# --- builders ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LabelledTextBuilder:
    """Builds examples of a text, perhaps a second one, and a label or a score.

    Attributes:
        text_column: the column of texts.
        label_column: the column of labels.
        name_of_value: the label's name for each value in the file. "": there is no agreed label, and the row is left
            out.
        pair_column: the column of second texts. None: there are none.
        is_flawed: whether the published file has empty texts and broken rows, which are left out.
        appended_column: a column whose text is appended to the text, after a blank. None: there is none.
        score_range: the lowest and the highest score of a regression. The label is the score as the file writes it.
    """

    text_column: str
    label_column: str
    name_of_value: Mapping[str, str]
    pair_column: str | None = None
    is_flawed: bool = False
    appended_column: str | None = None
    score_range: tuple[float, float] | None = None

    def __call__(self, place: Place, row: Row) -> Example | None:
        """Returns the example of a row, or None for a row that is left out."""
        if self.is_flawed and not all(
            str(row.get(name) or "").strip() for name in (self.text_column, self.pair_column or self.text_column)
        ):
            return None
        text = text_of(place, row, self.text_column)
        if self.appended_column is not None:
            text = f"{text} {text_of(place, row, self.appended_column)}"
        pair = None if self.pair_column is None else text_of(place, row, self.pair_column)
        name = self._name(place, str(row.get(self.label_column)).strip())
        return Example(place.number, "labelled", text, pair, name) if name else None

    def _name(self, place: Place, cell: str) -> str:
        """Returns the label's name, or the score, of a cell. Raises CodecError for an unknown one."""
        if self.score_range is None:
            if cell not in self.name_of_value:
                names = ", ".join(self.name_of_value)
                raise CodecError(
                    f"{place} has a {self.label_column} that the data set does not have", f"it has: {names}"
                )
            return self.name_of_value[cell]
        low, high = self.score_range
        with suppress(ValueError):
            if low <= float(cell) <= high:
                return cell
        raise CodecError(
            f"{place} has a {self.label_column} that is not a number from {low:g} to {high:g}", "check the file"
        )


@dataclass(frozen=True, slots=True)
class QuestionAnswerBuilder:
    """Builds examples of a question and its answer.

    Attributes:
        question_column: the column of questions.
        answer_column: the column of answers.
        extra_column: a column that is put under the question if it is not empty.
        prefix: words that are put before the question.
        is_flawed: whether the published file has empty answers, which are left out.
    """

    question_column: str
    answer_column: str
    extra_column: str | None = None
    prefix: str = ""
    is_flawed: bool = False

    def __call__(self, place: Place, row: Row) -> Example | None:
        if self.is_flawed and isinstance(row.get(self.answer_column), str) and not row[self.answer_column].strip():
            return None
        messages = question_answer(place, row, self.question_column, self.answer_column, self.extra_column, self.prefix)
        return Example(place.number, "chat", messages=messages)


@dataclass(frozen=True, slots=True)
class PlainTextBuilder:
    """Builds examples of one text: a column of a row, or an entry of a list of texts.

    Attributes:
        column: the column of texts.
        are_lines: whether the rows are lines of files. Then blank ones are left out, and texts are stripped.
    """

    column: str = "text"
    are_lines: bool = False

    def __call__(self, place: Place, row: Row | str) -> Example | None:
        if isinstance(row, str):
            if not row.strip():
                raise EmptyText(f"{place} is empty", "leave it out")
            return Example(place.number, "text", row)
        if self.are_lines and isinstance(value := row.get(self.column), str) and not value.strip():
            return None
        text = text_of(place, row, self.column)
        return Example(place.number, "text", text.strip() if self.are_lines else text)

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
# Returns None for a known row of the published files that cannot be used.
Build = Callable[[Place, Row], Example | None]


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes one form in which a split was published.

    Attributes:
        files: the files that are all needed.
        rows: reads the files, given their paths in order.
        build: makes an Example of a row, or returns None to leave the row out.
    """

    files: tuple[str, ...]
    rows: Callable[..., Iterator[tuple[Place, Any]]]
    build: Build


def alternatives(rows: Callable[..., Iterator[tuple[Place, Any]]], build: Build, *names: str) -> tuple[Layout, ...]:
    """Returns layouts of one file each, which was published under several names."""
    return tuple(Layout((name,), rows, build) for name in names)


@dataclass(frozen=True, slots=True)
class HubDataset:
    """Names a data set on the Hugging Face hub.

    Attributes:
        splits: the hub's name of each split.
        build: makes an Example of a row, or returns None to leave the row out.
    """

    path: str
    config: str | None
    splits: Mapping[str, str]
    build: Build


@dataclass(frozen=True, slots=True)
class PublicDataset:
    """Describes a data set: its files, its columns, its licence and how it is read.

    Attributes:
        columns: of the original files, in the order text, pair, label.
        labels: label names, in the order of their numbers.
        metrics: names of metrics/glue.py and metrics/text.py.
        flaws: why rows of the published files are left out (they are counted and reported), or "".
        folders: other names of its folder.
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
    folders: tuple[str, ...] = field(default=())

    @property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.labels)}

    def places(self, folder: Path) -> list[Path]:
        """Returns where its files may be: in a folder of its own inside `folder`, or in `folder` itself."""
        return [*(folder / name for name in (self.name, *self.folders)), folder]


# --- builders ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LabelledColumn:
    """Builds examples of a text, perhaps a second one, and a label or a score.

    Attributes:
        values: the label's name for each value in the file. "": there is no agreed label, and the row is left out.
        flawed: whether the published file has empty texts and broken rows, which are left out.
        joined_column: a column that is appended to the text.
        scores: the lowest and the highest score of a regression. The label is the score as the file writes it.
    """

    text: str
    label: str
    values: Mapping[str, str]
    pair: str | None = None
    flawed: bool = False
    joined_column: str | None = None
    scores: tuple[float, float] | None = None

    def __call__(self, place: Place, row: Row) -> Example | None:
        if self.flawed and not all(str(row.get(name) or "").strip() for name in (self.text, self.pair or self.text)):
            return None
        text = text_of(place, row, self.text)
        if self.joined_column is not None:
            text = f"{text} {text_of(place, row, self.joined_column)}"
        pair = None if self.pair is None else text_of(place, row, self.pair)
        name = self._name(place, str(row.get(self.label)).strip())
        return Example(place.number, "labelled", text, pair, name) if name else None

    def _name(self, place: Place, cell: str) -> str:
        if self.scores is None:
            if cell not in self.values:
                names = ", ".join(self.values)
                raise CodecError(f"{place} has a {self.label} that the data set does not have", f"it has: {names}")
            return self.values[cell]
        low, high = self.scores
        with suppress(ValueError):
            if low <= float(cell) <= high:
                return cell
        raise CodecError(f"{place} has a {self.label} that is not a number from {low:g} to {high:g}", "check the file")


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """Builds examples of a question and its answer.

    Attributes:
        extra: a column that is put under the question if it is not empty.
        prefix: words that are put before the question.
        flawed: whether the published file has empty answers, which are left out.
    """

    question: str
    answer: str
    extra: str | None = None
    prefix: str = ""
    flawed: bool = False

    def __call__(self, place: Place, row: Row) -> Example | None:
        if self.flawed and isinstance(row.get(self.answer), str) and not row[self.answer].strip():
            return None
        messages = question_answer(place, row, self.question, self.answer, self.extra, self.prefix)
        return Example(place.number, "chat", messages=messages)


@dataclass(frozen=True, slots=True)
class PlainText:
    """Builds examples of one text: a column of a row, or an entry of a list of texts.

    Attributes:
        blank: whether the rows are lines of files. Then blank ones are left out, and texts are stripped.
    """

    column: str = "text"
    blank: bool = False

    def __call__(self, place: Place, row: Row | str) -> Example | None:
        if isinstance(row, str):
            if not row.strip():
                raise EmptyText(f"{place} is empty", "leave it out")
            return Example(place.number, "text", row)
        if self.blank and isinstance(value := row.get(self.column), str) and not value.strip():
            return None
        text = text_of(place, row, self.column)
        return Example(place.number, "text", text.strip() if self.blank else text)

"""What is known of a data set before a row of it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from milkglass.client.data.dataset import Example
from milkglass.datasets.rows import Place, Row

Task = Literal["classification", "regression", "chat", "prompts", "text"]
Build = Callable[
    [Place, Row], Example | None
]  # None: a row that the published files are known to hold and nobody can use


@dataclass(frozen=True, slots=True)
class Layout:
    """One form in which a split was published.

    Attributes:
        files: all of them are needed.
        rows: takes their paths, in order.
    """

    files: tuple[str, ...]
    rows: Callable[..., Iterator[tuple[Place, Any]]]
    build: Build


@dataclass(frozen=True, slots=True)
class Hub:
    """Where the Hugging Face hub has it.

    Attributes:
        splits: our names to theirs.
    """

    path: str
    config: str | None
    splits: Mapping[str, str]
    build: Build


@dataclass(frozen=True, slots=True)
class Description:
    """A data set.

    Attributes:
        columns: of the original files, in the order text, pair, label.
        labels: names, in the order of their numbers.
        metrics: names of metrics/glue.py and metrics/text.py.
        flaws: why rows of the published files are left out (they are counted and reported); "" where none are.
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
    hub: Hub | None = None
    flaws: str = ""
    folders: tuple[str, ...] = field(default=())

    @property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.labels)}

    def places(self, folder: Path) -> list[Path]:
        """Where its files may lie: in a folder of its own inside `folder`, or in `folder` itself."""
        return [*(folder / name for name in (self.name, *self.folders)), folder]

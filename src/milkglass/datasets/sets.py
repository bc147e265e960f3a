"""Every data set by name, and how to read one: from a folder of files in their original layouts, or from the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milkglass.client.data.dataset import Example
from milkglass.datasets import hub
from milkglass.datasets.corpora import CORPORA
from milkglass.datasets.description import Build, Description, Layout
from milkglass.datasets.glue import TASKS
from milkglass.datasets.instructions import INSTRUCTIONS
from milkglass.datasets.rows import Place
from milkglass.datasets.topics import TOPICS
from milkglass.errors import EmptyText, UsageError
from milkglass.progress import Log, no_log

SETS: dict[str, Description] = {one.name: one for one in (*TASKS, *INSTRUCTIONS, *TOPICS, *CORPORA)}


def describe(name: str) -> Description:
    if name not in SETS:
        raise UsageError(f"there is no data set {name!r}", f"known: {', '.join(SETS)}")
    return SETS[name]


def load(name: str, folder: Path | None, split: str, progress: Log = no_log) -> Iterator[Example]:
    """Rows of one split, streamed. folder: the data set's own, or one with a folder of its name; None: the hub.

    progress: what is left out of a published file that is known to have flaws, said once, at the end. Raises UsageError
    for a name, split or folder that is not there, at once; CodecError for a row that cannot be, when it is reached.
    """
    about = describe(name)
    if folder is None:
        place = hub.of(about, split)
        return _examples(about, hub.rows(place, split), place.build, f"{name} on the hub", progress)
    layout, paths = _located(about, folder, split)
    return _examples(about, layout.rows(*paths), layout.build, " and ".join(path.name for path in paths), progress)


def files(name: str, folder: Path, split: str) -> list[Path]:
    """The files that `load` reads."""
    return _located(describe(name), folder, split)[1]


def _located(about: Description, folder: Path, split: str) -> tuple[Layout, list[Path]]:
    if split not in about.splits:
        raise UsageError(f"{about.name} has no split {split!r}", f"it has: {', '.join(about.splits)}")
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "give the folder that has the data set's own files")
    result = _there(about, folder, split)
    if result is None:
        raise UsageError(f"{folder} has no {split} split of {about.name}", _looked(about, folder, split))
    return result


def _there(about: Description, folder: Path, split: str) -> tuple[Layout, list[Path]] | None:
    for place in about.places(folder):
        for layout in about.splits[split]:
            paths = [place / file for file in layout.files]
            if all(path.is_file() for path in paths):
                return layout, paths
    return None


def _looked(about: Description, folder: Path, split: str) -> str:
    """Where it was looked for what, and what is there."""
    ways = " or ".join(" with ".join(layout.files) for layout in about.splits[split])
    places = ", ".join(map(str, about.places(folder)))
    located = {other: _there(about, folder, other) for other in about.splits}
    result = [f"{other} ({' with '.join(one[0].files)})" for other, one in located.items() if one is not None]
    return f"looked for {ways} in {places}; there of {about.name}: {', '.join(result) or 'nothing'}"


def _examples(
    about: Description, rows: Iterator[tuple[Place, Any]], build: Build, source: str, progress: Log
) -> Iterator[Example]:
    left_out = provided = 0
    for place, row in rows:
        example = build(place, row)
        if example is None:
            left_out += 1
        else:
            provided += 1
            yield example
    if left_out:
        rows_were = "row was" if left_out == 1 else "rows were"
        progress(f"{left_out} {rows_were} left out of {source}: {about.flaws}")
    if not provided:
        raise EmptyText(f"{source} has no rows", "give at least one")

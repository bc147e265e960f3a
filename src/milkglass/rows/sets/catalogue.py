"""Lists all public data sets by name, and reads their rows.

Rows are read from a folder of files in their original layouts, or from the Hugging Face hub if the library `datasets`
is installed. Rows are streamed; code from the hub is never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milkglass.errors import EmptyText, UsageError
from milkglass.progress import Log, no_log
from milkglass.rows.examples import Example
from milkglass.rows.place import Place
from milkglass.rows.sets.classified import TASKS, TOPICS
from milkglass.rows.sets.corpora import CORPORA, INSTRUCTIONS
from milkglass.rows.sets.description import ExampleBuilder, HubDataset, Layout, PublicDataset

PUBLIC_DATASETS: dict[str, PublicDataset] = {
    data_set.name: data_set for data_set in (*TASKS, *INSTRUCTIONS, *TOPICS, *CORPORA)
}


def dataset_named(name: str) -> PublicDataset:
    """Returns the description of the data set with this name. Raises UsageError if there is none."""
    if name not in PUBLIC_DATASETS:
        raise UsageError(f"there is no data set {name!r}", f"known: {', '.join(PUBLIC_DATASETS)}")
    return PUBLIC_DATASETS[name]


def load_split(name: str, folder: Path | None, split: str, notice: Log = no_log) -> Iterator[Example]:
    """Yields the rows of one split.

    Args:
        name: the data set's name.
        folder: the folder with the data set's files, or one that has such a folder under the set's name. None: rows
            come from the hub.
        split: the split's name, such as "train".
        notice: receives, at the end, how many rows of a flawed published file were left out.

    Raises:
        UsageError: the name, split or folder does not exist, which is raised at once; or the hub cannot be read or the
            library `datasets` is missing, which is raised when rows are read.
        CodecError: a row is invalid, which is raised when the row is reached.
        EmptyText: there are no rows, which is raised at the end.
    """
    description = dataset_named(name)
    if folder is None:
        hub = _hub_of(description, split)
        return _examples(description, _hub_rows(hub, split), hub.build, f"{name} on the hub", notice)
    layout, paths = _locate(description, folder, split)
    return _examples(
        description, layout.read_rows(*paths), layout.build, " and ".join(path.name for path in paths), notice
    )


def files_of_split(name: str, folder: Path, split: str) -> list[Path]:
    """Returns the files that `load_split` reads for a split. Raises UsageError as `load_split` does."""
    return _locate(dataset_named(name), folder, split)[1]


def _locate(description: PublicDataset, folder: Path, split: str) -> tuple[Layout, list[Path]]:
    if split not in description.splits:
        raise UsageError(f"{description.name} has no split {split!r}", f"it has: {', '.join(description.splits)}")
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "give the folder that has the data set's own files")
    located = _find_files(description, folder, split)
    if located is None:
        raise UsageError(
            f"{folder} has no {split} split of {description.name}", _where_looked(description, folder, split)
        )
    return located


def _find_files(description: PublicDataset, folder: Path, split: str) -> tuple[Layout, list[Path]] | None:
    for candidate in description.candidate_folders(folder):
        for layout in description.splits[split]:
            paths = [candidate / file for file in layout.files]
            if all(path.is_file() for path in paths):
                return layout, paths
    return None


def _where_looked(description: PublicDataset, folder: Path, split: str) -> str:
    """Returns a hint: which files were looked for and where, and which splits were found."""
    file_names = " or ".join(" with ".join(layout.files) for layout in description.splits[split])
    paths = ", ".join(map(str, description.candidate_folders(folder)))
    located = {other: _find_files(description, folder, other) for other in description.splits}
    found_splits = [
        f"{other} ({' with '.join(location[0].files)})" for other, location in located.items() if location is not None
    ]
    return f"looked for {file_names} in {paths}; there of {description.name}: {', '.join(found_splits) or 'nothing'}"


def _examples(
    description: PublicDataset, rows: Iterator[tuple[Place, Any]], build: ExampleBuilder, source: str, notice: Log
) -> Iterator[Example]:
    left_out_count = yielded_count = 0
    for place, row in rows:
        example = build(place, row)
        if example is None:
            left_out_count += 1
        else:
            yielded_count += 1
            yield example
    if left_out_count:
        rows_were = "row was" if left_out_count == 1 else "rows were"
        notice(f"{left_out_count} {rows_were} left out of {source}: {description.flaws}")
    if not yielded_count:
        raise EmptyText(f"{source} has no rows", "give at least one")


# --- from the hub -----------------------------------------------------------------------------------------------------
def _hub_of(description: PublicDataset, split: str) -> HubDataset:
    """Returns the data set's entry on the hub. Raises UsageError if the hub has no such set or split."""
    if description.hub is None:
        raise UsageError(f"{description.name} is on no hub under a name that we know", "give a folder with its files")
    if split not in description.hub.splits:
        raise UsageError(
            f"the hub's {description.name} has no split {split!r}", f"it has: {', '.join(description.hub.splits)}"
        )
    return description.hub


def _hub_rows(hub: HubDataset, split: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields rows of the hub. Raises UsageError if the library is missing, or the hub does not answer."""
    try:
        import datasets
    except ImportError:
        raise UsageError(
            "the library datasets is not installed, and only it reads from the hub",
            "pip install datasets, or give a folder with the data set's files",
        ) from None
    name = f"{hub.path} on the hub"
    number = 0
    try:
        dataset = datasets.load_dataset(hub.path, hub.config, split=hub.splits[split], streaming=True)
        for row in dataset:
            number += 1
            yield Place(name, number, "row"), dict(row)
    except (OSError, ValueError) as error:  # no network, no such set; a row's own errors are raised elsewhere
        raise UsageError(
            f"{name} could not be read after {number} rows: {type(error).__name__}",
            "look at the network, or give a folder with the data set's files",
        ) from error

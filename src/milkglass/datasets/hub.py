"""Data sets from the Hugging Face hub, by the library `datasets` where it is installed. Rows stream; code of the hub's
is never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from milkglass.datasets.description import Description, Hub
from milkglass.datasets.rows import Place
from milkglass.errors import UsageError


def of(about: Description, split: str) -> Hub:
    """Raises UsageError where the hub has no such set or split."""
    if about.hub is None:
        raise UsageError(f"{about.name} is on no hub under a name that we know", "give a folder with its files")
    if split not in about.hub.splits:
        raise UsageError(f"the hub's {about.name} has no split {split!r}", f"it has: {', '.join(about.hub.splits)}")
    return about.hub


def rows(place: Hub, split: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Raises UsageError where the library is missing, or the hub does not answer."""
    try:
        import datasets
    except ImportError:
        raise UsageError(
            "the library datasets is not installed, and only it reads from the hub",
            "pip install datasets, or give a folder with the data set's files",
        ) from None
    name = f"{place.path} on the hub"
    number = 0
    try:
        result = datasets.load_dataset(place.path, place.config, split=place.splits[split], streaming=True)
        for row in result:
            number += 1
            yield Place(name, number, "row"), dict(row)
    except (OSError, ValueError) as error:  # no network, no such set; a row's own errors are raised elsewhere
        raise UsageError(
            f"{name} could not be read after {number} rows: {type(error).__name__}",
            "look at the network, or give a folder with the data set's files",
        ) from error

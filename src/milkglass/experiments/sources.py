"""Where a recipe's data comes from: a file under the data folder, or a split of a data set by name, as "cola:train".

A data set by name is read in its original layout (milkglass/datasets), from the data folder or a folder in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from milkglass.audit.texts import examples_of
from milkglass.client.dataset import Example, number_labels, summarise
from milkglass.datasets import export, sets
from milkglass.datasets.description import Description
from milkglass.errors import UsageError

Tell = Callable[[str], None]


def named(ref: str) -> tuple[Description, str] | None:
    """("cola:train") the data set and the split; None for the path of a file. Raises UsageError for an unknown set."""
    name, colon, split = ref.partition(":")
    return (sets.describe(name), split) if colon and "/" not in name and "." not in name else None


def files(data: Path, ref: str) -> list[Path]:
    """Raises UsageError where they are not there."""
    if found := named(ref):
        return sets.files(found[0].name, data, found[1])
    path = data / ref
    if not path.is_file():
        raise UsageError(f"there is no {path}", "give --data the folder that the recipe's data paths start from")
    return [path]


def sums(data: Path, refs: Iterable[str]) -> dict[str, str]:
    """What the files hold: a run of other data is another run."""
    found = {}
    for ref in refs:
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files(data, ref)]
        found[ref] = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return found


def examples(data: Path, ref: str, tell: Tell = lambda words: None) -> list[Example]:
    if found := named(ref):
        return list(sets.load(found[0].name, data, found[1], tell))
    return examples_of(files(data, ref)[0])


def as_file(data: Path, ref: str, folder: Path, tell: Tell = lambda words: None) -> Path:
    """A file of the shapes that `client/dataset.py` reads; of a data set by name it is written into `folder`, once."""
    found = named(ref)
    if found is None:
        return files(data, ref)[0]
    about, split = found
    if about.task not in ("classification", "chat", "text"):
        raise UsageError(f"{about.name} is data for {about.task}, which is not trained here", "take another data set")
    out = folder / f"{about.name}-{split}.jsonl"
    if not out.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        export.write(sets.load(about.name, data, split, tell), out)
    return out


def numbers(ref: str, path: Path) -> dict[str, int]:
    """Label names to numbers: a data set's own, so that class 1 is the one its F1 is about; else by the file."""
    found = named(ref)
    return found[0].numbers if found else number_labels(summarise(path).labels, None)

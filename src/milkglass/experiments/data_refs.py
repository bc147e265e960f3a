"""Finds a recipe's data: a file in the data folder, or a split of a named data set, such as "cola:train".

A named data set is read in its original layout (milkglass/rows/sets), from the data folder or a folder in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from milkglass.errors import UsageError
from milkglass.progress import Log, no_log
from milkglass.rows.examples import Example, examples_of, number_labels, sort_labels
from milkglass.rows.sets import catalogue as sets
from milkglass.rows.sets.description import PublicDataset
from milkglass.rows.write import write_examples
from milkglass.threat.defence import LabelledTexts

DATA_HINT = (
    "give --data a folder that holds one for each data set, as it was published; `milkglass data` says where each is"
)


def parse_ref(ref: str) -> tuple[PublicDataset, str] | None:
    """Returns the data set and split of a name such as "cola:train"; None for a path.

    Raises:
        UsageError: there is no such data set.
    """
    name, colon, split = ref.partition(":")
    return (sets.dataset_named(name), split) if colon and "/" not in name and "." not in name else None


def files_of(data: Path, ref: str) -> list[Path]:
    """Returns the files of a reference: "cola:train", or a path in `data`. Raises UsageError if they do not exist."""
    if named_split := parse_ref(ref):
        return sets.split_files(named_split[0].name, data, named_split[1])
    path = data / ref
    if not path.is_file():
        raise UsageError(f"there is no {path}", DATA_HINT)
    return [path]


def file_digests(data: Path, refs: Iterable[str]) -> dict[str, str]:
    """Returns the digest of each reference's files: a run on other data is another run.

    Raises:
        UsageError: a reference has no files.
    """
    digest_by_ref = {}
    for ref in refs:
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files_of(data, ref)]
        digest_by_ref[ref] = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return digest_by_ref


def load_examples(data: Path, ref: str, log: Log = no_log) -> list[Example]:
    """Returns the rows of a reference. Raises UsageError if there are no such files, and CodecError for a bad row."""
    if named_split := parse_ref(ref):
        return list(sets.load(named_split[0].name, data, named_split[1], log))
    return examples_of(files_of(data, ref)[0])


def as_file(data: Path, ref: str, folder: Path, log: Log = no_log) -> Path:
    """Returns a file that `rows/examples.py` reads. A named data set is written into `folder` once.

    Raises:
        UsageError: there are no such files, or nothing is trained on such data.
    """
    named_split = parse_ref(ref)
    if named_split is None:
        return files_of(data, ref)[0]
    data_set, split = named_split
    if data_set.task not in ("classification", "chat", "text"):
        raise UsageError(
            f"{data_set.name} is data for {data_set.task}, which is not trained here", "take another data set"
        )
    out = folder / f"{data_set.name}-{split}.jsonl"
    if not out.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_examples(sets.load(data_set.name, data, split, log), out)
    return out


def class_numbers(ref: str, rows: Iterable[Example]) -> dict[str, int]:
    """Returns the number of each label.

    A named data set has numbers of its own, so that its F1 is of class 1. The labels of a file are numbered in order.

    Args:
        rows: the rows of `ref`, in which labels are looked for if it is a file.
    """
    named_split = parse_ref(ref)
    return named_split[0].label_numbers if named_split else numbers_by_label(rows)


def numbers_by_label(rows: Iterable[Example]) -> dict[str, int]:
    """Returns the labels that occur, numbered in order."""
    return number_labels(sort_labels({row.label for row in rows if row.label is not None}), None)


def labelled_texts(rows: Sequence[Example], numbers: Mapping[str, int], is_regression: bool = False) -> LabelledTexts:
    """Returns texts with labels. Raises UsageError for a row without a label, or whose label has no number."""
    if any(row.label is None or not (is_regression or row.label in numbers) for row in rows):
        raise UsageError("some rows have no label, or one that is not among the training rows'", "give labelled data")
    texts = [row.text for row in rows]
    pairs = [row.pair or "" for row in rows] if rows and rows[0].pair is not None else None
    if is_regression:
        return LabelledTexts(texts, [float(row.label or 0) for row in rows], pairs)
    return LabelledTexts(texts, [numbers[row.label or ""] for row in rows], pairs)

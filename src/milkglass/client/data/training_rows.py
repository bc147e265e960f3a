"""Training data on its way to scrambled Parquet: read once to check it, its labels numbered, then written."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from milkglass.client.data.dataset import Summary, number_labels, require_classes, summarise
from milkglass.client.key.key import Key
from milkglass.client.key.keystream import permutation
from milkglass.client.label_scale import Scale
from milkglass.errors import CodecError, UsageError
from milkglass.noise.stream import subkey

Numbers = Mapping[str, int] | Scale | None  # of labels, of scores, or none: rows without a label


def checked(data: Path, task: str | None) -> Summary:
    """Read the whole file, so that a broken line is reported before anything is written or sent.

    Raises:
        UsageError: there is no such file.
        CodecError: a row that cannot be read, or data for another task.
    """
    if data.is_dir():
        raise UsageError(f"{data} is a folder, not a file", "give .jsonl, .csv or .tsv")
    if not data.is_file():
        raise UsageError(f"there is no file {data}", "give .jsonl, .csv or .tsv")
    result = summarise(data, scores=task == "regression")
    if task is not None and task != result.task:
        raise CodecError(f"{data.name} is data for {result.task}, not for {task}", "see `milkglass finetune --help`")
    if result.task == "classification" and task is None:
        require_classes(data, result)
    return result


def numbers_of(key: Key, train: Summary) -> Numbers:
    """How the labels are sent. Label names and a scale that the key knows stay unchanged, so that a second
    fine-tune reads like the first; a scale only where it suits the data."""
    if train.task == "classification":
        return number_labels(in_secret_order(train.labels, key), key.info.labels)
    known = key.info.scale
    return known if known and train.scale and known.suits(train.scale) else train.scale


# In which order a data set's labels are numbered.
#
# The server sees numbers. In alphabetical order, anyone who guesses the set of names would know which number is which;
# here the order is drawn under the key, so that a guessed set leaves every order as likely as any other.
#
# Out of scope: how often each label occurs, which the server can count.
def in_secret_order(names: Sequence[str], key: Key) -> tuple[str, ...]:
    """The names in an order of their own for each key and each set of names: the same again for the same data, so that
    an upload that was interrupted goes on."""
    listed = sorted(names)
    info = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    order = permutation(subkey(key.root, key.model_digest, f"labels/{info}"), len(listed))
    return tuple(listed[place] for place in order)


def in_fresh_order(names: Sequence[str]) -> tuple[str, ...]:
    """The names in an order drawn anew, for what keeps the numbers beside its own secret."""
    return tuple(secrets.SystemRandom().sample(sorted(names), len(names)))

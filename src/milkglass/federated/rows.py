"""What a site trains on: ids and classes in a folder, and the stamp that GHOST left when the ids passed through it.

    rows.safetensors   ids (total,), lengths (b,), labels (b,), int64
    stamp.json         of rows that passed: the method, the model's digest, the digest of the rows
    draws.secret       32 bytes, of which the site draws batches and noise: whoever has them can take the noise away

A stamp is a digest, not a signature: it finds rows that were swapped, edited or never obfuscated, not a site that means
to cheat, which holds its texts anyway. Ids and labels of shadows may be read off a digest by trying: it never leaves.

What this module does not know: texts, training.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from milkglass.checkpoint import read_json, write_json
from milkglass.errors import CorruptCheckpoint
from milkglass.sequences import Ids, Sequences

ROWS, STAMP, SECRET = "rows.safetensors", "stamp.json", "draws.secret"
VERSION = 1
BYTES = 32  # of a secret


@dataclass(frozen=True, eq=False)
class Rows:
    """ids: a sequence a text. labels: (b,) its class."""

    ids: Sequences = field(repr=False)
    labels: Ids = field(repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def digest(self) -> str:
        """SHA-256 over all ids, lengths and labels, in hex."""
        whole = hashlib.sha256(b"milkglass federated rows\0")
        for one in (self.ids.ids, self.ids.lengths, self.labels):
            whole.update(len(one).to_bytes(8, "little") + one.astype("<i8").tobytes())
        return whole.hexdigest()


@dataclass(frozen=True)
class Stamp:
    """model: the digest of the model that GHOST looked at. rows: theirs."""

    method: str
    model: str
    rows: str


def save(folder: Path, rows: Rows, stamp: Stamp | None, secret: bytes) -> None:
    """Into a folder that is there, empty, and not yet under its name."""
    arrays = {"ids": rows.ids.ids, "lengths": rows.ids.lengths, "labels": rows.labels}
    save_file({name: np.ascontiguousarray(one, np.int64) for name, one in arrays.items()}, folder / ROWS)
    if stamp is not None:
        write_json(folder / STAMP, {"milkglass_stamp": VERSION, **asdict(stamp)})
    with os.fdopen(os.open(folder / SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)


def load(folder: Path) -> Rows:
    """Raises CorruptCheckpoint, OSError where there are none."""
    if not (folder / ROWS).is_file():
        raise FileNotFoundError(f"there is no {ROWS}")
    try:
        found = load_file(folder / ROWS)
        rows = Rows(Sequences(found["ids"], found["lengths"]), found["labels"])
    except (SafetensorError, KeyError, ValueError):
        raise CorruptCheckpoint(f"{ROWS} of {folder.name} is damaged", "prepare the site again") from None
    if not len(rows) or len(rows.labels) != len(rows) or (rows.ids.lengths < 1).any():
        raise CorruptCheckpoint(f"{ROWS} of {folder.name} holds rows that are none", "prepare the site again")
    return rows


def stamp_of(folder: Path) -> Stamp | None:
    """None where the rows did not pass through anything. Raises CorruptCheckpoint."""
    if not (folder / STAMP).is_file():
        return None
    match read_json(folder / STAMP):
        case {"milkglass_stamp": 1, "method": str(method), "model": str(model), "rows": str(rows)}:
            return Stamp(method, model, rows)
    raise CorruptCheckpoint(f"{STAMP} of {folder.name} is damaged", "prepare the site again")


def secret_of(folder: Path) -> bytes:
    """Raises CorruptCheckpoint."""
    found = (folder / SECRET).read_bytes() if (folder / SECRET).is_file() else b""
    if len(found) != BYTES:
        raise CorruptCheckpoint(f"{SECRET} of {folder.name} is not {BYTES} bytes", "prepare the site again")
    return found

"""What a site trains on: ids and classes in a folder, and the stamp that GHOST left on them.

    rows.safetensors   ids (tokens,), lengths (texts,), labels (texts,), int64
    stamp.json         of rows that passed: the method, its parameters, the digests of the model and the rows, a seal
    report.json        of rows that passed: what GHOST did, counted, as `sanitize --method ghost` reports it
    texts.mark         an HMAC of the texts under the secret, which shows whether a file has changed since
    draws.secret       32 bytes, from which the site draws batches and noise: anyone with them can remove the noise

The seal is an HMAC of the stamp under the site's secret. It finds rows that were swapped, edited or never obfuscated, a
stamp written by hand, and a stamp of another site. It does not stop anyone who can read the secret: the person who runs
the site, who has its texts as well, and with `--seed` anyone who guesses the seed.

A plain digest of ids and labels can be inverted by trying rows, so it never leaves the site. What names a run is keyed
(`SiteRows.mark`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from milkglass import files
from milkglass.errors import CorruptCheckpoint
from milkglass.models.checkpoint import json_text, read_json
from milkglass.sequences import Ids, Sequences

ROWS_FILE, STAMP_FILE, REPORT_FILE, SECRET_FILE = "rows.safetensors", "stamp.json", "report.json", "draws.secret"
TEXTS_MARK_FILE = "texts.mark"
STAMP_VERSION = 2  # version 1 had no parameters and no seal
SECRET_BYTES = 32


@dataclass(frozen=True, eq=False)
class SiteRows:
    """Holds the texts of a site, as they are trained on.

    Attributes:
        ids: a sequence for each text.
        labels: (texts,) the class of each text.
    """

    ids: Sequences = field(repr=False)
    labels: Ids = field(repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def digest(self) -> str:
        """Returns the SHA-256 over all ids, lengths and labels, in hex."""
        digest = hashlib.sha256(b"milkglass federated rows\0")
        for array in (self.ids.ids, self.ids.lengths, self.labels):
            digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
        return digest.hexdigest()

    def mark(self, secret: bytes) -> str:
        """Returns a digest that reveals nothing without the site's secret, not even whether a guess is right."""
        return _keyed_digest(secret, "rows", self.digest())


@dataclass(frozen=True)
class Stamp:
    """Says what rows passed through.

    Attributes:
        method: GHOST's name.
        model: the digest of the model that GHOST used.
        rows: the digest of the rows after GHOST.
        search: the parameters of GHOST's search.
        selection: the parameters of GHOST's selection.
        seal: an HMAC of the other fields under the site's secret.
    """

    method: str
    model: str
    rows: str
    search: Mapping[str, Any]
    selection: Mapping[str, Any]
    seal: str = ""

    def with_seal(self, secret: bytes) -> Stamp:
        """Returns the stamp with the seal of this secret."""
        entries = asdict(self) | {"seal": ""}
        return Stamp(**entries | {"seal": _keyed_digest(secret, "stamp", json.dumps(entries, sort_keys=True))})

    def is_sealed_with(self, secret: bytes) -> bool:
        """Returns whether the seal is of this secret, and of all that the stamp says."""
        return hmac.compare_digest(self.seal.encode(), self.with_seal(secret).seal.encode())


def save_rows(
    folder: Path, rows: SiteRows, stamp: Stamp | None, secret: bytes, report: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
) -> None:  # fmt: skip
    """Writes the rows and what belongs to them into a new folder.

    Args:
        folder: the site's folder, which exists and is empty.
        rows: the rows.
        stamp: of rows that passed through GHOST; it is sealed here. None: they did not pass.
        secret: the site's secret.
        report: what GHOST did, counted. None: there is no report.
        texts: the texts from which the rows were made, in order, of which only a mark is kept.
    """
    arrays = {"ids": rows.ids.ids, "lengths": rows.ids.lengths, "labels": rows.labels}
    with files.atomic_path(folder / ROWS_FILE) as path:
        save_file({name: np.ascontiguousarray(array, np.int64) for name, array in arrays.items()}, path)
    if stamp is not None:
        files.write(
            folder / STAMP_FILE, json_text({"milkglass_stamp": STAMP_VERSION, **asdict(stamp.with_seal(secret))})
        )
    if report is not None:
        files.write(folder / REPORT_FILE, json_text(report))
    files.write(folder / TEXTS_MARK_FILE, texts_mark(secret, texts) + "\n")
    files.write(folder / SECRET_FILE, secret)


def texts_mark(secret: bytes, texts: Sequence[str]) -> str:
    """Returns a mark of texts that reveals nothing without the secret. Anyone with the secret can try texts."""
    return _keyed_digest(secret, "texts", json.dumps(list(texts)))


def is_of_texts(folder: Path, texts: Sequence[str]) -> bool:
    """Returns whether the rows of a folder were made from these texts, in this order.

    Raises CorruptCheckpoint if the folder has no mark or no secret.
    """
    if not (folder / TEXTS_MARK_FILE).is_file():
        raise CorruptCheckpoint(f"{folder.name} has no {TEXTS_MARK_FILE}", "prepare the site again")
    return hmac.compare_digest(
        (folder / TEXTS_MARK_FILE).read_bytes().strip(), texts_mark(secret_of(folder), texts).encode()
    )


def load_rows(folder: Path) -> SiteRows:
    """Returns the rows of a folder. Raises CorruptCheckpoint, and OSError if the folder has no rows."""
    if not (folder / ROWS_FILE).is_file():
        raise FileNotFoundError(f"there is no {ROWS_FILE}")
    try:
        arrays = load_file(folder / ROWS_FILE)
        rows = SiteRows(Sequences(arrays["ids"], arrays["lengths"]), arrays["labels"])
    except (SafetensorError, KeyError, ValueError):
        raise CorruptCheckpoint(f"{ROWS_FILE} of {folder.name} is damaged", "prepare the site again") from None
    if not len(rows) or len(rows.labels) != len(rows) or (rows.ids.lengths < 1).any():
        raise CorruptCheckpoint(f"{ROWS_FILE} of {folder.name} has rows that are not valid", "prepare the site again")
    return rows


def stamp_of(folder: Path) -> Stamp | None:
    """Returns the stamp, not yet checked (`Stamp.is_sealed_with`), or None without one. Raises CorruptCheckpoint."""
    if not (folder / STAMP_FILE).is_file():
        return None
    match read_json(folder / STAMP_FILE):
        case {
            "milkglass_stamp": 2, "method": str(method), "model": str(model), "rows": str(rows),
            "search": dict(search), "selection": dict(selection), "seal": str(seal),
        }:  # fmt: skip
            return Stamp(method, model, rows, search, selection, seal)
    fault = f"{STAMP_FILE} of {folder.name} is damaged, or not of version {STAMP_VERSION}"
    raise CorruptCheckpoint(fault, "prepare the site again")


def report_of(folder: Path) -> dict[str, Any] | None:
    """Returns what GHOST did, counted; None if the rows did not pass through it. Raises CorruptCheckpoint."""
    return read_json(folder / REPORT_FILE) if (folder / REPORT_FILE).is_file() else None


def secret_of(folder: Path) -> bytes:
    """Returns the secret of a site's folder. Raises CorruptCheckpoint if it is missing or has another length."""
    secret = (folder / SECRET_FILE).read_bytes() if (folder / SECRET_FILE).is_file() else b""
    if len(secret) != SECRET_BYTES:
        raise CorruptCheckpoint(f"{SECRET_FILE} of {folder.name} is not {SECRET_BYTES} bytes", "prepare the site again")
    return secret


def _keyed_digest(secret: bytes, label: str, text: str) -> str:
    """Returns the HMAC-SHA256 of a text under a site's secret."""
    return hmac.new(secret, f"milkglass federated {label}\0{text}".encode(), hashlib.sha256).hexdigest()

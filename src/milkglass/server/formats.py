"""What an upload must be before anything else reads it: real safetensors, or Parquet with the columns of spec.py.

A process of its own looks into the file first (inspection.py). What it finds out about training rows is kept, so that a
job is checked in no time.
"""

from __future__ import annotations

from pathlib import Path

from milkglass.errors import BadUpload, CorruptCheckpoint
from milkglass.server.inspection import inspect
from milkglass.server.store import Purpose, Rows
from milkglass.tensorfile import has_notes, read_header

SUFFIX: dict[Purpose, str] = {"model": ".safetensors", "fine-tune": ".parquet"}


def require_suffix(filename: str, purpose: Purpose) -> None:
    if not filename.endswith(SUFFIX[purpose]):
        raise BadUpload(
            f"a file for the purpose {purpose} must end in {SUFFIX[purpose]}",
            "weights are safetensors, training data is Parquet; nothing else is accepted",
        )


def check(path: Path, purpose: Purpose) -> Rows | None:
    """Read the whole file's claims. Raises BadUpload."""
    found = inspect(path, purpose)
    if purpose == "model":
        _check_weights(path)
        return None
    return Rows.model_validate(found)


def _check_weights(path: Path) -> None:
    try:
        refs = read_header(path)
    except CorruptCheckpoint as error:
        # Its own message names the file on our disk, which means nothing to the caller
        message = error.message.replace(path.name, "the file")
        raise BadUpload(message, "save the weights with safetensors; pickled weights are refused") from error
    except (RecursionError, OverflowError) as error:
        raise BadUpload("the header of the file is not sane", "save the weights with safetensors") from error
    if not refs:
        raise BadUpload("the file holds no tensors", "save the weights with safetensors")
    if has_notes(path):
        raise BadUpload(
            "the file holds metadata of its own, which may say more than numbers do",
            'save the weights with save_pretrained, which says only {"format": "pt"}',
        )

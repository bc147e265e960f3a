"""What an upload must be before anything else reads it: real safetensors, or Parquet with the columns of spec.py.

A separate process looks into the file (inspection.py) and gives the verdict; the server parses nothing of an upload.
What that process reports about training rows is kept, so that a job is checked in no time.
"""

from __future__ import annotations

from pathlib import Path

from milkglass.errors import BadUpload
from milkglass.server.inspection import inspect
from milkglass.server.store import Purpose, Rows

SUFFIX: dict[Purpose, str] = {"model": ".safetensors", "fine-tune": ".parquet"}


def require_suffix(filename: str, purpose: Purpose) -> None:
    if not filename.endswith(SUFFIX[purpose]):
        raise BadUpload(
            f"a file for the purpose {purpose} must end in {SUFFIX[purpose]}",
            "weights are safetensors, training data is Parquet; nothing else is accepted",
        )


def check(path: Path, purpose: Purpose) -> Rows | None:
    """Read the whole file's claims, in the inspector's process and nowhere else. Raises BadUpload."""
    found = inspect(path, purpose)
    return None if purpose == "model" else Rows.model_validate(found)

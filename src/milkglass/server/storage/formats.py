"""What an upload must be before anything else reads it: real safetensors, or Parquet with the columns of
server/spec.py.

A separate process looks into the file (inspection.py) and gives the verdict; the server parses nothing of an upload.
What that process reports about training rows is kept, so that a job is checked in no time.
"""

from __future__ import annotations

from pathlib import Path

from milkglass.errors import BadUpload
from milkglass.server.storage.inspection import inspect
from milkglass.server.storage.store import Purpose, TrainingFileInfo

SUFFIX: dict[Purpose, str] = {"model": ".safetensors", "fine-tune": ".parquet"}


def require_suffix(filename: str, purpose: Purpose) -> None:
    if not filename.endswith(SUFFIX[purpose]):
        raise BadUpload(
            f"a file for the purpose {purpose} must end in {SUFFIX[purpose]}",
            "weights are safetensors, training data is Parquet; nothing else is accepted",
        )


def check(path: Path, purpose: Purpose) -> TrainingFileInfo | None:
    """Read the whole file's claims, in the inspector's process and nowhere else. Raises BadUpload."""
    result = inspect(path, purpose)
    return None if purpose == "model" else TrainingFileInfo.model_validate(result)

"""Starts the process that looks into an uploaded file (inspector.py), waits for it, and reads what it says.

A process that crashes, is killed, or needs too much memory or time means that the file is refused.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import BadUpload
from milkglass.server.storage import inspector
from milkglass.server.storage.store import Purpose, TrainingFileInfo

log = logging.getLogger("milkglass.server")
COMMAND = (sys.executable, "-P", "-m", "milkglass.server.storage.inspector")
AT_ONCE = 2  # inspections that run at a time
MEMORY = 2 << 30  # bytes of address space of each; pyarrow needs 0.3 GB for itself
CPU = 20  # seconds of CPU for a small file,
RATE = 4 << 20  # and one more for each so many bytes
WALL = 6  # times the CPU time, for a machine that does other work
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, -signal.SIGTRAP}
HINT = "write the file anew: Parquet with pyarrow, weights with safetensors"
_TURNS = threading.BoundedSemaphore(AT_ONCE)
_Purpose = Literal["model", "fine-tune", "ids"]


def inspect(path: Path, purpose: Literal["model", "fine-tune"]) -> dict[str, Any] | None:
    """What the inspector found. Raises BadUpload. Waits while others are inspected."""
    with _TURNS, tempfile.TemporaryFile() as out:
        _run(path, purpose, out)
        out.seek(0)
        try:
            words: dict[str, Any] = json.loads(out.read(inspector.ANSWER))
        except ValueError:
            raise BadUpload("the file could not be inspected", HINT) from None
    if words.get("memory"):
        raise BadUpload(f"the file takes more than {MEMORY >> 20} MiB of memory to read", HINT)
    if "refused" in words:
        message, hint = words["refused"]
        raise BadUpload(message, hint)
    result: dict[str, Any] | None = words["found"]
    return result


def ids(path: Path, scratch: Path) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lengths and flat ids of a file's rows, by way of a nameless file in the folder `scratch`. Raises BadUpload."""
    with _TURNS, tempfile.TemporaryFile(dir=scratch) as out:
        _run(path, "ids", out)
        out.seek(0)
        return np.load(out, allow_pickle=False), np.load(out, allow_pickle=False)


def _run(path: Path, purpose: _Purpose, out: IO[bytes]) -> None:
    """Raises BadUpload unless the inspector ends well. Its stderr is dropped: a library's last words quote the file."""
    cpu = CPU + path.stat().st_size // RATE
    command = [*COMMAND, purpose, str(path), str(cpu), str(MEMORY)]
    try:
        code = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            timeout=WALL * cpu,
            start_new_session=True,  # Ctrl-C is for the server, which then waits for this
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        raise _too_slow(cpu) from None
    if code == 0:
        return
    log.warning("inspection of an upload ended with %d", code)
    if code == -signal.SIGXCPU:
        raise _too_slow(cpu)
    if code == -signal.SIGKILL:  # the kernel's way to end what takes too much of either
        raise BadUpload("the file takes too much memory or time to read", HINT)
    if code in CRASHES:
        raise BadUpload("the file is damaged: it crashes its reader", HINT)
    raise BadUpload("the file could not be inspected", HINT)


def _environment() -> dict[str, str]:
    """Ours, without what was meant for other parts of Milkglass, such as a token. A pool of threads would cost address
    space."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MILKGLASS_")}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}


def _too_slow(cpu: int) -> BadUpload:
    return BadUpload(f"the file takes more than {cpu} seconds to read", HINT)


# What an upload must be before anything else reads it: real safetensors, or Parquet with the columns of
# server/spec.py.
#
# A separate process looks into the file (inspection.py) and gives the verdict; the server parses nothing of an upload.
# What that process reports about training rows is kept, so that a job is checked in no time.
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

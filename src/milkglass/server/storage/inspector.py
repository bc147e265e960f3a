"""The process that looks into an uploaded file: `python -m milkglass.server.storage.inspector PURPOSE PATH CPU_SECONDS
BYTES`.

It limits its own memory, CPU time and file sizes before it opens the file, and prints one line of JSON: what it found,
or why the file is refused. Whatever a damaged file does to it, the server goes on. It starts for every upload, so it
imports only what it needs. It does not know the server, the store, or what the file is for.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from milkglass.errors import BadUpload, CorruptCheckpoint

ANSWER = 64 << 10  # bytes of the one line
IDS = 6 << 30  # bytes of all ids of a file, as `ids` writes them


def limit(cpu_seconds: int, memory: int, file_bytes: int = ANSWER) -> None:
    """Of this process, for good. `memory`: bytes of address space. No core dump: it would hold the file's content."""
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def answer(purpose: str, path: Path) -> dict[str, Any]:
    """{"found": ...}, {"refused": [message, hint]} or {"memory": true}."""
    try:
        if purpose == "model":
            _check_weights(path)
            return {"found": None}
        from milkglass.server.storage import parquet

        return {"found": parquet.check(path)}
    except BadUpload as error:
        return {"refused": [error.message, error.hint]}
    except MemoryError:
        return {"memory": True}


def _check_weights(path: Path) -> None:
    """Every rule about the header of weights, from one parse. Raises BadUpload."""
    from milkglass.models.safetensors_header import PLAIN, read_all

    try:
        tensors, notes = read_all(path)
    except CorruptCheckpoint as error:
        # Its own message names the file on our disk, which means nothing to the caller
        message = error.message.replace(path.name, "the file")
        raise BadUpload(message, "save the weights with safetensors; pickled weights are refused") from error
    if not tensors:
        raise BadUpload("the file holds no tensors", "save the weights with safetensors")
    if notes != PLAIN:
        raise BadUpload(
            "the file holds metadata of its own, which may say more than numbers do",
            'save the weights with save_pretrained, which says only {"format": "pt"}',
        )


def _ids(path: Path) -> None:
    """Lengths and ids of all rows to stdout, as two .npy arrays of int32."""
    import numpy as np

    from milkglass.server.storage import parquet

    column = parquet.read(path)["input_ids"].combine_chunks()
    for part in (column.value_lengths(), column.flatten()):
        np.save(sys.stdout.buffer, part.to_numpy(zero_copy_only=False).astype(np.int32), allow_pickle=False)


def main(purpose: str, path: str, cpu_seconds: str, memory: str) -> None:
    limit(int(cpu_seconds), int(memory), IDS if purpose == "ids" else ANSWER)
    if purpose == "ids":
        _ids(Path(path))
    else:
        print(json.dumps(answer(purpose, Path(path))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

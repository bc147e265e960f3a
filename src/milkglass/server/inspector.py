"""The process that looks into an uploaded file: `python -m milkglass.server.inspector PURPOSE PATH CPU_SECONDS BYTES`.

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

from milkglass.errors import BadUpload

ANSWER = 64 << 10  # bytes of the one line
IDS = 6 << 30  # bytes of all ids of a file, as `ids` writes them
MAX_HEADER = 25_000_000  # bytes of a safetensors header, as in tensorfile.py
MAX_TENSORS = 200_000  # entries of a safetensors header
BROKEN = BadUpload("the header of the file is not sane", "save the weights with safetensors")


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
            _bound_header(path)
            return {"found": None}
        return {"found": _rows(path)}
    except BadUpload as error:
        return {"refused": [error.message, error.hint]}
    except MemoryError:
        return {"memory": True}


def _rows(path: Path) -> dict[str, Any]:
    from milkglass.server import parquet

    return parquet.check(path)


def _bound_header(path: Path) -> None:
    """Bound what the server is going to parse. Every other rule about weights is tensorfile.read_header's."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise BROKEN
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        return  # read_header refuses it in its own words, and keeps nothing of it
    entries = header.values() if isinstance(header, dict) else ()
    if len(entries) > MAX_TENSORS or not all(_small(one) for one in entries):
        raise BROKEN


def _small(entry: Any) -> bool:
    """At most a few fields, each a word, a number or a short list of numbers."""
    fields = entry.values() if isinstance(entry, dict) else (entry,)
    return len(fields) <= 64 and all(not isinstance(one, dict) and _flat(one) for one in fields)


def _flat(field: Any) -> bool:
    return not isinstance(field, list) or (len(field) <= 64 and not any(isinstance(one, list | dict) for one in field))


def _ids(path: Path) -> None:
    """Lengths and ids of all rows to stdout, as two .npy arrays of int32."""
    import numpy as np

    from milkglass.server import parquet

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

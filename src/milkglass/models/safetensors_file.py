"""One safetensors file as bytes: stream a tensor out of it, write a new one in blocks of rows. Its header is read by
safetensors_header.py.

A tensor that does not change is never decoded, so no tensor has to fit in memory. Knows nothing of models.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from milkglass.errors import CorruptCheckpoint
from milkglass.models.safetensors_header import METADATA, PLAIN, TensorRef, has_notes, read_header
from milkglass.progress import Progress

DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK = 1 << 22  # bytes copied or hashed at a time

__all__ = [
    "CHUNK",
    "DTYPES",
    "RowBlocks",
    "TensorRef",
    "has_notes",
    "read_bytes",
    "read_header",
    "write_safetensors",
]


class RowBlocks(Protocol):
    """A tensor's replacement, same shape and dtype, given as blocks of its first dimension."""

    def rows(self, start: int, stop: int) -> torch.Tensor: ...


def read_bytes(ref: TensorRef) -> Iterator[bytes]:
    """The tensor's raw bytes, a chunk at a time."""
    with ref.file.open("rb") as file:
        file.seek(ref.start)
        left = ref.bytes
        while left:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise CorruptCheckpoint(f"{ref.file.name} became shorter while it was read", "is it being written?")
            left -= len(chunk)
            yield chunk


def write_safetensors(
    path: Path, refs: list[TensorRef], replaced: Mapping[str, RowBlocks], progress: Progress | None = None
) -> None:
    """Write `refs` to one file, those in `replaced` from their rows, the others byte for byte.

    The file appears under its name only when it is complete.
    """
    header: dict[str, Any] = {METADATA: PLAIN}
    at = 0
    for ref in refs:
        header[ref.name] = {"dtype": ref.dtype, "shape": list(ref.shape), "data_offsets": [at, at + ref.bytes]}
        at += ref.bytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for ref in refs:
            for chunk in _new_bytes(ref, replaced[ref.name]) if ref.name in replaced else read_bytes(ref):
                file.write(chunk)
                if progress:
                    progress(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _new_bytes(ref: TensorRef, source: RowBlocks) -> Iterator[bytes]:
    count = ref.shape[0]
    row_bytes = max(1, ref.bytes // max(1, count))
    step = max(1, CHUNK // row_bytes)
    for start in range(0, count, step):
        block = source.rows(start, min(count, start + step)).to(DTYPES[ref.dtype]).contiguous()
        yield block.view(torch.uint8).numpy().tobytes() if block.dim() else block.numpy().tobytes()

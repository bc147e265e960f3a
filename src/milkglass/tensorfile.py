"""One safetensors file as bytes: check its header, stream a tensor out of it, write a new one in blocks of rows.

A tensor that does not change is never decoded, so no tensor has to fit in memory. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from milkglass.errors import CorruptCheckpoint

DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WIDTH = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
         "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
CHUNK = 1 << 22  # bytes copied or hashed at a time
MAX_HEADER = 25_000_000  # bytes; a model of 100,000 tensors needs about 12 MB
PLAIN = {"format": "pt"}  # the only note that a file of ours carries
MAX_RANK, MAX_DIMENSION = 8, 1 << 40

Progress = Callable[[int], None]  # told how many bytes were just done


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor lies: `dtype` in safetensors' names, `start` and `stop` in bytes from the file's beginning."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class Rows(Protocol):
    """A tensor's replacement, same shape and dtype, given as blocks of its first dimension."""

    def rows(self, start: int, stop: int) -> torch.Tensor: ...


def read_header(path: Path) -> dict[str, TensorRef]:
    """The tensors of one safetensors file, every claim of the header checked against the file.

    Raises CorruptCheckpoint when it is cut off, overlaps, or is not a safetensors file at all.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise CorruptCheckpoint(f"{path.name} is not a safetensors file", "save the weights with safetensors")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"the header of {path.name} is not JSON", "save or fetch it again") from error
    if not isinstance(header, dict):
        raise CorruptCheckpoint(f"the header of {path.name} is not a table of tensors", "save or fetch it again")
    header.pop("__metadata__", None)
    found: dict[str, TensorRef] = {}
    for name, entry in header.items():
        found[name] = _tensor_ref(path, name, entry, 8 + length, size)
    _require_contiguous(path, list(found.values()), 8 + length, size)
    return found


def has_notes(path: Path) -> bool:
    """Whether a file, whose header `read_header` has accepted, carries notes of whoever wrote it."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header.get("__metadata__", PLAIN) != PLAIN


def _tensor_ref(path: Path, name: str, entry: Any, base: int, size: int) -> TensorRef:
    """Every number is bounded before it is used: products of absurd ones take minutes by themselves."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CorruptCheckpoint(f"{path.name} describes a tensor badly", "save or fetch it again")
    if dtype not in WIDTH:
        raise CorruptCheckpoint(f"{path.name} holds a dtype that is not known", f"known: {', '.join(WIDTH)}")
    if len(shape) > MAX_RANK or not all(type(n) is int and 0 <= n < MAX_DIMENSION for n in shape):
        raise CorruptCheckpoint(f"{path.name} holds a shape that is none", "save or fetch it again")
    if base + end > size:
        raise CorruptCheckpoint(f"{path.name} is cut off: it has {size} bytes and needs more", "fetch it again")
    if not 0 <= begin <= end or end - begin != math.prod(shape) * WIDTH[dtype]:
        raise CorruptCheckpoint(f"{path.name} gives a tensor a size that is not its shape's", "fetch it again")
    return TensorRef(name, path, dtype, tuple(shape), base + begin, base + end)


def _require_contiguous(path: Path, refs: list[TensorRef], at: int, size: int) -> None:
    for ref in sorted(refs, key=lambda r: (r.start, r.stop)):
        if ref.start != at:
            raise CorruptCheckpoint(f"{path.name} has overlapping tensors or holes", "fetch it again")
        at = ref.stop
    if at != size:
        raise CorruptCheckpoint(f"{path.name} has {size - at} bytes after its last tensor", "fetch it again")


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
    path: Path, refs: list[TensorRef], replaced: Mapping[str, Rows], progress: Progress | None = None
) -> None:
    """Write `refs` to one file, those in `replaced` from their rows, the others byte for byte.

    The file appears under its name only when it is complete.
    """
    header: dict[str, Any] = {"__metadata__": PLAIN}
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


def _new_bytes(ref: TensorRef, source: Rows) -> Iterator[bytes]:
    count = ref.shape[0]
    row_bytes = max(1, ref.bytes // max(1, count))
    step = max(1, CHUNK // row_bytes)
    for start in range(0, count, step):
        block = source.rows(start, min(count, start + step)).to(DTYPES[ref.dtype]).contiguous()
        yield block.view(torch.uint8).numpy().tobytes() if block.dim() else block.numpy().tobytes()

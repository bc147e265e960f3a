"""Reads and writes one safetensors file: streams or maps a tensor, and writes a new file in blocks of rows.

A tensor that does not change is never decoded, and one whose rows are needed is mapped, so no tensor must fit in
memory. safetensors_header.py reads the header.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from milkglass.errors import CorruptCheckpoint
from milkglass.models.safetensors_header import METADATA, PLAIN_NOTES, READABLE_DTYPES, TensorRef, packed_header
from milkglass.progress import Progress, no_progress

TORCH_DTYPES: dict[str, torch.dtype] = dict(
    zip(READABLE_DTYPES, (torch.float32, torch.float16, torch.bfloat16), strict=True)
)
CHUNK_BYTES = 1 << 22  # bytes copied or hashed at a time
SYNC_BYTES = 1 << 26  # bytes after which the file is synced, so that a killed run continues from there


class RowBlocks(Protocol):
    """Gives the replacement of a tensor, of the same shape and dtype, in blocks of its first dimension."""

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Returns rows `start` to `stop`, without the last."""


def read_bytes(ref: TensorRef, start: int = 0) -> Iterator[bytes]:
    """Yields the tensor's raw bytes in chunks, from its byte `start` on."""
    with ref.file.open("rb") as file:
        file.seek(ref.start + start)
        remaining = ref.bytes - start
        while remaining:
            chunk = file.read(min(CHUNK_BYTES, remaining))
            if not chunk:
                raise _shortened_error(ref)
            remaining -= len(chunk)
            yield chunk


def read_tensor(ref: TensorRef) -> torch.Tensor:
    """Returns a copy of a tensor whose type is in READABLE_DTYPES."""
    if not ref.bytes:
        return torch.empty(ref.shape, dtype=TORCH_DTYPES[ref.dtype])
    buffer = bytearray(ref.bytes)
    offset = 0
    for chunk in read_bytes(ref):
        buffer[offset : offset + len(chunk)] = chunk
        offset += len(chunk)
    return torch.frombuffer(buffer, dtype=TORCH_DTYPES[ref.dtype]).reshape(ref.shape)


def map_tensor(ref: TensorRef) -> torch.Tensor:
    """Maps a tensor, whose type is in READABLE_DTYPES: the system reads pages when they are used, and may drop them.

    It must not be written to: that ends the process, and so does cutting the file off. A tensor that does not begin at
    a multiple of its numbers' size, as in some writers' files, cannot be mapped and is copied.
    """
    dtype = TORCH_DTYPES[ref.dtype]
    if not ref.bytes or ref.start % dtype.itemsize:
        return read_tensor(ref)
    with ref.file.open("rb") as file:
        try:
            pages = mmap.mmap(file.fileno(), ref.stop, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise _shortened_error(ref) from error
    if hasattr(pages, "madvise"):  # rows are mixed in a random order, and a disk reads best from start to end
        first = ref.start - ref.start % mmap.PAGESIZE
        pages.madvise(mmap.MADV_WILLNEED, first, ref.stop - first)
    with warnings.catch_warnings():  # torch has no tensors that cannot be written to, and says so
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        flat = torch.frombuffer(pages, dtype=dtype, count=ref.bytes // dtype.itemsize, offset=ref.start)
    return flat.reshape(ref.shape)


def _shortened_error(ref: TensorRef) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{ref.file.name} became shorter while it was read", "is it being written?")


def write_safetensors(
    path: Path,
    refs: list[TensorRef],
    replacements: Mapping[str, RowBlocks],
    progress: Progress = no_progress,
    bytes_on_disk: int = 0,
    on_synced: Callable[[int], None] | None = None,
) -> None:
    """Writes tensors to one file: those in `replacements` from their rows, the others byte for byte.

    The file appears under its name when it is complete.

    Args:
        path: the file.
        refs: the tensors, in the order in which they are written.
        replacements: the new rows of some of them, by name.
        progress: receives the bytes of tensors that were written.
        bytes_on_disk: how many bytes of the file an equal run that was killed has left beside it, as `on_synced`
            received them.
        on_synced: receives now and then how many bytes of the file are on the disk.
    """
    header = _file_header(refs)
    partial = path.with_name(path.name + ".tmp")
    with _continue_file(partial, header, bytes_on_disk) as file:
        written_bytes = file.tell() - len(header)
        offset, synced_bytes = 0, file.tell()
        if written_bytes:
            progress(written_bytes)
        for ref in refs:
            skipped_bytes = min(max(0, written_bytes - offset), ref.bytes)
            offset += ref.bytes
            for chunk in (
                _new_bytes(ref, replacements[ref.name], skipped_bytes)
                if ref.name in replacements
                else read_bytes(ref, skipped_bytes)
            ):
                file.write(chunk)
                progress(len(chunk))
                if on_synced and file.tell() >= synced_bytes + SYNC_BYTES:
                    _sync(file)
                    synced_bytes = file.tell()
                    on_synced(synced_bytes)
        _sync(file)
    partial.replace(path)


# --- inside -----------------------------------------------------------------------------------------------------------
def _file_header(refs: list[TensorRef]) -> bytes:
    """Returns the beginning of a file with these tensors, in this order."""
    header: dict[str, Any] = {METADATA: PLAIN_NOTES}
    offset = 0
    for ref in refs:
        header[ref.name] = {"dtype": ref.dtype, "shape": list(ref.shape), "data_offsets": [offset, offset + ref.bytes]}
        offset += ref.bytes
    return packed_header(header)


@contextmanager
def _continue_file(path: Path, header: bytes, bytes_on_disk: int) -> Iterator[IO[bytes]]:
    """Yields a file, open at the place to continue. One that is shorter or has another header is begun again."""
    if bytes_on_disk >= len(header) and path.is_file() and path.stat().st_size >= bytes_on_disk:
        with path.open("r+b") as file:
            if file.read(len(header)) == header:
                file.truncate(bytes_on_disk)
                file.seek(bytes_on_disk)
                yield file
                return
    with path.open("wb") as file:
        file.write(header)
        yield file


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _new_bytes(ref: TensorRef, source: RowBlocks, skipped_bytes: int) -> Iterator[bytes]:
    """Yields the bytes of a replaced tensor after the first `skipped_bytes`, which are whole blocks."""
    row_count = ref.shape[0]
    row_bytes = max(1, ref.bytes // max(1, row_count))
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(skipped_bytes // row_bytes, row_count, step):
        block = source.block(start, min(row_count, start + step)).to(TORCH_DTYPES[ref.dtype]).contiguous()
        yield block.view(torch.uint8).numpy().tobytes() if block.dim() else block.numpy().tobytes()

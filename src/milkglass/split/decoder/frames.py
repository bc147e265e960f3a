"""What crosses, as bytes: a head of nine bytes and one safetensors file, whose every claim is checked.

    kind    u8    1: vectors, from the client; 2: ids, from the server
    number  u32   little-endian: frames of each side are counted from 0
    length  u32   bytes of the file that follows
    file          vectors: "x" bf16, fp16 or fp32 (t, d)
                  ids: "ids" int64 (2, rows): the ids, and an index of `REASONS`, the same for all

No pickle. How many tokens a prompt has is not hidden.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from milkglass.errors import BadUpload, MilkglassError, RemoteError

HEAD = struct.Struct("<BII")
VECTORS, IDS = 1, 2
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
REASONS = (None, "stop", "length")
OVERHEAD = 200  # bytes of a frame besides its numbers, at most
PROTOCOL = "speak version 1 of the protocol (docs/formats.md)"


@dataclass(frozen=True)
class IdsFrame:
    """What the server says after a frame of vectors.

    Attributes:
        number: of this frame.
        ids: the next id; of a beam search the next one of each beam, and in the last frame the whole answer.
        reason: why the answer ended, "stop" or "length"; None while it goes on.
    """

    number: int
    ids: tuple[int, ...]
    reason: str | None

    @property
    def ended(self) -> bool:
        return self.reason is not None


def encode_vectors(number: int, vectors: torch.Tensor) -> bytes:
    """vectors: (t, d) of a type of DTYPES."""
    return _packed(VECTORS, number, {"x": vectors.contiguous()})


def decode_vectors(frame: bytes, width: int, dtype: str, most: int) -> tuple[int, torch.Tensor]:
    """The frame's number and its vectors (t, width), 1 <= t <= most. Raises BadUpload."""
    number, parts = _unpacked(frame, VECTORS, BadUpload, most * width * DTYPES[dtype].itemsize + OVERHEAD)
    vectors = parts.get("x")
    if len(parts) != 1 or vectors is None or vectors.dtype != DTYPES[dtype] or vectors.dim() != 2:
        raise BadUpload(f"the frame does not hold one table of {dtype}", "send vectors of the type that was agreed on")
    if vectors.shape[1] != width or not 1 <= len(vectors) <= most:
        raise BadUpload(
            f"the frame holds {len(vectors)} vectors of width {vectors.shape[1]}", f"1 to {most} of width {width} fit"
        )
    if not torch.isfinite(vectors).all():
        raise BadUpload("the frame holds a number that is not finite", "send rows of the model's own table")
    return number, vectors


def encode_ids(frame: IdsFrame) -> bytes:
    ends = [REASONS.index(frame.reason)] * len(frame.ids)
    return _packed(IDS, frame.number, {"ids": torch.tensor([frame.ids, ends])})


def decode_ids(frame: bytes, vocabulary: int, beams: int = 1, longest: int = 1) -> IdsFrame:
    """longest: ids of the last frame, at most. Raises RemoteError: the server is not trusted."""
    most = max(beams, longest)
    number, parts = _unpacked(frame, IDS, RemoteError, 16 * most + OVERHEAD)
    table = parts.get("ids")
    if len(parts) != 1 or table is None or table.dtype != torch.int64 or table.dim() != 2 or len(table) != 2:
        raise RemoteError("the server's frame does not hold ids", "is `milkglass split serve` of a decoder there?")
    ids, ends = (tuple(row) for row in table.tolist())
    if len({*ends}) != 1 or not 0 <= ends[0] < len(REASONS) or not all(0 <= one < vocabulary for one in ids):
        raise RemoteError("the server's frame names an id or an end that does not exist", "don't trust this server")
    reason = REASONS[ends[0]]
    if len(ids) > longest if reason else len(ids) != beams:
        due = f"at most {longest}" if reason else str(beams)
        raise RemoteError(f"the server's frame holds {len(ids)} ids, {due} are due", "don't trust this server")
    return IdsFrame(number, ids, reason)


def _packed(kind: int, number: int, parts: dict[str, torch.Tensor]) -> bytes:
    file = save(parts)
    return HEAD.pack(kind, number, len(file)) + file


def _unpacked(frame: bytes, kind: int, error: type[MilkglassError], most: int) -> tuple[int, dict[str, torch.Tensor]]:
    """The frame's number and tensors. Nothing is allocated by a length that a frame states."""
    if not HEAD.size < len(frame) <= HEAD.size + most:
        raise error(f"a frame of {len(frame)} bytes, at most {HEAD.size + most} are allowed", "send fewer vectors")
    kind_there, number, length = HEAD.unpack_from(frame)
    if kind_there != kind or length != len(frame) - HEAD.size:
        raise error(
            f"a frame of kind {kind_there} and {length} bytes, where kind {kind} and {len(frame) - HEAD.size} are due",
            PROTOCOL,
        )
    try:
        return number, load(frame[HEAD.size :])
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as fault:
        raise error("the frame is not a safetensors file", PROTOCOL) from fault

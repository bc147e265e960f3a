"""Encodes and decodes the messages of a decoder's stream after the first one.

Each is one safetensors file, of which everything is checked:

    from the client     "x", bf16, fp16 or fp32 (t, d): vectors of the prompt, then of one token a message
    from the server     "ids", int64 (2,): the next id, and the index in `END_REASONS` of why the answer ends with it

The sides alternate, vectors first. There is no pickle. The number of tokens of a prompt is not hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from milkglass.errors import BadUpload, MilkglassError, RemoteError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
END_REASONS = (None, "stop", "length")  # why an answer ends with a token, or None if it goes on
TOKEN_BYTES = 16  # the numbers of the server's message, two of int64
MAX_OVERHEAD_BYTES = 200  # the most bytes of a message besides its numbers
PROTOCOL_HINT = "client and server must be of one version (docs/formats.md)"


@dataclass(frozen=True)
class NextToken:
    """Holds the server's reply to vectors.

    Attributes:
        id: the id of the next token.
        reason: why the answer ends with this token, "stop" or "length". None: the answer goes on.
    """

    id: int
    reason: str | None


def encode_vectors(vectors: torch.Tensor) -> bytes:
    """Returns the client's message of vectors (t, d), whose dtype is in DTYPES."""
    return save({"x": vectors.contiguous()})


def decode_vectors(message: bytes, width: int, dtype: str, max_rows: int) -> torch.Tensor:
    """Reads a client's vectors (t, width) of type `dtype`, 1 <= t <= `max_rows`. Raises BadUpload for anything else."""
    vectors = _only_tensor(message, "x", BadUpload, max_rows * width * DTYPES[dtype].itemsize)
    if vectors.dtype != DTYPES[dtype] or vectors.dim() != 2:
        raise BadUpload(
            f"the message does not hold one table of {dtype}", "send vectors of the type that was agreed on"
        )
    if vectors.shape[1] != width or not 1 <= len(vectors) <= max_rows:
        raise BadUpload(
            f"the message holds {len(vectors)} vectors of width {vectors.shape[1]}",
            f"1 to {max_rows} of width {width} fit",
        )
    if not torch.isfinite(vectors).all():
        raise BadUpload("the message holds a number that is not finite", "send rows of the model's own table")
    return vectors


def encode_token(token: NextToken) -> bytes:
    """Returns the server's message of a token."""
    return save({"ids": torch.tensor([token.id, END_REASONS.index(token.reason)])})


def decode_token(message: bytes, vocabulary: int) -> NextToken:
    """Reads a server's message, which is not trusted. Raises RemoteError unless it has an id below `vocabulary`."""
    numbers = _only_tensor(message, "ids", RemoteError, TOKEN_BYTES)
    if numbers.dtype != torch.int64 or numbers.shape != (2,):
        raise RemoteError("the server's message does not hold an id", "is `milkglass split serve` of a decoder there?")
    token_id, reason_index = numbers.tolist()
    if not 0 <= token_id < vocabulary or not 0 <= reason_index < len(END_REASONS):
        raise RemoteError("the server's message names an id or an end that does not exist", "don't trust this server")
    return NextToken(token_id, END_REASONS[reason_index])


def _only_tensor(message: bytes, name: str, error: type[MilkglassError], max_bytes: int) -> torch.Tensor:
    """Returns the only tensor of a message, which must have this name and at most `max_bytes` bytes.

    Raises `error` otherwise. No memory is allocated by a length that the message states.
    """
    if len(message) > max_bytes + MAX_OVERHEAD_BYTES:
        raise error(
            f"a message of {len(message)} bytes, at most {max_bytes + MAX_OVERHEAD_BYTES} are allowed",
            "send fewer vectors",
        )
    try:
        tensors = load(message)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as fault:
        raise error("the message is not a safetensors file", PROTOCOL_HINT) from fault
    if tensors.keys() != {name}:
        raise error(f"the message does not hold one tensor {name}", PROTOCOL_HINT)
    return tensors[name]

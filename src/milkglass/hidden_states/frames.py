"""Writes hidden states as bytes and reads them: one safetensors file in memory, of which everything is checked.

    hidden   fp32 (rows, d)     one row a token, or one a text if they are pooled
    lengths  int64 (texts,)     tokens of each text; 1 each if they are pooled
    about    int64 (2,)         layer, and 1 if the rows are pooled
    mixed    int64 (texts,)     rows of each text, only if they are mixtures

No pickle. Lengths are not hidden.
"""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from milkglass.errors import BadUpload
from milkglass.threat.observations import Activations

MAX_FRAME_BYTES = 1 << 30
MAX_LAYER = 1024
HINT = "send what the client half gives"
REQUIRED_TENSORS = {"hidden": (torch.float32, 2), "lengths": (torch.int64, 1), "about": (torch.int64, 1)}
OPTIONAL_TENSORS = {"mixed": (torch.int64, 1)}


def encode(sent: Activations) -> bytes:
    """Returns the frame. Raises BadUpload if it has more than MAX_FRAME_BYTES, which the other side would refuse."""
    about, lengths = torch.tensor([sent.layer, int(sent.pooled)]), torch.from_numpy(sent.lengths.copy())
    tensors = {"hidden": sent.hidden.detach().float().contiguous(), "lengths": lengths, "about": about}
    if sent.mixed_row_counts is not None:
        tensors["mixed"] = torch.from_numpy(sent.mixed_row_counts.copy())
    frame = save(tensors)
    _require_small(frame)
    return frame


def _require_small(frame: bytes) -> None:
    """Raises BadUpload for a frame of more than MAX_FRAME_BYTES."""
    if len(frame) > MAX_FRAME_BYTES:
        raise BadUpload(
            f"a frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES} are allowed", "send fewer texts at a time"
        )


def decode(frame: bytes) -> Activations:
    """Returns the states of a frame. Raises BadUpload for any other bytes, and for numbers that are not finite."""
    _require_small(frame)
    try:
        tensors = load(frame)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadUpload("the frame is not a safetensors file", HINT) from error
    if not REQUIRED_TENSORS.keys() <= tensors.keys() <= REQUIRED_TENSORS.keys() | OPTIONAL_TENSORS.keys():
        raise BadUpload(f"the frame holds {len(tensors)} tensors, hidden, lengths and about are needed", HINT)
    for name, (dtype, rank) in (REQUIRED_TENSORS | OPTIONAL_TENSORS).items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.dim() != rank:
            raise BadUpload(f"{name} is {tensor.dtype} of rank {tensor.dim()}, {dtype}, {rank} needed", HINT)
    hidden, lengths, about = (tensors[name] for name in REQUIRED_TENSORS)
    if len(about) != 2 or not 0 <= int(about[0]) <= MAX_LAYER or int(about[1]) not in (0, 1):
        raise BadUpload("the frame's layer is impossible", HINT)
    rows, layer, pooled, mixed = len(hidden), int(about[0]), bool(about[1]), tensors.get("mixed")
    if mixed is not None and (pooled or mixed.shape != lengths.shape or bool((mixed < lengths.clamp_min(1)).any())):
        raise BadUpload(f"the mixed rows of {len(mixed)} texts are fewer than their tokens, or pooled", HINT)
    row_counts = lengths if mixed is None else mixed
    if not _counts_add_up(row_counts, rows, 1 if pooled else rows) or bool((lengths < 1).any()):
        raise BadUpload(f"the lengths of {len(lengths)} texts do not add up to the {rows} rows", HINT)
    if not torch.isfinite(hidden).all():
        raise BadUpload("the frame holds a number that is not finite", HINT)
    return Activations(hidden, lengths.numpy(), layer, pooled, None if mixed is None else mixed.numpy())


def _counts_add_up(counts: torch.Tensor, row_count: int, max_count: int) -> bool:
    """Returns whether each count is from 1 to `max_count` and they sum to the rows. In this order no sum overflows."""
    are_in_range = not len(counts) or (int(counts.min()) >= 1 and int(counts.max()) <= max_count)
    return are_in_range and int(counts.sum()) == row_count

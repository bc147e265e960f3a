"""Hidden states as bytes: one safetensors file in memory, whose every claim is checked.

    hidden   fp32 (rows, d)     one row a token, or one a text where they are pooled
    lengths  int64 (texts,)     tokens of each text; 1 each where they are pooled
    about    int64 (2,)         layer, and 1 where the rows are pooled

No pickle. Lengths are not hidden.
"""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from milkglass.errors import BadUpload
from milkglass.threat.observations import Activations

MAX_BYTES = 1 << 30
MAX_LAYER = 1024
HINT = "send what the client half gives"
KINDS = {"hidden": (torch.float32, 2), "lengths": (torch.int64, 1), "about": (torch.int64, 1)}


def encode(sent: Activations) -> bytes:
    """The frame. Raises BadUpload where it would be refused on the other side."""
    about, lengths = torch.tensor([sent.layer, int(sent.pooled)]), torch.from_numpy(sent.lengths.copy())
    frame = save({"hidden": sent.hidden.detach().float().contiguous(), "lengths": lengths, "about": about})
    _require_small(frame)
    return frame


def _require_small(frame: bytes) -> None:
    if len(frame) > MAX_BYTES:
        raise BadUpload(f"a frame of {len(frame)} bytes, at most {MAX_BYTES} are allowed", "send fewer texts at a time")


def decode(frame: bytes) -> Activations:
    """Raises BadUpload for anything that `encode` does not make."""
    _require_small(frame)
    try:
        parts = load(frame)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadUpload("the frame is not a safetensors file", HINT) from error
    if parts.keys() != KINDS.keys():
        raise BadUpload(f"the frame holds {len(parts)} tensors, hidden, lengths and about are needed", HINT)
    for name, (dtype, rank) in KINDS.items():
        if parts[name].dtype != dtype or parts[name].dim() != rank:
            raise BadUpload(f"{name} is {parts[name].dtype} of rank {parts[name].dim()}, {dtype}, {rank} needed", HINT)
    hidden, lengths, about = (parts[name] for name in KINDS)
    if len(about) != 2 or not 0 <= int(about[0]) <= MAX_LAYER or int(about[1]) not in (0, 1):
        raise BadUpload("the frame's layer is impossible", HINT)
    rows, pooled = len(hidden), bool(about[1])
    fits = not len(lengths) or (int(lengths.min()) >= 1 and int(lengths.max()) <= (1 if pooled else rows))
    if not fits or int(lengths.sum()) != rows:
        raise BadUpload(f"the lengths of {len(lengths)} texts do not add up to the {rows} rows", HINT)
    if not torch.isfinite(hidden).all():
        raise BadUpload("the frame holds a number that is not finite", HINT)
    return Activations(hidden, lengths.numpy(), int(about[0]), pooled)

"""Streams that depend on the data which their noise covers, so that no noise is ever used for two inputs.

A stream that follows from a secret and a question alone gives the same noise for two inputs: their difference is then
released without noise. Even one input is two where a gradient is taken with other threads, processors or libraries: its
last bits differ, and they name the tokens that were read. So the key of noise is an HMAC over the very numbers that the
noise is added to.

What this module does not know: what is added, and where it goes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from milkglass.noise.stream import Stream


def digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """SHA-256 over names, shapes, types and all numbers."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        one = tensors[name].detach().cpu().contiguous()
        whole.update(json.dumps([name, [*one.shape], str(one.dtype)]).encode())
        whole.update(one.reshape(-1).view(torch.uint8).numpy())
    return whole.digest()


def bound(stream: Stream, tensors: Mapping[str, torch.Tensor]) -> Stream:
    """A stream of its own for these numbers: the same numbers give the same stream, any other number another one."""
    return stream.keyed(digest(tensors))

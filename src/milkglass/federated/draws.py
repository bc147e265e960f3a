"""What a site draws in a round, from its secret: an order of its rows, and what its shield draws from.

The order follows from the secret and the round. The noise also from all else that decides what is sent without it: the
weights that came, the sizes of the batches, the rate where there are several, and the shield. So whoever asks for the
same gets the same, noise and all; and a server that asks for something else, in this run or in another, gets other
noise, or it could subtract one answer from the other. It may ask for something hardly else as often as it likes, and
average: nobody counts here. What a shield promises is of one answer a round.

What this module does not know: rows, models.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence

import numpy as np
import torch

from milkglass.federated.rounds import Tensors
from milkglass.noise.stream import Stream
from milkglass.sequences import Ids


def order_of(secret: bytes, round: int, count: int) -> Ids:
    """(count,) the rows' numbers, in a round's order. Which rows are in a batch is not secret, and recorded runs are
    audited by this order: it stays NumPy's."""
    number = int.from_bytes(_digest(secret, b"order", round, b""), "big")
    return np.random.default_rng(number).permutation(count)


def noise_of(secret: bytes, round: int, weights: Tensors, batches: Sequence[int], lr: float, shield: str) -> Stream:
    """batches: the texts of each. shield: all that decides it, told."""
    told = json.dumps([[*batches], lr if len(batches) > 1 else None, shield]).encode()
    return Stream(_digest(secret, b"noise", round, told + digest(weights)))


def digest(weights: Tensors) -> bytes:
    """SHA-256 over names, shapes, types and numbers."""
    whole = hashlib.sha256()
    for name in sorted(weights):
        one = weights[name].detach().contiguous()
        whole.update(json.dumps([name, [*one.shape], str(one.dtype)]).encode())
        whole.update(one.reshape(-1).view(torch.uint8).numpy())
    return whole.digest()


def _digest(secret: bytes, label: bytes, round: int, told: bytes) -> bytes:
    whole = hmac.new(secret, b"milkglass federated " + label + b"\0" + round.to_bytes(8, "little") + told, "sha256")
    return whole.digest()

"""What a site draws in a round from its secret: the order of its rows, and the noise of its shield.

The order follows from the secret and the round. The noise also follows from the question (the weights that came, the
sizes of the batches, the rate if there are several batches, the shield) and from the gradient itself (noise/stream.py).
So a server that asks for anything else, or asks again after the site's numbers changed in their last bits, gets other
noise: with the same noise it could subtract one answer from the other. It may ask as often as it likes and average,
since no site counts its answers: what a shield guarantees is of one answer a round.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence

import numpy as np

from milkglass.federated.rounds import Tensors
from milkglass.noise.stream import Stream, tensors_digest
from milkglass.sequences import Ids


def order_of(secret: bytes, round: int, count: int) -> Ids:
    """Returns (count,) the rows' numbers in a round's order.

    Which rows are in a batch is not secret, and audits of recorded runs repeat this order, so it stays NumPy's.
    """
    number = int.from_bytes(_digest(secret, b"order", round, b""), "big")
    return np.random.default_rng(number).permutation(count)


def noise_of(secret: bytes, round: int, weights: Tensors, batches: Sequence[int], lr: float, shield: str) -> Stream:
    """Returns the stream of a round's noise, from the secret and the question: weights, batches, rate and shield."""
    question = json.dumps([[*batches], lr if len(batches) > 1 else None, shield]).encode()
    return Stream(_digest(secret, b"noise", round, question + tensors_digest(weights)))


def _digest(secret: bytes, label: bytes, round: int, question: bytes) -> bytes:
    message = b"milkglass federated " + label + b"\0" + round.to_bytes(8, "little") + question
    return hmac.digest(secret, message, "sha256")

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


def row_order(secret: bytes, round: int, row_count: int) -> Ids:
    """Returns (row_count,) the rows' numbers in a round's order.

    Which rows are in a batch is not secret, and audits of recorded runs repeat this order, so it stays NumPy's.
    """
    number = int.from_bytes(_digest(secret, b"order", round, b""), "big")
    return np.random.default_rng(number).permutation(row_count)


def noise_stream(
    secret: bytes, round: int, weights: Tensors, batch_sizes: Sequence[int], learning_rate: float, shield: str
) -> Stream:
    """Returns the stream of a round's noise, from the secret and the question.

    Args:
        secret: the site's secret.
        round: the round, from 0.
        weights: the weights that the server sent.
        batch_sizes: the texts of each batch.
        learning_rate: counts only if there are several batches.
        shield: the name and the parameters of the gradient defence.
    """
    question = json.dumps([[*batch_sizes], learning_rate if len(batch_sizes) > 1 else None, shield]).encode()
    return Stream(_digest(secret, b"noise", round, question + tensors_digest(weights)))


def _digest(secret: bytes, label: bytes, round: int, question: bytes) -> bytes:
    message = b"milkglass federated " + label + b"\0" + round.to_bytes(8, "little") + question
    return hmac.digest(secret, message, "sha256")

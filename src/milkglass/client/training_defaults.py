"""The hyperparameters of a classifier or regression that the user does not set, by the number of rows.

The papers' rate of 2e-5 is for models as they were published. A table whose rows were mixed must be learnt anew, which
takes 1e-4, for three epochs or for more if three have few steps. docs/log.md, 2026-11-24, has the grid
(`recipes/training_defaults.toml`). Language models are trained as in the ObfusLM paper (server/spec.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.key.key import permutation
from milkglass.noise.stream import subkey
from milkglass.server.spec import Hyperparameters

LEARNING_RATE, WARMUP_RATIO = 1e-4, 0.06
STEPS, LEAST_EPOCHS, MOST_EPOCHS = 100, 3, 10  # steps to train for, within these numbers of epochs
PATIENCE = 3  # epochs without improvement before training stops
SHARE, LEAST_HELD_OUT, MOST_HELD_OUT = 0.1, 50, 1000  # share and numbers of rows to compare epochs by
BATCH_SIZE = 32


def training_defaults(task: str, rows: int, given: Mapping[str, Any], evaluated: bool) -> dict[str, Any]:
    """Returns the hyperparameters that were given, with defaults for those that are None or missing.

    Args:
        task: a `task` of `server.spec.Hyperparameters`. "causal-lm" gets no defaults.
        rows: the number of training rows.
        evaluated: whether there are rows by which epochs are compared.
    """
    requested = {name: value for name, value in given.items() if value is not None}
    if task == "causal-lm":
        return requested
    batch = requested.get("batch_size") or BATCH_SIZE
    epochs = min(MOST_EPOCHS, max(LEAST_EPOCHS, math.ceil(STEPS * batch / max(1, rows))))
    ours: dict[str, Any] = {"learning_rate": LEARNING_RATE, "warmup_ratio": WARMUP_RATIO, "n_epochs": float(epochs)}
    if evaluated and "max_steps" not in requested:
        ours["early_stopping"] = PATIENCE
    return {**ours, **requested}


def steps_of(rows: int, settings: Hyperparameters) -> int:
    """Returns the number of steps of a training without early stopping. As in the Trainer, each epoch is rounded up."""
    return settings.max_steps or math.ceil(settings.n_epochs * math.ceil(rows / settings.batch_size))


def held_out(rows: int) -> int:
    """Returns how many of so many rows are held out to compare epochs by. 0: there are too few."""
    count = min(MOST_HELD_OUT, round(SHARE * rows))
    return count if count >= LEAST_HELD_OUT else 0


def held_out_rows(root: bytes, digest: str, rows: int) -> NDArray[np.bool_]:
    """Returns (rows,) whether each row is held out.

    The choice depends only on the key and the number of rows. An interrupted upload can therefore go on, and a key
    whose symbols are found from labelled rows does not see the held-out ones (client/obfuscate/symbols.py).

    Args:
        root: the key's secret.
        digest: the digest of the key's model.
    """
    order = permutation(subkey(root, digest, f"held out/{rows}"), rows)
    chosen = np.zeros(rows, np.bool_)
    chosen[order[: held_out(rows)]] = True
    return chosen

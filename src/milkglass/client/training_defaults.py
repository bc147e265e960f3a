"""What a classifier is trained with where the user gives nothing: by the number of rows, and not by the papers.

The papers' rate of 2e-5 is for models as they were published. A table whose rows were mixed has to be learnt anew, at
1e-4: for three epochs, or for more where three have few steps, with all rows. docs/log.md, 2026-11-24, has the grid
(`recipes/training_defaults.toml`).

Out of scope: language models, which are trained as the ObfusLM paper trains them (server/spec.py).
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
STEPS, LEAST_EPOCHS, MOST_EPOCHS = 100, 3, 10  # steps to train for, where that is between so many epochs
PATIENCE = 3  # epochs that may be no better than the best before
SHARE, LEAST_HELD_OUT, MOST_HELD_OUT = 0.1, 50, 1000  # of the rows, to compare epochs by
BATCH_SIZE = 32


def training_defaults(task: str, rows: int, given: Mapping[str, Any], evaluated: bool) -> dict[str, Any]:
    """The hyperparameters that were given, with ours in the place of those that are None or missing.

    Args:
        task: as `server.spec.Hyperparameters` has it.
        rows: of the training data.
        evaluated: whether there are rows to compare epochs by.
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
    """How many steps a training takes that no epoch ends early: as the Trainer counts, which rounds each epoch up."""
    return settings.max_steps or math.ceil(settings.n_epochs * math.ceil(rows / settings.batch_size))


def held_out(rows: int) -> int:
    """How many rows to compare epochs by, of a file of so many; 0: there are too few."""
    count = min(MOST_HELD_OUT, round(SHARE * rows))
    return count if count >= LEAST_HELD_OUT else 0


def held_out_rows(root: bytes, digest: str, rows: int) -> NDArray[np.bool_]:
    """(rows,) which ones: the same for the same key and number, so that an upload that was interrupted goes on, and
    that a key whose symbols are found from labelled rows does not see them (client/obfuscate/symbols.py).

    Args:
        root: the key's secret.
        digest: of the key's model.
    """
    order = permutation(subkey(root, digest, f"held out/{rows}"), rows)
    chosen = np.zeros(rows, np.bool_)
    chosen[order[: held_out(rows)]] = True
    return chosen

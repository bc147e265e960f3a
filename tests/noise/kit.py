"""The literal oracle of rounded noise, and keys."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import noise as literal  # noqa: E402, F401

KEY = b"\7" * 32
FINE = 2.0**24 * 1.3


def without_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks PyTorch, NumPy or Python for a random number fails."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("drawn outside milkglass.noise")

    for name in ("Generator", "manual_seed", "rand", "randn", "randint", "randperm", "normal", "bernoulli"):
        monkeypatch.setattr(torch, name, refuse)
    for name in ("default_rng", "RandomState", "rand", "randn", "normal", "laplace", "uniform", "seed"):
        monkeypatch.setattr(np.random, name, refuse)
    for name in ("random", "gauss", "seed", "Random"):
        monkeypatch.setattr(random, name, refuse)

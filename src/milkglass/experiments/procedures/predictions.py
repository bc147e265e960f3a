"""A trained classifier's own answers on the rows that were held out, and GLUE's measures of them.

Results keep the answers: whether two cells of equal accuracy answered alike is then to be seen.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification

from milkglass.experiments.runs import Variant
from milkglass.metrics.glue import MEASURES
from milkglass.models.load_lock import ONE_LOAD
from milkglass.server.jobs.data import Collate, TrainingDataset

BATCH = 64


def packed(answers: NDArray[Any]) -> str:
    """(u,) class numbers or scores as a short text: their type, a colon, and base64 of zlib of their bytes."""
    kind = "<f4" if answers.dtype.kind == "f" else "<u1" if not len(answers) or answers.max() < 256 else "<u2"
    return f"{kind}:{base64.b64encode(zlib.compress(answers.astype(kind).tobytes(), 9)).decode()}"


def unpacked(text: str) -> NDArray[Any]:
    kind, _, body = text.partition(":")
    return np.frombuffer(zlib.decompress(base64.b64decode(body)), kind)


@torch.inference_mode()
def predicted(model: Path, held_out: Path, max_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(u,) the class that the model names for each row, and (u,) the row's own."""
    with ONE_LOAD:
        net: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    rows = TrainingDataset(held_out, "classification", max_length)
    collate = Collate(net.config.pad_token_id or 0)
    guess, truth = [], []
    for start in range(0, len(rows), BATCH):
        batch = collate([rows[i] for i in range(start, min(start + BATCH, len(rows)))])
        truth.append(batch.pop("labels").numpy())
        guess.append(net(**batch).logits.argmax(-1).numpy())
    return np.concatenate(guess), np.concatenate(truth)


def measure(
    variants: Sequence[Variant], metrics: Sequence[str], max_length: int, seed: int, kept: dict[str, str]
) -> dict[str, float]:
    """In percent, "f1, VARIANT" for each metric. kept: receives each variant's answers."""
    result: dict[str, float] = {}
    for variant in variants:
        guess, truth = predicted(variant.job / "result", variant.job / "validation.parquet", max_length)
        kept[variant.name] = packed(guess)
        for name in metrics:
            value = MEASURES[name](guess, truth, np.random.default_rng(seed)).value
            result[f"{name}, {variant.name}"] = 100 * value
    return result

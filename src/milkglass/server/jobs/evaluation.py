"""What a trained model's answers to held-out rows are worth, in the numbers that a job reports.

Classification: accuracy, and how often each class was taken for each (up to MOST classes). Regression: Pearson's
correlation. Language models have the loss alone. The worker knows classes by number; what they are called it never
learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from transformers import EvalPrediction

MOST = 50  # classes of which the counts are reported
NAMES = {"eval_loss": "eval_loss", "eval_accuracy": "accuracy", "eval_pearson": "pearson"}
BEST = {"classification": "accuracy", "regression": "pearson", "causal-lm": "loss"}  # what decides the best epoch


def classified(prediction: EvalPrediction) -> dict[str, Any]:
    """accuracy, and confusion: a row for each class with how often its texts were taken for each."""
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids, np.int64)
    guess, classes = logits.argmax(-1), logits.shape[-1]
    result: dict[str, Any] = {"accuracy": float((guess == labels).mean())}
    if classes <= MOST:
        counts = np.bincount(labels * classes + guess, minlength=classes * classes)
        result["confusion"] = counts.reshape(classes, classes).tolist()
    return result


def pearson(prediction: EvalPrediction) -> dict[str, float]:
    """Of the one number that the model says of each row; nan where either side is constant, which is not reported."""
    words = np.asarray(prediction.predictions, np.float64).reshape(-1)
    expected = np.asarray(prediction.label_ids, np.float64).reshape(-1)
    words, expected = words - words.mean(), expected - expected.mean()
    below = float(np.sqrt((words @ words) * (expected @ expected)))
    return {"pearson": float(words @ expected) / below if below > 0 else math.nan}


MEASURES: Mapping[str, Callable[[EvalPrediction], dict[str, Any]]] = {
    "classification": classified,
    "regression": pearson,
}


def numbers_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """What a status keeps of the trainer's metrics. A loss that is not finite (training diverged, or there was nothing
    to learn from) is left out."""
    return {NAMES[n]: float(value) for n, value in (metrics or {}).items() if n in NAMES and math.isfinite(value)}


def event_data(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same for an event, with the counts."""
    counts = (metrics or {}).get("eval_confusion")
    return {**numbers_of(metrics), **({} if counts is None else {"confusion": counts})}

"""One client's training on what it shares, and the value of the model after it.

`share_gradient` computes each step's gradient, so that a shield changes it as it changes what is sent. AdamW uses the
result. "f1" is that of class 1 for two classes, the mean over classes for more.

Section 5.1 stops when the validation loss has not fallen for five epochs, and names no weight decay, schedule or
dropout. Here: a fixed number of epochs, AdamW with PyTorch's decay of 0.01, a constant rate, and no dropout, since the
attacks of section 5.5 take a gradient without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from milkglass.errors import UsageError
from milkglass.experiments.procedures.private_rows import PrivateRows
from milkglass.experiments.runs import pack_answers
from milkglass.gradient_defences.defence import GradientDefence, share_gradient
from milkglass.metrics import glue
from milkglass.metrics.interval import Interval, with_half_widths
from milkglass.metrics.text import mean_loss, perplexity
from milkglass.noise.stream import Stream
from milkglass.progress import Log
from milkglass.sequences import Ids
from milkglass.threat.training_step import SharedStep, pad_texts

GRADED_AT_A_TIME = 32  # held-out texts that are graded at a time


@dataclass(frozen=True)
class LocalTraining:
    """Holds the settings of a client's training.

    Attributes:
        rows: how many rows are used, held-out ones included.
        held_out: how many of them are held out. None: a fifth.
        epochs: how many passes over the rows.
        batch: how many texts each step has.
        learning_rate: the constant rate of AdamW.
        longest: the most tokens of a text, special ones too.
        words: the most words of a text.
    """

    rows: int = 1000
    held_out: int | None = None
    epochs: int = 10
    batch: int = 32
    learning_rate: float = 1e-5
    longest: int = 128
    words: int = 1000

    def __post_init__(self) -> None:
        if self.held_out is not None and not 0 < self.held_out < self.rows:
            raise UsageError(f"{self.held_out} of {self.rows} rows are held out", "hold out 1 to all but one")

    @property
    def share(self) -> float:
        """Returns the share of the rows that are held out (section 5.1)."""
        return 0.2 if self.held_out is None else self.held_out / self.rows


def fit(
    step: SharedStep, rows: PrivateRows, shield: GradientDefence, training: LocalTraining, seed: int, pad_id: int,
    log: Log,
) -> None:  # fmt: skip
    """Trains the step's model in place. The order of the rows and a shield's noise follow from the seed.

    Args:
        step: the model, and how it computes a gradient.
        rows: the training rows.
        shield: changes each gradient before it is used.
        training: the settings.
        pad_id: the id with which texts are padded.
        log: receives a line for each epoch.
    """
    rng, stream = np.random.default_rng(seed), Stream.of_seed(seed)
    parameters = step.parameters
    optimizer = torch.optim.AdamW(parameters.values(), lr=training.learning_rate, fused=True)
    step_count = 0
    for epoch in range(training.epochs):
        order = rng.permutation(len(rows))
        for start in range(0, len(order), training.batch):
            ids, mask, targets = rows.select(order[start : start + training.batch]).batch(pad_id)
            shared = share_gradient(step, ids, mask, targets, shield, step_count, stream)
            optimizer.zero_grad(set_to_none=True)
            for name, gradient in shared.tensors.items():
                parameters[name].grad = gradient.contiguous()  # a fused step reads it in the order of its memory
            optimizer.step()
            step_count += 1
        log(f"epoch {epoch + 1} of {training.epochs}")


@dataclass(frozen=True)
class ModelQuality:
    """Holds a model's quality on held-out rows.

    Attributes:
        figures: the value of each measure and, under its name with " +-", half the width of its 95 % interval over
            rows.
        packed_rows: packed values by row, from which the figures follow: "answer", or "loss" (a sum) and "tokens".
    """

    figures: dict[str, float]
    packed_rows: dict[str, str]


@torch.no_grad()
def model_quality(step: SharedStep, rows: PrivateRows, pad_id: int, seed: int) -> ModelQuality:
    """Returns a model's "accuracy" and "f1", or its "loss" (nats, the mean over predicted tokens) and "perplexity".

    Args:
        step: the model.
        rows: the held-out rows.
        pad_id: the id with which texts are padded.
        seed: draws the samples from which intervals are computed.
    """
    if step.task == "next-token":
        return _prediction_quality(step, rows, seed)
    assert rows.labels is not None
    order = np.argsort(rows.ids.lengths, kind="stable")  # so that little is padding
    predicted = np.empty(len(rows), np.int64)
    for start in range(0, len(order), GRADED_AT_A_TIME):
        part = order[start : start + GRADED_AT_A_TIME]
        ids, mask, _ = rows.select(part).batch(pad_id)
        predicted[part] = step.logits(step.embed(ids), mask).argmax(-1).cpu().numpy()
    return ModelQuality(
        with_half_widths(_class_measures(predicted, rows.labels, seed), scale=1), {"answer": pack_answers(predicted)}
    )


def _prediction_quality(step: SharedStep, rows: PrivateRows, seed: int) -> ModelQuality:
    """Returns the quality of predictions, row by row, since an interval resamples rows."""
    losses, tokens = np.zeros(len(rows)), np.zeros(len(rows))
    for row, text_ids in enumerate(rows.ids):
        if len(text_ids) > 1:
            ids, mask = pad_texts([text_ids], 0)
            tokens[row] = len(text_ids) - 1
            losses[row] = float(step.loss(step.embed(ids), mask, ids)) * tokens[row]
    predictions = {"loss": pack_answers(losses), "tokens": pack_answers(tokens.astype(np.int64))}
    losses, tokens = losses[tokens > 0], tokens[tokens > 0]
    measures = {
        "loss": mean_loss(losses, tokens, np.random.default_rng(seed)),
        "perplexity": perplexity(losses, tokens, np.random.default_rng(seed)),
    }
    return ModelQuality(with_half_widths(measures, scale=1), predictions)


def constant_answer_figures(labels: Ids, seed: int) -> dict[str, float]:
    """Returns the best accuracy and the best F1 of predicting one class for every row."""
    constant_answers = [np.full(len(labels), label) for label in sorted({*labels.tolist()})]
    measures = [_class_measures(answer, labels, seed) for answer in constant_answers]
    best_measures = {
        name: max((by_name[name] for by_name in measures), key=lambda interval: interval.value)
        for name in ("accuracy", "f1")
    }
    return with_half_widths(best_measures, scale=1)


def _class_measures(predicted: Ids, labels: Ids, seed: int) -> dict[str, Interval]:
    """Returns the accuracy and F1 of predicted classes."""
    f1 = glue.f1 if {*labels.tolist()} <= {0, 1} else glue.macro_f1
    rng = np.random.default_rng(seed)
    return {"accuracy": glue.accuracy(predicted, labels, rng), "f1": f1(predicted, labels, rng)}

"""Classifies and embeds in micro-batches: waiting rows are padded and run together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import normalize

from milkglass.errors import MilkglassError
from milkglass.server.inference.generator import Engine, fitting_count, not_finite_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_PER_PASS = 8192  # padded tokens of one pass, unless one row alone is longer


@dataclass(eq=False)
class ClassifierRow:
    """Holds a row to classify or embed.

    Attributes:
        ids: the row's scrambled ids.
        token_types: the type of each token. None: all are 0.
        on_done: gets the class probabilities, a regression's one number or the vector, in the engine's thread.
        on_error: gets the error if there is no answer, in the engine's thread.
        is_cancelled: whether the answer is no longer needed.
    """

    ids: list[int]
    token_types: list[int] | None
    on_done: Callable[[list[float]], None]
    on_error: Callable[[MilkglassError], None]
    is_cancelled: bool = False

    def fail(self, error: MilkglassError) -> None:
        """Reports an error in place of an answer."""
        self.on_error(error)


class Classifier(Engine[ClassifierRow]):
    """Classifies or embeds waiting rows, as many at a time as fit one pass."""

    def __init__(self, model: PreTrainedModel, max_batch: int, max_waiting: int, needs_pad: bool = False) -> None:
        super().__init__("classifier", max_waiting)
        self._model = model
        pad_id = model.config.pad_token_id
        # A decoder finds a row's last token by its padding id; without one, rows go one by one
        self._max_batch = max_batch if pad_id is not None or not needs_pad else 1
        self._pad_id = 0 if pad_id is None else pad_id
        # As in transformers: one label, and nothing else said, is a regression
        self.is_regression = model.config.num_labels == 1 and model.config.problem_type in (None, "regression")
        self._rows: list[ClassifierRow] = []

    def step(self) -> None:
        rows = [row for row in self.take(self._max_batch) if not row.is_cancelled]
        count = fitting_count([len(row.ids) for row in rows], TOKENS_PER_PASS)
        self.put_back(rows[count:])
        self._rows = rows[:count]
        if self._rows:
            for row, answer in zip(self._rows, self._forward(), strict=True):
                if all(map(math.isfinite, answer)):
                    row.on_done(answer)
                else:
                    row.fail(not_finite_error())
        self._rows = []

    def is_active(self) -> bool:
        return False  # a step finishes what it takes

    def drop(self) -> list[ClassifierRow]:
        rows, self._rows = self._rows, []
        return rows

    def _forward(self) -> list[list[float]]:
        batch = {"input_ids": self._pad_rows([row.ids for row in self._rows], self._pad_id)}
        batch["attention_mask"] = self._pad_rows([[1] * len(row.ids) for row in self._rows], 0)
        if any(row.token_types for row in self._rows):
            types = [row.token_types or [0] * len(row.ids) for row in self._rows]
            batch["token_type_ids"] = self._pad_rows(types, 0)
        result: list[list[float]] = self._compute_answers(batch).cpu().tolist()
        return result

    def _compute_answers(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self._model(**batch).logits.float()
        return logits if self.is_regression else logits.softmax(-1)

    def _pad_rows(self, rows: list[list[int]], fill: int) -> torch.Tensor:
        width = max(len(row) for row in rows)
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows], device=self._model.device)


class Embedder(Classifier):
    """Embeds rows as vectors of unit length: the mean of the last hidden states, as sentence encoders are trained."""

    def _compute_answers(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = batch["attention_mask"][..., None]
        states = self._model(**batch).last_hidden_state.float()
        return normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

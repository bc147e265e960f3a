"""Training rows as the trainer takes them: examples of scrambled ids, and padded batches of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from milkglass.errors import BadUpload
from milkglass.server.spec import IGNORED_LABEL, Task
from milkglass.server.storage.training_rows import TrainingRows

LABEL_TENSOR_BY_TASK = {"classification": "labels", "regression": "scores", "causal-lm": "token_labels"}


class TrainingDataset(Dataset[dict[str, Any]]):
    """Gives the rows of a file, each cut to `max_length` tokens. Numbers are read from the file when they are used."""

    def __init__(self, path: Path, task: Task, max_length: int) -> None:
        """Opens a training file. Raises BadUpload for another format, or for labels of another task than `task`."""
        rows = TrainingRows.open(path)
        if rows.label_tensor != LABEL_TENSOR_BY_TASK[task]:
            raise BadUpload(
                f"the training file holds {rows.label_tensor}, which does not fit {task}",
                "classification needs `labels`, regression `scores`, causal-lm `token_labels`",
            )
        self.max_length = max_length
        self._row_ends = np.cumsum(rows.map_tensor("lengths"), dtype=np.int64)
        self._ids = rows.map_tensor("input_ids")
        self._token_types = rows.map_tensor("token_type_ids") if "token_type_ids" in rows.tensors else None
        self._labels, self._has_token_labels = rows.map_tensor(rows.label_tensor), rows.label_tensor == "token_labels"

    def __len__(self) -> int:
        return len(self._row_ends)

    def __getitem__(self, row: int) -> dict[str, Any]:
        start = self._row_ends[row - 1] if row else 0
        token_range = slice(start, min(self._row_ends[row], start + self.max_length))
        labels = self._labels[token_range] if self._has_token_labels else self._labels[row]
        example: dict[str, Any] = {"input_ids": self._ids[token_range], "labels": labels}
        if self._token_types is not None:
            example["token_type_ids"] = self._token_types[token_range]
        return example


class PaddingCollator:
    """Makes a padded batch of examples.

    Rows are padded on the right: ids with `pad_id`, the labels of tokens with -100, masks and token types with 0.
    A batch has tensors (rows, tokens) and, unless tokens have labels, labels (rows,): int64 classes or fp32 scores.
    """

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {"input_ids": _pad_rows([example["input_ids"] for example in examples], self.pad_id)}
        batch["attention_mask"] = _pad_rows([np.ones(len(example["input_ids"])) for example in examples], 0)
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = _pad_rows([example["token_type_ids"] for example in examples], 0)
        labels = [example["labels"] for example in examples]
        if isinstance(labels[0], np.ndarray):
            batch["labels"] = _pad_rows(labels, IGNORED_LABEL)
        else:
            numbers = np.array(labels)
            batch["labels"] = torch.tensor(numbers, dtype=torch.float32 if numbers.dtype.kind == "f" else torch.int64)
        return batch


def _pad_rows(rows: list[NDArray[Any]], fill: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True, padding_value=fill)

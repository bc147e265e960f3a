"""Training rows as they lie in Parquet: scrambled ids, nothing else. See server/spec.py for the columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from milkglass.errors import BadUpload
from milkglass.server.spec import Task
from milkglass.server.storage import parquet


class _Lists:
    """A Parquet list column as one flat array and its offsets: no Python object a token."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        joined = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        self.offsets: NDArray[np.int64] = joined.offsets.to_numpy().astype(np.int64)
        self.values: NDArray[np.int64] = joined.values.to_numpy(zero_copy_only=False)

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


class TrainingDataset(Dataset[dict[str, Any]]):
    """One example a row, cut to `max_length` tokens."""

    def __init__(self, path: Path, task: Task, max_length: int) -> None:
        table = parquet.read(path)
        if "input_ids" not in table.column_names or "labels" not in table.column_names:
            raise BadUpload("the training file lacks the columns input_ids or labels", "see docs/formats.md")
        nested = pa.types.is_list(table.schema.field("labels").type)
        if nested != (task == "causal-lm"):
            raise BadUpload(
                f"the column labels holds {'lists' if nested else 'single numbers'}, which does not fit {task}",
                "causal-lm needs a list of labels a row, classification and regression one number",
            )
        if pa.types.is_floating(table.schema.field("labels").type) != (task == "regression"):
            raise BadUpload(
                f"the column labels does not hold the numbers of {task}",
                "regression needs float32 labels, classification int32 ones",
            )
        self.max_length = max_length
        self._ids = _Lists(table["input_ids"])
        self._types = _Lists(table["token_type_ids"]) if "token_type_ids" in table.column_names else None
        self._labels = _Lists(table["labels"]) if nested else table["labels"].to_numpy()
        self._count = table.num_rows

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids = self._ids[row][: self.max_length]
        example: dict[str, Any] = {"input_ids": ids, "labels": self._labels[row]}
        if isinstance(self._labels, _Lists):
            example["labels"] = self._labels[row][: self.max_length]
        if self._types is not None:
            example["token_type_ids"] = self._types[row][: self.max_length]
        return example


class Collate:
    """Pad a batch on the right: ids with `pad`, labels with -100, the rest with 0. Labels of a regression stay fp32."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(example["input_ids"]) for example in examples)
        batch = {"input_ids": _padded([e["input_ids"] for e in examples], width, self.pad)}
        batch["attention_mask"] = _padded([np.ones(len(e["input_ids"])) for e in examples], width, 0)
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = _padded([e["token_type_ids"] for e in examples], width, 0)
        labels = [example["labels"] for example in examples]
        listed = isinstance(labels[0], np.ndarray)
        batch["labels"] = _padded(labels, width, parquet.IGNORED) if listed else _numbers(labels)
        return batch


def _numbers(labels: list[Any]) -> torch.Tensor:
    if isinstance(labels[0], np.floating):
        return torch.tensor([float(one) for one in labels], dtype=torch.float32)
    return torch.tensor([int(one) for one in labels])


def _padded(rows: list[NDArray[Any]], width: int, fill: int) -> torch.Tensor:
    out = np.full((len(rows), width), fill, np.int64)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return torch.from_numpy(out)

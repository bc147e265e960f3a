"""A trainer whose processes share each batch, so that several train as one does with the same batches.

    loss of a step = sum over the ranks r of n_r / n * (mean loss of the n_r items of rank r)

n is the sum of n_r. An item is a row, or for language models a label that is predicted. Every rank draws the same batch
and reads each N-th row of it; no row is left out, read twice or weighed anew, whatever the batch's size. Dropout
differs between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from milkglass.server.jobs.checkpoints import CheckpointTrainer
from milkglass.server.jobs.ranks import Ranks
from milkglass.server.spec import IGNORED


class OneOrder(Sampler[int]):
    """The order that the first rank draws, for all."""

    def __init__(self, drawn: Sampler[int], ranks: Ranks) -> None:
        self._drawn, self._ranks = drawn, ranks

    def __len__(self) -> int:
        return len(self._drawn)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        order = list(self._drawn) if self._ranks.first else None
        return iter(self._ranks.numbers_of_first(order, len(self)))


class OwnDraws(TrainerCallback):
    """Dropout of each rank's own: the same masks for different rows would be less of it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._ranks.first:
            torch.manual_seed(args.seed + self._ranks.place)


class SplitTrainer(CheckpointTrainer):
    """`per_device_train_batch_size` of its arguments is the whole batch."""

    def __init__(self, ranks: Ranks, causal: bool, **given: Any) -> None:
        self._ranks, self._causal = ranks, causal
        self._rows = 0  # of the newest batch of an evaluation
        super().__init__(**given)

    # --- every rank draws the whole batch -----------------------------------------------------------------------------
    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Any:
        drawn = super()._get_train_sampler(train_dataset)
        # A random order is drawn by accelerate from `data_seed`, the same in every rank
        return OneOrder(drawn, self._ranks) if isinstance(drawn, LengthGroupedSampler) else drawn

    def _get_dataloader(self, *given: Any, **more: Any) -> DataLoader[Any]:
        loader: Any = super()._get_dataloader(*given, **more)
        loader.batch_sampler.num_processes, loader.batch_sampler.process_index = 1, 0  # accelerate would deal batches
        return loader  # type: ignore[no-any-return]

    # --- and reads its part -------------------------------------------------------------------------------------------
    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the ranks is the batch's loss."""
        part, weight = self.part(inputs)
        loss, outputs = super().compute_loss(model, part, True, None)
        loss = loss * (weight * self._ranks.count)
        return (loss, outputs) if return_outputs else loss

    def part(self, batch: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """This rank's rows, and the share of all items that they have.

        A rank without a row or an item is given one that counts nothing: it must take part in the step, and a mean over
        nothing is not a number.
        """
        place, count = self._ranks.place, self._ranks.count
        some = place < len(batch["labels"])
        rows = slice(place, None, count) if some else slice(0, 1)
        width = int(batch["attention_mask"][rows].sum(-1).max())
        part = {name: one[rows, :width] if one.ndim > 1 else one[rows] for name, one in batch.items()}
        total, own = self._items(batch["labels"]), self._items(part["labels"]) if some else 0
        if self._causal and not own:
            part["labels"] = part["labels"].clone()
            part["labels"][0, -1] = 0
        return part, own / total if total else float("nan")

    def _items(self, labels: torch.Tensor) -> int:
        return int((labels[:, 1:] != IGNORED).sum()) if self._causal else len(labels)

    # --- evaluation ---------------------------------------------------------------------------------------------------
    def evaluation_loop(self, *given: Any, **more: Any) -> Any:
        # What `prediction_step` returns is of the whole batch; a loss comes repeated as for a batch that is full
        self.gather_function = lambda one: one[: self._rows]
        return super().evaluation_loop(*given, **more)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._rows = len(inputs["labels"])
        loss = self.accelerator.reduce(loss, "mean")
        return loss, None if logits is None else self._whole(logits), labels

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """(rows, c) of the batch, from each rank's part (rows_r, c)."""
        count = self._ranks.count
        most = -(-self._rows // count)
        padded = logits.new_zeros(most, *logits.shape[1:])
        padded[: len(logits)] = logits
        parts: torch.Tensor = self.accelerator.gather(padded)
        return parts.unflatten(0, (count, most)).transpose(0, 1).flatten(0, 1)[: self._rows]

"""What a site does in a round: one gradient in FedSGD; one pass over its rows, in local steps, in FedAvg.

Every gradient goes through the site's gradient defence (gradient_defences/) first. The batches, and what a shield
draws, follow from the site's secret (seeds.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from milkglass.errors import CorruptCheckpoint, RefusedTask, UsageError
from milkglass.federated.rounds import Tensors, Update, first_misfit
from milkglass.federated.rows import SiteRows, load_rows, secret_of
from milkglass.federated.seeds import noise_stream, row_order
from milkglass.gradient_defences.catalogue import name_and_parameters
from milkglass.gradient_defences.defence import GradientDefence, NoDefence, share_gradient
from milkglass.parameters import Limit
from milkglass.sequences import Ids
from milkglass.threat.training_step import SharedStep, pad_texts

Method = Literal["fedsgd", "fedavg"]


@dataclass(frozen=True)
class FederatedTraining:
    """Describes how a run trains.

    Attributes:
        method: fedsgd (a gradient a round) or fedavg (an epoch a round).
        rounds: how many rounds are done in all.
        lr: the learning rate.
        batch_size: how many texts a batch has at each site.
        minimum: the fewest sites with which a round is done.
        most_texts: the most texts that a site may say it has in FedAvg, which are its weight. None: any number. In
            FedSGD `batch_size` bounds them.

    Raises:
        UsageError: a value is out of its range.
    """

    method: Method = "fedsgd"
    rounds: int = 3
    lr: float = 0.05
    batch_size: int = 8
    minimum: int = 1
    most_texts: int | None = None

    def __post_init__(self) -> None:
        if self.method not in ("fedsgd", "fedavg"):
            raise UsageError(f"the method is {self.method!r}", "fedsgd or fedavg")
        Limit(0, excludes_low=True).require(self.lr, "the learning rate", "0.05 is the default")
        for name in ("rounds", "batch_size", "minimum", "most_texts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} is {value}", "at least 1 is needed")

    def document(self) -> dict[str, Any]:
        """Returns the fields that have a value."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def deciding_fields(self) -> dict[str, Any]:
        """Returns the fields that decide a round's update."""
        return {"method": self.method, "lr": self.lr, "batch_size": self.batch_size}

    @property
    def max_texts(self) -> int | None:
        """Returns the most texts that a site may say it saw in a round; None: any number."""
        return self.batch_size if self.method == "fedsgd" else self.most_texts

    def step_count(self, text_count: int) -> int:
        """Returns how many steps a site takes in a round with `text_count` texts."""
        return 1 if self.method == "fedsgd" else -(-text_count // self.batch_size)


@dataclass(frozen=True, eq=False)
class LocalResult:
    """Holds what a site computed in a round, of which only the update is sent.

    Attributes:
        update: what may be sent.
        rows_digest: the digest of the rows that the site trained on.
        loss: the loss of the first batch before the round, in nats.
    """

    update: Update
    rows_digest: str = field(repr=False)
    loss: float = field(repr=False)


@dataclass(frozen=True, eq=False)
class Site:
    """Trains on rows of its own.

    Attributes:
        name: the site's name.
        folder: the folder of the rows and of the site's secret, which are read in each round.
        shield: defends the gradients that the site shares.
    """

    name: str
    folder: Path
    shield: GradientDefence = NoDefence()

    def train(self, step: SharedStep, round: int, weights: Tensors, training: FederatedTraining) -> LocalResult:
        """Returns the site's update for these weights, with a tensor for each parameter of the model.

        Args:
            step: computes gradients; its model gets the weights.
            round: the round, from 0.
            weights: the server's, by the parameter's name.
            training: how the run trains.

        Raises:
            OSError: the rows cannot be read.
            CorruptCheckpoint: the rows are damaged, or do not fit the model.
            RefusedTask: the weights do not fit the model.
        """
        rows, secret = load_rows(self.folder), secret_of(self.folder)
        _require_ids_in_range(rows, step, self.name)
        if fault := first_misfit(weights, step.parameters):
            raise RefusedTask(f"the server sent {fault}", "the server must train the model that this site has")
        load_weights(step, weights)
        order = row_order(secret, round, len(rows))
        if training.method == "fedsgd":
            order = order[: training.batch_size]
        batches = [order[start : start + training.batch_size] for start in range(0, len(order), training.batch_size)]
        loss = _loss(step, rows, batches[0])
        sizes = [len(batch_rows) for batch_rows in batches]
        stream = noise_stream(secret, round, weights, sizes, training.lr, name_and_parameters(self.shield))
        update_sum: dict[str, torch.Tensor] = {}
        for index, batch_rows in enumerate(batches):
            if index:
                load_weights(step, {name: weight - training.lr * update_sum[name] for name, weight in weights.items()})
            gradient = share_gradient(step, *_batch(rows, batch_rows), self.shield, round, stream)
            tensors = _all_parameters({name: tensor.cpu() for name, tensor in gradient.tensors.items()}, weights)
            update_sum = {name: update_sum[name] + tensor if update_sum else tensor for name, tensor in tensors.items()}
        return LocalResult(Update(self.name, update_sum, len(order), len(batches)), rows.digest(), loss)


def _batch(rows: SiteRows, row_numbers: Ids) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ids (rows, tokens), the mask of the same shape, and the labels (rows,)."""
    ids, mask = pad_texts(list(rows.ids.select(row_numbers)), pad_id=0)
    return ids, mask, torch.from_numpy(rows.labels[row_numbers])


@torch.no_grad()
def _loss(step: SharedStep, rows: SiteRows, row_numbers: Ids) -> float:
    """Returns the mean loss of these rows in nats."""
    ids, mask, labels = _batch(rows, row_numbers)
    return float(step.loss(step.embed(ids), mask, labels))


def load_weights(step: SharedStep, weights: Tensors) -> None:
    """Copies weights into the model, in place.

    They must be of the shapes of `weights_of`, since `copy_` would stretch a tensor of another shape. What came from
    elsewhere is checked before (`first_misfit`).
    """
    with torch.no_grad():
        for name, parameter in step.parameters.items():
            parameter.copy_(weights[name])


def weights_of(step: SharedStep) -> dict[str, torch.Tensor]:
    """Returns a copy of the trained parameters on the CPU, to be stored or sent."""
    return {name: parameter.detach().cpu().clone() for name, parameter in step.parameters.items()}


def _all_parameters(tensors: Tensors, weights: Tensors) -> dict[str, torch.Tensor]:
    """Returns a tensor for each parameter: zeros for those that a defence froze."""
    return {name: tensors[name] if name in tensors else torch.zeros_like(weight) for name, weight in weights.items()}


def _require_ids_in_range(rows: SiteRows, step: SharedStep, name: str) -> None:
    """Raises CorruptCheckpoint if rows have ids or classes that the model lacks."""
    vocab_size, class_count = len(step.table), int(step.module.config.num_labels)
    if rows.ids.ids.min() < 0 or rows.ids.ids.max() >= vocab_size:
        raise CorruptCheckpoint(
            f"site {name} has ids outside a vocabulary of {vocab_size}", "prepare it for this model"
        )
    if rows.labels.min() < 0 or rows.labels.max() >= class_count:
        raise CorruptCheckpoint(f"site {name} has classes outside {class_count}", "prepare it with all sites' labels")

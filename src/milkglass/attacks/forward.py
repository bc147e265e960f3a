"""Run a model that an attacker holds: from its tensors, without its folder, one batch of equal lengths after another.

Batches hold sequences of one length each, so that no padding is needed and no mask can be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedModel

from milkglass.models import torch_model
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget

TOKENS = 2048  # in a batch


def body(model: Model, layers: int | None = None) -> PreTrainedModel:
    """The transformer without a head, fp32, in evaluation mode; with `layers`, only its first ones."""
    built: PreTrainedModel = torch_model.body(model, layers=layers).eval()
    return built


def tied(model: Model) -> bool:
    """Whether its table is its head, by its config; where that does not say, as its kind of model does."""
    raw = dict(model.config)
    kind = raw.pop("model_type")
    return bool(AutoConfig.for_model(kind, **raw).tie_word_embeddings)


def batches(sequences: Sequences, tokens: int = TOKENS) -> Iterator[Ids]:
    """Numbers of sequences, of one length and at most `tokens` ids a batch, the shortest first; empty ones never."""
    order = np.argsort(sequences.lengths, kind="stable")
    lengths = sequences.lengths[order]
    for length in np.unique(lengths[lengths > 0]):
        alike = order[lengths == length]
        step = max(1, tokens // int(length))
        for start in range(0, len(alike), step):
            yield alike[start : start + step]


def within(
    sequences: Sequences, budget: Budget, rng: np.random.Generator, floor: float = 0.0, tokens: int = TOKENS
) -> Iterator[Ids]:
    """The batches in an order drawn from `rng` until less than `floor` seconds are left: what was read by then is a
    sample of all. The first one comes always, so that there is something."""
    every = list(batches(sequences, tokens))
    for done, number in enumerate(rng.permutation(len(every)).tolist()):
        if done and budget.left() < floor:
            return
        yield every[number]


def stacked(sequences: Sequences, numbers: Ids) -> torch.Tensor:
    """(b, t) the ids of sequences of one length."""
    return torch.from_numpy(sequences.ids[places(sequences, numbers)].reshape(len(numbers), -1))


def places(sequences: Sequences, numbers: Ids) -> Ids:
    """(b * t,) where the tokens of these sequences lie among all."""
    starts = np.cumsum(sequences.lengths)[numbers] - sequences.lengths[numbers]
    return (starts[:, None] + np.arange(int(sequences.lengths[numbers[0]]))).reshape(-1)


@torch.inference_mode()
def state(model: PreTrainedModel, ids: torch.Tensor, layer: int | None = None) -> torch.Tensor:
    """(b, t, d) the last hidden states; with `layer`, those after so many layers, as they go into the next one: a
    decoder's last norm comes after its last layer only. A model with fewer layers gives its last states."""
    if layer is None:
        return model(input_ids=ids).last_hidden_state.float()
    every = model(input_ids=ids, output_hidden_states=True).hidden_states
    return every[min(layer, len(every) - 1)].float()


def sampled(
    model: PreTrainedModel, sequences: Sequences, groups: Iterable[Ids], layer: int | None = None
) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """(total, d) the state of every token of the sequences in `groups` (see `within`), 0 in the others; (b,) which
    sequences these were."""
    out = torch.zeros(len(sequences.ids), model.config.hidden_size)
    read = np.zeros(len(sequences), np.bool_)
    for numbers in groups:
        result = state(model, stacked(sequences, numbers), layer)
        out[torch.from_numpy(places(sequences, numbers))] = result.flatten(0, 1)
        read[numbers] = True
    return out, read


def headless(model: Model) -> str | None:
    """Why `public_head` is not the model's: its head is not its table, and its checkpoint has no head."""
    if model.head is None and not tied(model):
        return "the public model's head is not its table, and its checkpoint holds no head"
    return None


def public_head(model: Model) -> torch.Tensor:
    """(n, d) the output embeddings, or the table where the two are tied; ask `headless` before."""
    head = model.head
    return model.table if head is None else head

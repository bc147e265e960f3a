"""Runs a model that an attacker holds, from its tensors alone, on the device (device.py).

Each batch holds sequences of one length, so that neither padding nor a mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedModel

from milkglass import device
from milkglass.attacks import work
from milkglass.models import torch_model
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget

BATCH_TOKENS = 2048  # tokens of a batch, unless one sequence is longer


def body(model: Model, layer_count: int | None = None) -> PreTrainedModel:
    """Returns the transformer without a head, in fp32 and evaluation mode, on the device.

    Args:
        model: the model's tensors and config.
        layer_count: how many of its first layers are kept. None: all.
    """
    built: PreTrainedModel = torch_model.body(model, layer_count=layer_count).eval()
    return device.move(built)


def batches(sequences: Sequences, max_tokens: int = BATCH_TOKENS) -> Iterator[Ids]:
    """Yields batches as indices of nonempty sequences. Those of a batch have one length; short lengths come first.

    A batch has at least one sequence. If it has several, they have at most `max_tokens` ids.
    """
    order = np.argsort(sequences.lengths, kind="stable")
    lengths = sequences.lengths[order]
    for length in np.unique(lengths[lengths > 0]):
        same_length = order[lengths == length]
        step = max(1, max_tokens // int(length))
        for start in range(0, len(same_length), step):
            yield same_length[start : start + step]


def batches_within(
    sequences: Sequences,
    budget: Budget,
    rng: np.random.Generator,
    min_seconds: float = 0.0,
    max_tokens: int = BATCH_TOKENS,
) -> Iterator[Ids]:
    """Yields batches in random order, at least one, until fewer than `min_seconds` of the budget are left."""
    all_batches = list(batches(sequences, max_tokens))
    for done_count, index in enumerate(rng.permutation(len(all_batches)).tolist()):
        if done_count and budget.left() < min_seconds:
            return
        yield all_batches[index]


def stack(sequences: Sequences, text_indices: Ids) -> torch.Tensor:
    """Returns (b, t) the ids of the sequences with these indices, which have one length, on the device."""
    return device.tensor(sequences.ids[places(sequences, text_indices)].reshape(len(text_indices), -1))


def places(sequences: Sequences, text_indices: Ids) -> Ids:
    """Returns (b * t,) the places of the tokens of sequences of one length among all tokens."""
    starts = np.cumsum(sequences.lengths)[text_indices] - sequences.lengths[text_indices]
    return (starts[:, None] + np.arange(int(sequences.lengths[text_indices[0]]))).reshape(-1)


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, ids: torch.Tensor, layer: int | None = None) -> torch.Tensor:
    """Returns (b, t, d) the hidden states of ids.

    Args:
        model: as `body` gives it.
        ids: (b, t).
        layer: after how many layers the states are taken, as the next layer receives them. None, or no fewer layers
            than `model` has: its last states, to which a decoder's last norm is applied.
    """
    if layer is None:
        return model(input_ids=ids).last_hidden_state.float()
    states_of_layers = model(input_ids=ids, output_hidden_states=True).hidden_states
    return states_of_layers[min(layer, len(states_of_layers) - 1)].float()


def sample_states(
    model: PreTrainedModel, sequences: Sequences, groups: Iterable[Ids], budget: Budget, layer: int | None = None
) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """Computes the hidden states of the sequences in `groups` (see `batches_within`).

    Returns:
        (total, d) the state of every token, 0 if its sequence was not run, and (texts,) whether each sequence was.
    """
    states = torch.zeros(len(sequences.ids), model.config.hidden_size, device=device.current())
    was_run = np.zeros(len(sequences), np.bool_)
    for text_indices in groups:
        batch_states = hidden_states(model, stack(sequences, text_indices), layer)
        states[torch.from_numpy(places(sequences, text_indices))] = batch_states.flatten(0, 1)
        was_run[text_indices] = True
        budget.spend(work.forward(model, int(sequences.lengths[text_indices].sum())))
    return states, was_run


def take_step(optimiser: torch.optim.Optimizer, loss: torch.Tensor, max_grad_norm: float | None = None) -> None:
    """Takes one step of an optimiser against the gradient of the loss.

    The gradient is first scaled to a norm of at most `max_grad_norm`, unless that is None.
    """
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(
            [parameter for group in optimiser.param_groups for parameter in group["params"]], max_grad_norm
        )
    optimiser.step()


def why_no_head(model: Model) -> str | None:
    """Returns why `public_head` cannot be used, or None. It cannot if the head is not the table and was not saved."""
    if model.head is not None:
        return None
    entries = dict(model.config)
    config = AutoConfig.for_model(entries.pop("model_type"), **entries)  # a kind of model may be tied by default
    if config.tie_word_embeddings:
        return None
    return "the public model's head is not its table, and its checkpoint holds no head"


def public_head(model: Model) -> torch.Tensor:
    """Returns (n, d) the output embeddings, or the table if both are tied. Call `why_no_head` before."""
    head = model.head
    return device.move(model.table if head is None else head)

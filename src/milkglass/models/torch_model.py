"""A checkpoint as PyTorch runs it, with a head or without: read tensor by tensor, fp32, and nothing printed.

What the checkpoint lacks, such as a class head, is drawn from torch's generator. Nothing but heads and poolers may be
missing. What reads a layer's input is found by running it. Out of scope: defences, training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from milkglass.errors import CorruptCheckpoint
from milkglass.models.checkpoint import Checkpoint

# One model is built at a time in a process. While transformers loads a model it replaces `PreTrainedModel.tie_weights`
# by a function that does nothing, for the whole process, and puts back what it found before. Of two loads at once the
# later one finds the other's replacement and may put that back last: from then on no head is tied in this process, and
# models answer with weights of their own.
ONE_LOAD = threading.RLock()


def classifier(base: Checkpoint, classes: int, attention: str | None = None) -> Any:
    """The whole model with a head of `classes`. attention: transformers' name of an implementation; None: its choice.
    Raises CorruptCheckpoint where more than the head and the pooler is missing."""
    from transformers import AutoModelForSequenceClassification

    raw = {name: value for name, value in base.config.items() if name not in ("id2label", "label2id")}
    return _built(AutoModelForSequenceClassification, base, raw | {"num_labels": classes}, attention)


def language_model(base: Checkpoint, attention: str | None = None) -> Any:
    """The whole model with its head over the vocabulary, which may be its table. Raises CorruptCheckpoint."""
    from transformers import AutoModelForCausalLM

    return _built(AutoModelForCausalLM, base, dict(base.config), attention)


def body(base: Checkpoint, attention: str | None = None) -> Any:
    """The whole model without a head. PyTorch's generator is left as it was: a missing pooler is drawn from another.
    Raises CorruptCheckpoint."""
    from transformers import AutoModel

    with torch.random.fork_rng(devices=[]):
        return _built(AutoModel, base, dict(base.config), attention)


def _built(kind: Any, base: Checkpoint, raw: dict[str, Any], attention: str | None) -> Any:
    from transformers import AutoConfig

    raw = {name: value for name, value in raw.items() if name != "architectures"}
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    info = {} if attention is None else {"attn_implementation": attention}
    with ONE_LOAD:  # another load would take the tying of heads away meanwhile
        model = kind.from_config(config, dtype=torch.float32, **info)
        expected, prefix = model.state_dict(), model.base_model_prefix  # the model's own memory: nothing is held twice
        filled = set()
        for name in base.tensors:
            for target in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
                if target in expected and base.tensors[name].shape == tuple(expected[target].shape):
                    expected[target].copy_(base.mapped(name))
                    filled.add(target)
        model.tie_weights()
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    lost = [n for n in expected if n not in filled | tied and "pooler" not in n]
    if kind.__name__.endswith("SequenceClassification"):
        lost = [n for n in lost if n.startswith(f"{prefix}.")]
    if lost:
        raise CorruptCheckpoint(f"{len(lost)} tensors are not in the model ({lost[0]})", "fetch the model again")
    return model


def readers(layer: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    """The matrices of a transformer's layer that read what enters its attention: queries, keys, values, and adapters.
    In the order in which the layer uses them; none where it multiplies its input by no matrix.

    Nothing is found by its name: the first matrix that a layer multiplies its input by is the query projection, and the
    others that read the same tensor belong to it.

    Args:
        run: calls the model that the layer is part of, on any input.
    """
    from transformers.pytorch_utils import Conv1D

    calls: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append((module, args[0]))

    handles = [one.register_forward_pre_hook(note) for one in layer.modules() if isinstance(one, nn.Linear | Conv1D)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        return []
    first = calls[0][1]
    return [one for one, x in calls if x.shape == first.shape and x.data_ptr() == first.data_ptr()]

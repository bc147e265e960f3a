"""A checkpoint as PyTorch runs it, with a head or without: read tensor by tensor, fp32, and nothing printed.

What the checkpoint lacks, such as a class head, is drawn from torch's generator. Nothing but heads and poolers may be
missing. Out of scope: defences, training.
"""

from __future__ import annotations

from typing import Any

import torch

from milkglass.errors import CorruptCheckpoint
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.load_lock import ONE_LOAD


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

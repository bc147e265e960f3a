"""Builds a PyTorch model of a checkpoint, with or without a head, in fp32, tensor by tensor and without output.

Only class heads and poolers may be missing. A classifier's are then drawn from torch's generator; a pooler of a body is
0. Modules that read a layer's input are found by running the layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from milkglass.errors import CorruptCheckpoint
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.config_entries import DEPTH_ENTRIES
from milkglass.models.resolve import hide_progress_bars
from milkglass.models.view import Model

hide_progress_bars()  # what loads a model imports this module first

# One model is built at a time in a process. While transformers loads a model it replaces `PreTrainedModel.tie_weights`
# by a function that does nothing, for the whole process, and restores what it found before. Of two loads at once the
# later one finds the other's replacement and may restore that last: from then on no head is tied in this process, and
# models answer with untied weights.
MODEL_LOAD_LOCK = threading.RLock()
DRAWING_METHODS = {"normal_", "uniform_", "kaiming_uniform_"}  # of tensors and torch.nn.init, whose others call these


class SkipInitialisation(TorchFunctionMode):
    """Skips the random initialisation of a model whose weights are all read afterwards, to save time.

    It affects this thread only. Nothing else may be done inside, because no noise is drawn there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if getattr(func, "__name__", "") in DRAWING_METHODS:
            return args[0] if args else options["tensor"]
        return func(*args, **options)


def classifier(base: Checkpoint, class_count: int, attention_implementation: str | None = None) -> Any:
    """Returns the whole model with a head for `class_count` classes.

    Args:
        base: the checkpoint. A head or pooler that it lacks is drawn from torch's generator.
        class_count: the outputs of the head.
        attention_implementation: transformers' `attn_implementation`, here and below. None: transformers chooses.

    Raises:
        CorruptCheckpoint: a tensor of the body is missing.
    """
    from transformers import AutoModelForSequenceClassification

    config = {name: value for name, value in base.config.items() if name not in ("id2label", "label2id")}
    return _build(
        AutoModelForSequenceClassification, base, config | {"num_labels": class_count}, attention_implementation
    )


def language_model(base: Checkpoint, attention_implementation: str | None = None) -> Any:
    """Returns the whole model with its head over the vocabulary, which may be its table. Raises CorruptCheckpoint."""
    from transformers import AutoModelForCausalLM

    return _build(AutoModelForCausalLM, base, dict(base.config), attention_implementation)


def body(base: Checkpoint | Model, attention_implementation: str | None = None, layer_count: int | None = None) -> Any:
    """Returns the model without a head. Raises CorruptCheckpoint if a tensor other than a pooler's is missing.

    Args:
        base: the checkpoint, or a model in memory.
        attention_implementation: see `classifier`.
        layer_count: how many of the first layers are kept. None: all.
    """
    from transformers import AutoModel

    config = dict(base.config)
    if layer_count is not None:
        config |= {name: min(layer_count, int(config[name])) for name in DEPTH_ENTRIES if config.get(name) is not None}
        if isinstance(config.get("layer_types"), list):
            config["layer_types"] = config["layer_types"][:layer_count]
    return _build(AutoModel, base, config, attention_implementation)


def _build(
    model_class: Any, base: Checkpoint | Model, entries: dict[str, Any], attention_implementation: str | None
) -> Any:
    """Returns a model of one of transformers' auto classes for these config entries, with the base's weights.

    Raises CorruptCheckpoint if weights are missing.
    """
    from transformers import AutoConfig

    entries = {name: value for name, value in entries.items() if name != "architectures"}
    config = AutoConfig.for_model(entries.pop("model_type"), **entries)
    options = {} if attention_implementation is None else {"attn_implementation": attention_implementation}
    headers = base.headers if isinstance(base, Model) else base.tensors
    draws_head = model_class.__name__.endswith("SequenceClassification")
    with MODEL_LOAD_LOCK:  # another load would take the tying of heads away meanwhile
        with nullcontext() if draws_head else SkipInitialisation():
            model = model_class.from_config(config, dtype=torch.float32, **options)
        parameters, prefix = model.state_dict(), model.base_model_prefix  # the model's own memory, not a copy
        filled_names = set()
        for name, header in headers.items():
            for target in {name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")}:
                if target in parameters and tuple(header.shape) == tuple(parameters[target].shape):
                    parameters[target].copy_(base.map_tensor(name))
                    filled_names.add(target)
        model.tie_weights()
        for name in parameters.keys() - filled_names:
            if "pooler" in name and not draws_head:
                parameters[name].zero_()
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    missing_names = [name for name in parameters if name not in filled_names | tied and "pooler" not in name]
    if draws_head:
        missing_names = [name for name in missing_names if name.startswith(f"{prefix}.")]
    if missing_names:
        raise CorruptCheckpoint(
            f"{len(missing_names)} tensors are not in the model ({missing_names[0]})", "give the whole model"
        )
    return model


def attention_input_projections(layer: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    """Returns the matrices of a layer that read the input of its attention, in order of use; `run` calls the model.

    These are queries, keys, values, and adapters; none if the layer multiplies its input by no matrix. Nothing is found
    by its name: the first matrix that a layer multiplies its input by is the query projection, and the others that read
    the same tensor belong to it.
    """
    from transformers.pytorch_utils import Conv1D

    calls: list[tuple[nn.Module, Tensor]] = []

    def note_call(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append((module, args[0]))

    matrices = [module for module in layer.modules() if isinstance(module, nn.Linear | Conv1D)]
    handles = [module.register_forward_pre_hook(note_call) for module in matrices]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        return []
    inputs = calls[0][1]
    return [module for module, read in calls if read.shape == inputs.shape and read.data_ptr() == inputs.data_ptr()]

"""ObfusLM's way to tune a decoder (appendix C.3): LoRA in the middle layers, the outer layers in full.

Beyond the paper, embedding tables are trained in full, since the scheme has mixed their rows. Adapters are injected
into the model rather than wrapped around it, so that a checkpoint has all that is trained. They are merged at the end,
because serving engines refuse adapters with fully trained layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from milkglass.errors import UsageError
from milkglass.server.spec import Hyperparameters


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Returns the name and the list of the transformer layers: the longest list of modules in the model.

    Raises UsageError if the model has none.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UsageError("this model has no list of layers to adapt", 'use method "full"')
    return max(lists, key=lambda pair: len(pair[1]))


def inject_adapters(model: PreTrainedModel, hyperparameters: Hyperparameters) -> None:
    """Freezes the model, injects adapters, and unfreezes what is trained in full."""
    name, layers = layer_list(model)
    hyperparameters = hyperparameters.for_layers(len(layers))
    first_adapted, adapted_stop = hyperparameters.full_first, len(layers) - hyperparameters.full_last
    layer_modules = [
        (index, *module) for index in range(first_adapted, adapted_stop) for module in layers[index].named_modules()
    ]
    target_names = [
        f"{name}.{index}.{linear}" for index, linear, module in layer_modules if isinstance(module, nn.Linear | Conv1D)
    ]
    has_conv = any(isinstance(module, Conv1D) for module in model.modules())
    config = LoraConfig(
        r=hyperparameters.lora_rank,
        lora_alpha=hyperparameters.lora_alpha,
        target_modules=target_names,
        fan_in_fan_out=has_conv,
        bias="none",
    )
    inject_adapter_in_model(config, model)
    for module in _fully_trained_modules(model, layers, first_adapted, adapted_stop, hyperparameters.train_tables):
        module.requires_grad_(True)


def _fully_trained_modules(
    model: PreTrainedModel, layers: nn.ModuleList, first_adapted: int, adapted_stop: int, train_tables: bool
) -> Iterator[nn.Module]:
    """Yields the layers before `first_adapted` and from `adapted_stop` on, the class head, and maybe the tables."""
    yield from (layer for index, layer in enumerate(layers) if index < first_adapted or index >= adapted_stop)
    yield from (model.get_submodule(name) for name in ("score", "classifier") if hasattr(model, name))
    if train_tables:
        yield model.get_input_embeddings()
        if (head := model.get_output_embeddings()) is not None:
            yield head


@torch.no_grad()
def merge_adapters(model: PreTrainedModel) -> None:
    """Adds each adapter to its matrix and removes it."""
    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in adapted:
        module.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.get_base_layer())

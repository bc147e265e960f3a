"""ObfusLM's way to tune a decoder (appendix C.3): LoRA in the middle layers, the outer layers in full; and, which is
ours, the tables of embeddings in full, since their rows are what a scheme has mixed.

The adapters are injected into the model rather than wrapped around it, so that a checkpoint holds everything that is
trained, and are merged at the end: serving engines refuse adapters that come with fully trained layers.
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


def blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The transformer layers: the longest list of modules in the model, and its name."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UsageError("this model has no list of layers to adapt", 'use method "full"')
    return max(lists, key=lambda pair: len(pair[1]))


def prepare(model: PreTrainedModel, chosen: Hyperparameters) -> None:
    """Freeze the model, inject adapters, and thaw what is trained in full."""
    name, layers = blocks(model)
    chosen = chosen.fitted(len(layers))
    first, last = chosen.full_first, len(layers) - chosen.full_last
    adapted = [(i, *module) for i in range(first, last) for module in layers[i].named_modules()]
    targets = [f"{name}.{i}.{linear}" for i, linear, module in adapted if isinstance(module, nn.Linear | Conv1D)]
    conv = any(isinstance(module, Conv1D) for module in model.modules())
    config = LoraConfig(
        r=chosen.lora_rank, lora_alpha=chosen.lora_alpha, target_modules=targets, fan_in_fan_out=conv, bias="none"
    )
    inject_adapter_in_model(config, model)
    for module in _in_full(model, layers, first, last, chosen.train_tables):
        module.requires_grad_(True)


def _in_full(model: PreTrainedModel, layers: nn.ModuleList, first: int, last: int, tables: bool) -> Iterator[nn.Module]:
    yield from (layer for i, layer in enumerate(layers) if i < first or i >= last)
    yield from (model.get_submodule(name) for name in ("score", "classifier") if hasattr(model, name))
    if tables:
        yield model.get_input_embeddings()
        if (head := model.get_output_embeddings()) is not None:
            yield head


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Add each adapter to its matrix and take the adapter away."""
    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in adapted:
        module.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.get_base_layer())

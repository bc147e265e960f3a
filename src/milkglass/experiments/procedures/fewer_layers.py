"""Writes a checkpoint with some of a decoder's layers, the smaller model that a client can run by itself.

The kept layers are renumbered. Everything else stays, except the tokenizer's files, which are not copied. Such a model
must be tuned before it gives sensible answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from milkglass import files
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint, write_json

LAYER = re.compile(r"(?:^|(?<=\.))(layers|h)\.(\d+)(?=\.)")
COUNTS = ("num_hidden_layers", "n_layer")


def require_layers(base: Checkpoint, layer_numbers: Sequence[int]) -> str:
    """Returns the config's name for the number of layers.

    Raises:
        UsageError: the numbers are not ascending, or the model lacks such a layer.
        UnsupportedModel: the tensors' names do not tell their layer.
    """
    name = next((entry for entry in COUNTS if entry in base.config), None)
    if name is None or not any(LAYER.search(tensor) for tensor in base.tensors):
        raise UnsupportedModel("the model's layers are not numbered as Llama's or GPT-2's are", "take another model")
    if (
        not layer_numbers
        or list(layer_numbers) != sorted(set(layer_numbers))
        or not 0 <= layer_numbers[0] <= layer_numbers[-1] < base.config[name]
    ):
        raise UsageError(
            f"layers {list(layer_numbers)} of a model with {base.config[name]}",
            f"give numbers from 0 to {base.config[name] - 1}, ascending, each once",
        )
    return name


def write_with_layers(base: Checkpoint, layer_numbers: Sequence[int], folder: Path) -> None:
    """Writes the checkpoint, config.json last, so that a folder with that file is complete.

    Args:
        layer_numbers: those of the layers that are kept, from 0, ascending.

    Raises:
        UsageError, UnsupportedModel: see `require_layers`.
    """
    name = require_layers(base, layer_numbers)
    new_numbers = {number: new_number for new_number, number in enumerate(layer_numbers)}
    tensors = {}
    for tensor in base.tensors:
        match = LAYER.search(tensor)
        if match is None:
            tensors[tensor] = base.read(tensor)
        elif int(match[2]) in new_numbers:
            tensors[LAYER.sub(f"{match[1]}.{new_numbers[int(match[2])]}", tensor, count=1)] = base.read(tensor)
    config = {**base.config, name: len(layer_numbers)}
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][number] for number in layer_numbers]
    files.private_dir(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if base.generation_config is not None:
        write_json(folder / "generation_config.json", base.generation_config)
    write_json(folder / "config.json", config)

"""Writes a checkpoint with some of a decoder's layers: a smaller model, which a client can run by itself.

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

LAYER_IN_NAME = re.compile(r"(?:^|(?<=\.))(layers|h)\.(\d+)(?=\.)")
LAYER_COUNT_FIELDS = ("num_hidden_layers", "n_layer")


def layer_count_field(base: Checkpoint, layer_numbers: Sequence[int]) -> str:
    """Returns the config's field that counts the layers, after checking that the model has these layers.

    Raises:
        UsageError: the numbers are not ascending, or the model lacks such a layer.
        UnsupportedModel: the model's layers are not numbered in its tensors' names.
    """
    count_field = next((entry for entry in LAYER_COUNT_FIELDS if entry in base.config), None)
    if count_field is None or not any(LAYER_IN_NAME.search(tensor_name) for tensor_name in base.tensors):
        raise UnsupportedModel("the model's layers are not numbered as Llama's or GPT-2's are", "take another model")
    if (
        not layer_numbers
        or list(layer_numbers) != sorted(set(layer_numbers))
        or not 0 <= layer_numbers[0] <= layer_numbers[-1] < base.config[count_field]
    ):
        raise UsageError(
            f"layers {list(layer_numbers)} of a model with {base.config[count_field]}",
            f"give numbers from 0 to {base.config[count_field] - 1}, ascending, each once",
        )
    return count_field


def write_layer_subset(base: Checkpoint, layer_numbers: Sequence[int], folder: Path) -> None:
    """Writes a checkpoint with some of the layers. config.json is written last: a folder with that file is complete.

    Args:
        base: the whole model.
        layer_numbers: the numbers of the layers that are kept, from 0, ascending.
        folder: the folder to write.

    Raises:
        UsageError, UnsupportedModel: see `layer_count_field`.
    """
    count_field = layer_count_field(base, layer_numbers)
    new_numbers = {number: new_number for new_number, number in enumerate(layer_numbers)}
    tensors = {}
    for tensor_name in base.tensors:
        match = LAYER_IN_NAME.search(tensor_name)
        if match is None:
            tensors[tensor_name] = base.read(tensor_name)
        elif int(match[2]) in new_numbers:
            new_name = LAYER_IN_NAME.sub(f"{match[1]}.{new_numbers[int(match[2])]}", tensor_name, count=1)
            tensors[new_name] = base.read(tensor_name)
    config = {**base.config, count_field: len(layer_numbers)}
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][number] for number in layer_numbers]
    files.make_private_dir(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if base.generation_config is not None:
        write_json(folder / "generation_config.json", base.generation_config)
    write_json(folder / "config.json", config)

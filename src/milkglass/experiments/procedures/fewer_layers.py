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


def require_layers(base: Checkpoint, kept: Sequence[int]) -> str:
    """Returns the config's name for the number of layers.

    Raises:
        UsageError: the numbers are not ascending, or the model lacks such a layer.
        UnsupportedModel: the tensors' names do not tell their layer.
    """
    name = next((entry for entry in COUNTS if entry in base.config), None)
    if name is None or not any(LAYER.search(tensor) for tensor in base.tensors):
        raise UnsupportedModel("the model's layers are not numbered as Llama's or GPT-2's are", "take another model")
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < base.config[name]:
        raise UsageError(
            f"layers {list(kept)} of a model with {base.config[name]}",
            f"give numbers from 0 to {base.config[name] - 1}, ascending, each once",
        )
    return name


def with_layers(base: Checkpoint, kept: Sequence[int], folder: Path) -> None:
    """Writes the checkpoint, config.json last, so that a folder with that file is complete.

    Args:
        kept: numbers of layers from 0, ascending.

    Raises:
        UsageError, UnsupportedModel: see `require_layers`.
    """
    name = require_layers(base, kept)
    new_numbers = {number: new_number for new_number, number in enumerate(kept)}
    tensors = {}
    for tensor in base.tensors:
        match = LAYER.search(tensor)
        if match is None:
            tensors[tensor] = base.read(tensor)
        elif int(match[2]) in new_numbers:
            tensors[LAYER.sub(f"{match[1]}.{new_numbers[int(match[2])]}", tensor, count=1)] = base.read(tensor)
    config = {**base.config, name: len(kept)}
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][number] for number in kept]
    files.private_dir(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if base.generation_config is not None:
        write_json(folder / "generation_config.json", base.generation_config)
    write_json(folder / "config.json", config)

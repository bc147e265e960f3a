"""Finds the tensors of a decoder's layers: heads, neurons, and what reads and writes the residual stream.

Schemes that change every layer need the layout (schemes/covariant.py). A scheme that mixes the stream's d dimensions
needs the stream (ObfusLM+): a tensor that `ResidualStreamNames` cannot name is refused, since it might read the stream,
and the model would silently change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint

Part = Literal["queries", "keys", "values", "output", "gate", "up", "down"]
OTHER_SCHEME_HINT = "use obfuslm for this model"
DEFAULT_ROTARY_BASE = 10_000.0  # of configs that name none


@dataclass(frozen=True)
class LayerNames:
    """Names the parts of a layer, as a family calls them.

    Attributes:
        parts: what a module computes, by the end of its name.
        refused: model types of the family whose layers cannot be changed, and why.
    """

    parts: Mapping[str, Part]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class LayerLayout:
    """Describes the layers of one checkpoint: their sizes, and what each tensor is.

    Attributes:
        part_of: the layer's number and the part of each weight and bias, by its name.
        layer_count: the number of layers.
        head_count: the number of query heads.
        key_head_count: the number of key heads, and of value heads.
        head_size: the dimensions of a head.
        neuron_count: the neurons of the feed-forward network.
        rotary_base: theta of the rotary positions.
    """

    part_of: Mapping[str, tuple[int, Part]]
    layer_count: int
    head_count: int
    key_head_count: int
    head_size: int
    neuron_count: int
    rotary_base: float

    @classmethod
    def of(cls, names: LayerNames, checkpoint: Checkpoint, tables: tuple[str, ...]) -> LayerLayout:
        """Finds the tensors of a checkpoint's layers. Raises UnsupportedModel if one is missing or fixed.

        `tables` are the names of the token-indexed tensors, which are left out.
        """
        config = checkpoint.config
        model_type = str(config.get("model_type"))
        if reason := names.refused.get(model_type):
            raise UnsupportedModel(f"the layers of {model_type} cannot be changed: {reason}", OTHER_SCHEME_HINT)
        part_pattern = "|".join(re.escape(name) for name in names.parts)
        part_of: dict[str, tuple[int, Part]] = {}
        for name in checkpoint.tensors:
            if name not in tables and (match := re.search(rf"\.(\d+)\.({part_pattern})\.(weight|bias)$", name)):
                part_of[name] = (int(match[1]), names.parts[match[2]])
        layer_count = int(config["num_hidden_layers"])
        required = {(layer, part) for layer in range(layer_count) for part in names.parts.values()}
        if missing_parts := sorted(
            required - {layer_part for name, layer_part in part_of.items() if name.endswith("weight")}
        ):
            raise UnsupportedModel(
                f"layer {missing_parts[0][0]} has no weights of its {missing_parts[0][1]}", "fetch the model again"
            )
        head_count = int(config["num_attention_heads"])
        head_size = config.get("head_dim") or int(config["hidden_size"]) // head_count
        key_head_count = config.get("num_key_value_heads") or head_count
        neuron_count = int(config["intermediate_size"])
        return cls(
            part_of, layer_count, head_count, int(key_head_count), int(head_size), neuron_count, _rotary_base(config)
        )


def _rotary_base(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return float(config.get("rope_theta") or rope.get("rope_theta") or DEFAULT_ROTARY_BASE)


@dataclass(frozen=True)
class ResidualStreamNames:
    """Names the tensors of the residual stream, as a family calls them, each by the end of its name.

    Attributes:
        readers: the matrices (g, d) that read the stream, each with the norm that scales its input.
        writers: the matrices (d, h) that write to the stream.
        biases: the writers' biases (d,).
        final_norm: the norm before the head.
        unrelated: tensors that never meet the stream, though they may have a size of d by chance.
        gain_offset: what is added to a stored gain, by model type (Gemma stores gains less one).
        refused: model types of the family that cannot be mixed, and why.
    """

    readers: Mapping[str, str]
    writers: tuple[str, ...]
    biases: tuple[str, ...]
    final_norm: str
    unrelated: tuple[str, ...]
    gain_offset: Mapping[str, float]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class ResidualStream:
    """Names the tensors of one checkpoint that read the residual stream, write to it and norm it.

    Attributes:
        width: d, the dimensions of the stream.
        readers: the norm before each tensor that reads the stream, by the tensor's name.
        writers: the tensors that write to the stream.
        biases: the writers' biases.
        norms: the norms of the layers, and the final one.
        final_norm: the norm before the head.
        gain_offset: what is added to a stored gain.
    """

    width: int
    readers: Mapping[str, str]
    writers: tuple[str, ...]
    biases: tuple[str, ...]
    norms: tuple[str, ...]
    final_norm: str
    gain_offset: float

    @classmethod
    def of(cls, names: ResidualStreamNames, checkpoint: Checkpoint, tables: tuple[str, ...]) -> ResidualStream:
        """Finds the stream of a checkpoint, without its `tables`. Raises UnsupportedModel if it cannot be mixed."""
        model_type = str(checkpoint.config.get("model_type"))
        if reason := names.refused.get(model_type):
            raise UnsupportedModel(
                f"the dimensions of {model_type} cannot be mixed: {reason}", "use ObfusLM without plus"
            )
        tensor_names = [name for name in checkpoint.tensors if name not in tables]
        final_norm = _only_tensor(tensor_names, names.final_norm)
        readers = {
            name: _sibling(name, norm)
            for name in tensor_names
            for end, norm in names.readers.items()
            if has_name_ending(name, end)
        }
        writers = tuple(name for name in tensor_names if has_name_ending(name, *names.writers))
        biases = tuple(name for name in tensor_names if has_name_ending(name, *names.biases))
        norms = (*sorted(set(readers.values())), final_norm)
        known_names = {*readers, *writers, *biases, *norms}
        for name in tensor_names:
            if name not in known_names and not has_name_ending(name, *names.unrelated):
                raise UnsupportedModel(
                    f"{name} may meet the residual stream, and nothing says how", "use ObfusLM without plus"
                )
        if missing_parts := sorted(known_names - set(tensor_names)):
            raise UnsupportedModel(f"{missing_parts[0]} is missing", "fetch the model again")
        width = checkpoint.tensors[final_norm].shape[0]
        return cls(width, readers, writers, biases, norms, final_norm, names.gain_offset.get(model_type, 0.0))


def has_name_ending(name: str, *endings: str) -> bool:
    """Returns whether a tensor's full name is one of `endings`, or ends with one after a dot."""
    return any(name == part or name.endswith("." + part) for part in endings)


def _only_tensor(names: list[str], ending: str) -> str:
    """Returns the tensor of that name outside all layers. Raises UnsupportedModel unless there is just one."""
    outside_layers = [name for name in names if has_name_ending(name, ending) and not re.search(r"\.\d+\.", name)]
    if len(outside_layers) != 1:
        raise UnsupportedModel(
            f"there are {len(outside_layers)} tensors named {ending}, 1 is needed", "use ObfusLM without plus"
        )
    return outside_layers[0]


def _sibling(name: str, norm: str) -> str:
    """Returns the norm in the layer of `name`."""
    layer = re.match(r"(.*\.\d+\.)", name)
    return f"{layer[1] if layer else ''}{norm}"

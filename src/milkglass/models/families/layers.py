"""The tensors of a decoder's layers: heads, neurons, and what reads and writes the residual stream.

Schemes that change every layer need the layout (schemes/covariant.py). A scheme that mixes the stream's d dimensions
needs the stream (ObfusLM+): a tensor that `StreamNames` cannot name is refused, since it might read the stream, and the
model would silently change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint

Part = Literal["queries", "keys", "values", "output", "gate", "up", "down"]
HINT = "use obfuslm for this model"
ROTARY_BASE = 10_000.0  # the default of configs


@dataclass(frozen=True)
class LayerNames:
    """A family's names for the parts of a layer.

    Attributes:
        parts: what a module computes, by the end of its name.
        without: model types of the family whose layers cannot be changed, and why.
    """

    parts: Mapping[str, Part]
    without: Mapping[str, str]


@dataclass(frozen=True)
class LayerLayout:
    """The layers of one checkpoint.

    Attributes:
        places: the number of its layer and the part, by the name of each weight and bias.
        heads: the number of query heads.
        head_size: the dimensions of a head.
        neurons: the neurons of the feed-forward network.
        rotary_base: theta of the rotary positions.
    """

    places: Mapping[str, tuple[int, Part]]
    layers: int
    heads: int
    key_heads: int
    head_size: int
    neurons: int
    rotary_base: float

    @classmethod
    def of(cls, names: LayerNames, checkpoint: Checkpoint, tables: tuple[str, ...]) -> LayerLayout:
        """Finds a checkpoint's layers, without its `tables`. Raises UnsupportedModel if one is missing or fixed."""
        config = checkpoint.config
        kind = str(config.get("model_type"))
        if reason := names.without.get(kind):
            raise UnsupportedModel(f"the layers of {kind} cannot be changed: {reason}", HINT)
        ends = "|".join(re.escape(one) for one in names.parts)
        places: dict[str, tuple[int, Part]] = {}
        for name in checkpoint.tensors:
            if name not in tables and (match := re.search(rf"\.(\d+)\.({ends})\.(weight|bias)$", name)):
                places[name] = (int(match[1]), names.parts[match[2]])
        layers = int(config["num_hidden_layers"])
        whole = {(number, part) for number in range(layers) for part in names.parts.values()}
        if lost := sorted(whole - {one for name, one in places.items() if name.endswith("weight")}):
            raise UnsupportedModel(f"layer {lost[0][0]} has no weights of its {lost[0][1]}", "fetch the model again")
        heads = int(config["num_attention_heads"])
        size = config.get("head_dim") or int(config["hidden_size"]) // heads
        key_heads = config.get("num_key_value_heads") or heads
        neurons = int(config["intermediate_size"])
        return cls(places, layers, heads, int(key_heads), int(size), neurons, _rotary_base(config))


def _rotary_base(config: Mapping[str, Any]) -> float:
    held = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return float(config.get("rope_theta") or held.get("rope_theta") or ROTARY_BASE)


@dataclass(frozen=True)
class StreamNames:
    """A family's names for the tensors of the stream, each by the end of its name.

    Attributes:
        readers: matrices (g, d), with the norm of their own layer whose gain is applied before them.
        writers: matrices (d, h).
        biases: the writers' biases (d,).
        final: the norm before the head.
        inside: tensors that never meet the stream, though they may have a size of d by chance.
        unit: is added to a stored gain (Gemma stores it less one).
        without: model types of the family that cannot be mixed, and why.
    """

    readers: Mapping[str, str]
    writers: tuple[str, ...]
    biases: tuple[str, ...]
    final: str
    inside: tuple[str, ...]
    unit: Mapping[str, float]
    without: Mapping[str, str]


@dataclass(frozen=True)
class Residual:
    """The residual stream of one checkpoint.

    Attributes:
        readers: the norm before each tensor that reads it, by the tensor's name.
        writers: the tensors that write to it.
        norms: the norms of the layers, and the final one.
    """

    width: int
    readers: Mapping[str, str]
    writers: tuple[str, ...]
    biases: tuple[str, ...]
    norms: tuple[str, ...]
    final: str
    unit: float

    @classmethod
    def of(cls, stream: StreamNames, checkpoint: Checkpoint, tables: tuple[str, ...]) -> Residual:
        """Finds the stream of a checkpoint, without its `tables`. Raises UnsupportedModel if it cannot be mixed."""
        kind = str(checkpoint.config.get("model_type"))
        if reason := stream.without.get(kind):
            raise UnsupportedModel(f"the dimensions of {kind} cannot be mixed: {reason}", "use ObfusLM without plus")
        names = [name for name in checkpoint.tensors if name not in tables]
        final = _one(names, stream.final)
        readers = {
            name: _sibling(name, norm) for name in names for end, norm in stream.readers.items() if ends(name, end)
        }
        writers = tuple(name for name in names if ends(name, *stream.writers))
        biases = tuple(name for name in names if ends(name, *stream.biases))
        norms = (*sorted(set(readers.values())), final)
        known = {*readers, *writers, *biases, *norms}
        for name in names:
            if name not in known and not ends(name, *stream.inside):
                raise UnsupportedModel(
                    f"{name} may meet the residual stream, and nothing says how", "use ObfusLM without plus"
                )
        if lost := sorted(known - set(names)):
            raise UnsupportedModel(f"{lost[0]} is missing", "fetch the model again")
        width = checkpoint.tensors[final].shape[0]
        return cls(width, readers, writers, biases, norms, final, stream.unit.get(kind, 0.0))


def ends(name: str, *parts: str) -> bool:
    """Returns whether a tensor's full name is one of these, or ends with one after a dot."""
    return any(name == one or name.endswith("." + one) for one in parts)


def _one(names: list[str], end: str) -> str:
    """Returns the tensor of that name outside all layers."""
    result = [name for name in names if ends(name, end) and not re.search(r"\.\d+\.", name)]
    if len(result) != 1:
        raise UnsupportedModel(f"there are {len(result)} tensors named {end}, 1 is needed", "use ObfusLM without plus")
    return result[0]


def _sibling(name: str, norm: str) -> str:
    """Returns the norm in the layer of `name`."""
    layer = re.match(r"(.*\.\d+\.)", name)
    return f"{layer[1] if layer else ''}{norm}"

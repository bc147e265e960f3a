"""What a decoder's layers hold: heads of queries, keys and values, and gated neurons; which tensor is which.

Needed by schemes that change every layer (schemes/covariant/). What touches the residual stream is residual.py's.
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
ROTARY_BASE = 10_000.0  # where a config does not say


@dataclass(frozen=True)
class LayerNames:
    """How a family names the parts of a layer.

    Attributes:
        parts: by the end of a module's name, what it computes.
        without: model types of the family whose layers cannot be changed, and why.
    """

    parts: Mapping[str, Part]
    without: Mapping[str, str]


@dataclass(frozen=True)
class LayerLayout:
    """The layers of one checkpoint.

    Attributes:
        places: The number of its layer and the part, by the name of each weight and bias.
        layers: How many layers.
        heads: Heads of queries.
        key_heads: Heads of keys and values.
        head_size: Dimensions of a head.
        neurons: Of the feed-forward network.
        rotary_base: Theta of the rotary positions.
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
        """Find the layers of a checkpoint. tables: the tensors indexed by token id. Raises UnsupportedModel."""
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

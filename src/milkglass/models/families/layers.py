"""The parts of a decoder's layers, heads of queries, keys and values, and gated neurons, and their tensors.

Schemes that change every layer need it (schemes/covariant/). residual.py describes the residual stream.
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
        layers: the number of layers.
        heads: the number of query heads.
        key_heads: the number of key and value heads.
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
        """Finds the layers of a checkpoint. Raises UnsupportedModel if one is missing or cannot be changed.

        Args:
            tables: the tensors that are indexed by token id.
        """
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

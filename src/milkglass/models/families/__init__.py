"""Model families: which tensors are indexed by token id, and which ids must not move.

A scheme calls `architecture_of(checkpoint)` and never tests a model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milkglass.catalogue import Catalogue
from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families.decoders import GPT2, LLAMA
from milkglass.models.families.encoders import BERT, DISTILBERT, MPNET, ROBERTA
from milkglass.models.families.family import Architecture, Family

FAMILIES: Catalogue[Family] = Catalogue(
    "family",
    BERT,
    ROBERTA,
    DISTILBERT,
    MPNET,
    GPT2,
    LLAMA,
    group="milkglass.family",
    kind=Family,
)
__all__ = ["FAMILIES", "Architecture", "Family", "family_of", "architecture_of"]


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a config. Raises UnsupportedModel, which names the model type and what is supported."""
    model_type = str(config.get("model_type", "(none)"))
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    names = ", ".join(sorted(name for family in FAMILIES.values() for name in family.model_types))
    raise UnsupportedModel(
        f"model type {model_type!r} is not supported: no file in models/families/ says which of its tensors are "
        "indexed by token id",
        f"supported: {names}",
    )


def architecture_of(checkpoint: Checkpoint) -> Architecture:
    """Finds the tables of a checkpoint. Raises UnsupportedModel if one that its family needs is missing."""
    return family_of(checkpoint.config).locate(checkpoint)

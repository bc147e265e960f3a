"""Defines a model family, and one model of it with its token-indexed tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families.layers import (
    LayerLayout,
    LayerNames,
    ResidualStream,
    ResidualStreamNames,
    has_name_ending,
)
from milkglass.models.safetensors_header import READABLE_DTYPES

ArchitectureKind = Literal["encoder", "decoder"]


def _no_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True)
class Architecture:
    """Describes one model of a family: its kind, its vocabulary, and the names of its token-indexed tensors.

    The first dimension of these tensors is the vocabulary. They are permuted and mixed in the same way, so that tied
    tensors stay tied.

    Attributes:
        family: the family of the model.
        kind: "encoder" or "decoder".
        vocab_size: n, the number of rows of the input embedding.
        table: the name of the input embedding (n, d).
        heads: the names of output embeddings (n, d); empty if they are tied or absent.
        biases: the names of output biases (n,).
        pinned: ids that must keep their place.
    """

    family: Family
    kind: ArchitectureKind
    vocab_size: int
    table: str
    heads: tuple[str, ...]
    biases: tuple[str, ...]
    pinned: tuple[int, ...]

    @property
    def token_tensor_names(self) -> tuple[str, ...]:
        """Returns the names of all tensors that are indexed by token id."""
        return (self.table, *self.heads, *self.biases)

    def residual(self, checkpoint: Checkpoint) -> ResidualStream:
        """Returns the tensors that read, write or norm the residual stream.

        Raises UnsupportedModel if its dimensions cannot be mixed.
        """
        if isinstance(self.family.stream, str):
            raise UnsupportedModel(
                f"the dimensions of {self.family.name} cannot be mixed: {self.family.stream}",
                "use ObfusLM without plus",
            )
        return ResidualStream.of(self.family.stream, checkpoint, self.token_tensor_names)

    def layout(self, checkpoint: Checkpoint) -> LayerLayout:
        """Returns the layers with their attention heads and neurons.

        Raises UnsupportedModel if these cannot be changed.
        """
        names = self.family.layers
        if names is None:
            raise UnsupportedModel(
                f"the layers of {self.family.name} cannot be changed: only decoders of the Llama family can",
                "use obfuslm for this model",
            )
        return LayerLayout.of(names, checkpoint, self.token_tensor_names)


@dataclass(frozen=True)
class Family:
    """Names the tensors of a family. A name is matched at the end of a tensor's full name, after a dot.

    Attributes:
        name: as messages call the family.
        kind: "encoder" or "decoder".
        model_types: the values of `model_type` in config.json that belong to it.
        table: names that the input embedding can have.
        stream: what touches the residual stream, or the reason why its dimensions cannot be mixed.
        neurons: the name of the module in each layer whose outputs enter the nonlinearity of the feed-forward network.
        heads: names of output embeddings.
        biases: names of output biases.
        pinned: takes the config, and returns the ids that must keep their place since the architecture uses the number
            itself.
        layers: the names of the parts of each layer, if a scheme may change them all.
        parts: the words between the dots of tensor names that no built-in family has (client/upload_names.py). A model
            with any other word cannot be uploaded.
    """

    name: str
    kind: ArchitectureKind
    model_types: tuple[str, ...]
    table: tuple[str, ...]
    stream: ResidualStreamNames | str
    neurons: str
    heads: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    pinned: Callable[[Mapping[str, Any]], tuple[int, ...]] = _no_ids
    layers: LayerNames | None = None
    parts: frozenset[str] = frozenset()

    def locate(self, checkpoint: Checkpoint) -> Architecture:
        """Finds a checkpoint's token-indexed tensors. Raises UnsupportedModel if one is missing or cannot be mixed."""
        tables = _matching(checkpoint, self.table)
        if len(tables) != 1:
            raise UnsupportedModel(
                f"this {self.name} checkpoint has {len(tables)} tensors named {' or '.join(self.table)}, 1 is needed",
                "give a checkpoint of the plain architecture, not of an adapter or a multimodal wrapper",
            )
        ref = checkpoint.tensors[tables[0]]
        if ref.dtype not in READABLE_DTYPES:
            raise UnsupportedModel(
                f"the embedding table is stored as {ref.dtype}; {', '.join(READABLE_DTYPES)} are supported",
                "quantised tables cannot be mixed: start from the unquantised model",
            )
        if "quantization_config" in checkpoint.config:
            raise UnsupportedModel("this checkpoint is quantised", "start from the unquantised model")
        heads, biases = _matching(checkpoint, self.heads), _matching(checkpoint, self.biases)
        for name in (tables[0], *heads, *biases):
            shape, dimensions = checkpoint.tensors[name].shape, 1 if name in biases else 2
            if len(shape) != dimensions:
                raise UnsupportedModel(
                    f"{name} has {len(shape)} dimensions, {dimensions} are needed", "give an undamaged checkpoint"
                )
            rows = shape[0]
            if rows != ref.shape[0]:
                raise UnsupportedModel(
                    f"{name} has {rows} rows and the embedding table {ref.shape[0]}",
                    "tables of different sizes are not supported: resize the model's embeddings first",
                )
        return Architecture(
            self, self.kind, ref.shape[0], tables[0], heads, biases, tuple(self.pinned(checkpoint.config))
        )


def _matching(checkpoint: Checkpoint, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in sorted(checkpoint.tensors) if has_name_ending(name, *names))

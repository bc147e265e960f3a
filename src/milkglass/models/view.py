"""Holds a model as an attacker has it: named tensors and a config, in memory or in a folder."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import family_of
from milkglass.models.families.layers import has_name_ending


@dataclass(frozen=True)
class StoredTensors(Mapping[str, torch.Tensor]):
    """Reads the tensors of a checkpoint, each when it is requested, and keeps none."""

    checkpoint: Checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name)

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self.checkpoint.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.tensors)

    def __len__(self) -> int:
        return len(self.checkpoint.tensors)


def overlay_tensors(
    base: Mapping[str, torch.Tensor], changed: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Returns a model's tensors with some of them replaced. A tensor is read when it is requested."""
    return ChainMap(cast("dict[str, torch.Tensor]", changed), cast("dict[str, torch.Tensor]", base))


def _headers(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns objects with the shape of each tensor: its `TensorRef` if it is in a file, else the tensor itself."""
    if isinstance(tensors, ChainMap):  # `overlay_tensors`
        return ChainMap(*(cast("dict[str, Any]", _headers(mapping)) for mapping in tensors.maps))
    return tensors.checkpoint.tensors if isinstance(tensors, StoredTensors) else tensors


def _map_tensor(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if isinstance(tensors, ChainMap):
        return _map_tensor(next(mapping for mapping in tensors.maps if name in mapping), name)
    return tensors.checkpoint.map_tensor(name) if isinstance(tensors, StoredTensors) else tensors[name]


@dataclass(frozen=True)
class Model:
    """Holds a model's tensors by their full names, and its config.

    Attributes:
        tensors: each in its own dtype.
        config: the object in config.json.
        folder: the checkpoint's folder, with its tokenizer if that is public. None: the model is in memory only.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    folder: Path | None = None

    @classmethod
    def open(cls, folder: Path) -> Model:
        """Opens a model folder, without reading a tensor. Raises what `Checkpoint.open` raises."""
        checkpoint = Checkpoint.open(folder)
        return cls(StoredTensors(checkpoint), checkpoint.config, folder)

    def _names_ending(self, suffixes: tuple[str, ...]) -> list[str]:
        return [name for name in self.tensors if has_name_ending(name, *suffixes)]

    @property
    def has_table(self) -> bool:
        """Returns whether there is an input table. The upper half of a cut model has none."""
        return bool(self._names_ending(family_of(self.config).table))

    @property
    def table_name(self) -> str:
        """Returns the full name of the input table. Raises IndexError if there is none."""
        return self._names_ending(family_of(self.config).table)[0]

    @property
    def table(self) -> torch.Tensor:
        """Returns (n, d) the input embeddings, fp32."""
        return self.tensors[self.table_name].float()

    @property
    def headers(self) -> Mapping[str, Any]:
        """Returns objects with the shape of each tensor, without reading tensors in files."""
        return _headers(self.tensors)

    def map_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor in its own dtype, memory-mapped from its file, or in memory. It must not be written to."""
        return _map_tensor(self.tensors, name)

    @property
    def width(self) -> int:
        """Returns the length of a row of the table."""
        return int(self.headers[self.table_name].shape[1])

    @property
    def vocab_size(self) -> int:
        """Returns the number of rows of the table."""
        return int(self.headers[self.table_name].shape[0])

    @property
    def head(self) -> torch.Tensor | None:
        """Returns (n, d) the output embeddings in fp32, or None if they are not a tensor of their own."""
        names = self._names_ending(family_of(self.config).heads)
        return self.tensors[names[0]].float() if names else None

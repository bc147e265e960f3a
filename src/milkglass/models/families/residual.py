"""The residual stream: which tensors read its d dimensions, which write to them, and the norms between.

A scheme that mixes these dimensions needs it (ObfusLM+). A tensor that this file cannot name is refused: it might read
the stream, and the model would silently change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint


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
        width: its dimensions.
        readers: the norm before each tensor that reads it, by the tensor's name.
        writers: the tensors that write to it.
        biases: the writers' biases.
        norms: the norms of the layers, and the final one.
        final: the norm before the head.
        unit: is added to a stored gain.
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
        """Finds the stream of a checkpoint. Raises UnsupportedModel if its dimensions cannot be mixed.

        Args:
            tables: the tensors that are indexed by token id.
        """
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

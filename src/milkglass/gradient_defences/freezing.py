"""Freezes embeddings, so that their gradient is not shared (Gupta et al. 2022, section 6).

The nonzero rows of the word table's gradient are the batch's bag of words; those of the position table show the length.
All other parameters are still trained and shared, the norm after the embeddings too. A span check on the first layer
(attacks/gradients/dager.py) needs no table's gradient. Nothing is promised. A table is an embedding module, and its
kind follows from its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from milkglass import papers
from milkglass.errors import UsageError
from milkglass.gradient_defences.defence import GradientDefence, copy_step
from milkglass.papers import Paper
from milkglass.threat.training_step import SharedStep

EmbeddingKind = Literal["word", "position", "type"]


@dataclass(frozen=True)
class FrozenEmbeddings(GradientDefence):
    """Leaves embeddings untrained, so that their gradients are not shared. A head tied to the word table is frozen too.

    Attributes:
        kinds: the tables that are frozen; one that a model lacks is left out.

    Raises:
        UsageError: no kind is named.
    """

    kinds: tuple[EmbeddingKind, ...] = ("word", "position", "type")

    name: ClassVar[str] = "frozen-embeddings"
    paper: ClassVar[Paper | None] = papers.FREEZING.with_deviations(
        "They freeze word embeddings; position and type embeddings are frozen too, unless only words are named."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kinds:
            raise UsageError("kinds is an empty list", f"some of {', '.join(get_args(EmbeddingKind))}")

    def prepare_step(self, step: SharedStep) -> SharedStep:
        """Returns the step with frozen tables. Raises UsageError if the model lacks them, or trains nothing else."""
        selected = frozenset(name for name, kind in embedding_kinds(step).items() if kind in self.kinds)
        if not selected:
            raise UsageError(f"this model has no embeddings of kind {', '.join(self.kinds)}", "name others")
        return copy_step(step, selected)


def embedding_kinds(step: SharedStep) -> dict[str, str]:
    """Returns the kind of each embedding table by its parameter's name: an `EmbeddingKind`, or "other".

    A tied parameter has its first name.
    """
    word_table = step.module.get_input_embeddings()
    kinds = {
        id(module.weight): _kind_by_name(name)
        for name, module in step.module.named_modules()
        if isinstance(module, torch.nn.Embedding)
    } | {id(word_table.weight): "word"}
    return {name: kinds[id(parameter)] for name, parameter in step.module.named_parameters() if id(parameter) in kinds}


def _kind_by_name(name: str) -> str:
    """Returns "position", "type" or "other" by the name of an embedding module."""
    last = name.rsplit(".", 1)[-1]
    if "position" in last or last == "wpe":
        return "position"
    return "type" if "type" in last else "other"

"""Frozen embeddings: they are not trained, so that their gradient is not shared (Gupta et al. 2022, section 6).

The nonzero rows of the word table's gradient are the batch's bag of words; those of the position table show the length.
Everything above is still trained and shared, the norm after the embeddings too: a span check on the first layer needs
no table's gradient. Nothing is promised. A table is an embedding module, and its kind follows from its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from milkglass import papers
from milkglass.errors import UsageError
from milkglass.gradient_defences.defence import GradientDefence, alter_step
from milkglass.papers import Paper
from milkglass.threat.training_step import SharedStep

Kind = Literal["word", "position", "type"]


@dataclass(frozen=True)
class FrozenEmbeddings(GradientDefence):
    """Trains no embeddings, so that their gradients are not shared. A head tied to the word table is frozen with it.

    Attributes:
        kinds: the tables that are frozen; one that a model lacks is left out.

    Raises:
        UsageError: no kind is named.
    """

    kinds: tuple[Kind, ...] = ("word", "position", "type")

    name: ClassVar[str] = "frozen-embeddings"
    paper: ClassVar[Paper | None] = papers.FREEZING.but(
        "They freeze word embeddings; position and type embeddings are frozen too, unless only words are named."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kinds:
            raise UsageError("kinds is an empty list", f"some of {', '.join(get_args(Kind))}")

    def before(self, step: SharedStep) -> SharedStep:
        """Returns the step. Raises UsageError if the model has none of these tables, or trains nothing else."""
        selected = frozenset(name for name, kind in tables(step).items() if kind in self.kinds)
        if not selected:
            raise UsageError(f"this model has no embeddings of kind {', '.join(self.kinds)}", "name others")
        return alter_step(step, selected)


def tables(step: SharedStep) -> dict[str, str]:
    """Returns the kinds of the parameters of embedding modules, by name. A tied parameter has its first name."""
    word_table = step.module.get_input_embeddings()
    kinds = {
        id(module.weight): _kind(name)
        for name, module in step.module.named_modules()
        if isinstance(module, torch.nn.Embedding)
    } | {id(word_table.weight): "word"}
    return {name: kinds[id(parameter)] for name, parameter in step.module.named_parameters() if id(parameter) in kinds}


def _kind(name: str) -> str:
    last = name.rsplit(".", 1)[-1]
    if "position" in last or last == "wpe":
        return "position"
    return "type" if "type" in last else "other"

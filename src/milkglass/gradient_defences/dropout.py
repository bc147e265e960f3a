"""Takes the step with dropout on, so that an attacker who repeats the step draws other masks.

GRAB (Feng et al. 2024) optimises the masks with the text; GHOST's comparison runs all attacks without dropout. The
masks are drawn again at each step. Nothing is promised. Models have the rate in a Dropout module or, for attention, as
a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from milkglass import papers
from milkglass.errors import UsageError
from milkglass.gradient_defences.defence import GradientDefence, copy_step
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.threat.training_step import SharedStep


@dataclass(frozen=True)
class Dropout(GradientDefence):
    """Takes the step with dropout, with secret masks.

    Attributes:
        rate: the probability with which an entry is dropped, wherever the model has dropout; a Llama has it only in its
            attention.
    """

    rate: float = limited_field(0.1, above=0, below=1, hint="models are trained with 0.1")

    name: ClassVar[str] = "dropout"
    paper: ClassVar[Paper | None] = papers.GRAB.with_deviations(
        "One rate for hidden states and attention; models come with 0.1 for both, or with 0."
    )

    def prepare_step(self, step: SharedStep) -> SharedStep:
        """Returns the step with dropout. Raises UsageError if the model has no place that drops."""
        with_dropout = copy_step(step, uses_dropout=True)
        dropout_count = 0
        for module in with_dropout.module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = self.rate
                dropout_count += 1
            elif isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = self.rate
                dropout_count += 1
        if not dropout_count:
            raise UsageError("this model has no dropout", "give a model of another family, or another defence")
        return with_dropout

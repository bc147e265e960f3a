"""No defence, in two halves: the control of the methods that disturb hidden states.

What is sent is what the client's half computes. With `send = "tokens"` the two halves are the whole model, trained by
the same loop as the methods beside it; with "mean" or "first" the server has CAPE's head over one vector a text. What
is left between a method and its control is the noise, the method's own loss, CAPE's scaling to 0 ... 1, and a learning
rate or batch size of its own where a recipe gives it one.

It is in no catalogue that a command offers: there is nothing to protect a text here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from milkglass import papers
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.halves import Head, pooled
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.root import NoiseStream
from milkglass.papers import Paper


@dataclass(frozen=True)
class Undisturbed(HiddenStateDefence):
    """The control and its parameters.

    Attributes:
        send: every token's state, or one vector a text.
    """

    layer: int | None = None
    send: Literal["tokens", "mean", "first"] = "tokens"

    name: ClassVar[str] = "undisturbed"
    paper: ClassVar[Paper] = papers.ours("The same halves with nothing disturbed")

    @property
    def pooled(self) -> bool:
        return self.send != "tokens"

    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        return hidden if self.send == "tokens" else pooled(hidden, self.send)[None]

    def upper(self, model: Any, base: Checkpoint, classes: int) -> torch.nn.Module:
        return Head(int(model.config.hidden_size), classes) if self.pooled else super().upper(model, base, classes)

"""Splits a model and disturbs nothing: the control of the methods that disturb hidden states.

The client sends what its half computes. With `send = "tokens"` the two halves are the whole model, trained by the same
loop as those methods; with "mean" or "first" the server has CAPE's head over one vector a text. A method differs from
its control in the noise, its own loss, CAPE's scaling to 0 ... 1, and in the learning rate or batch size if a recipe
sets its own. Commands do not offer this control, because it protects nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from milkglass import papers
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.halves import Head, pool
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.root import NoiseStream
from milkglass.papers import Paper


@dataclass(frozen=True)
class Undisturbed(HiddenStateDefence):
    """Sends what the client's half computes, undisturbed: the control of defences of hidden states.

    Attributes:
        layer: how many layers the client runs. None: all.
        send: every token's state ("tokens"), or one vector a text: the "mean" of its states or the "first" of them.
    """

    layer: int | None = None
    send: Literal["tokens", "mean", "first"] = "tokens"

    name: ClassVar[str] = "undisturbed"
    loss_is_mean: ClassVar[bool] = True
    paper: ClassVar[Paper] = papers.unpublished_method("The same halves with nothing disturbed")

    @property
    def pooled(self) -> bool:
        return self.send != "tokens"

    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        return hidden if self.send == "tokens" else pool(hidden, self.send)[None]

    def upper(self, model: Any, base: Checkpoint, classes: int) -> torch.nn.Module:
        return Head(int(model.config.hidden_size), classes) if self.pooled else super().upper(model, base, classes)

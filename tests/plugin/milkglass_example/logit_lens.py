"""Logit lens: read each hidden vector as the token whose public embedding has the largest product with it.

    argmax over v of  h . E_v        h: a state that was sent; E: the public table, by which a tied head reads states

A model adds what its layers write to one residual stream, and the token's own embedding is in it from the start. What
is left of it after a few layers still points to the token more than to most others.

Out of scope: positions, contexts, and how the layers turn the stream. `near_hidden.py` runs the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from milkglass import papers
from milkglass.attacks.hidden_states.own_states import why_no_token_states
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Activations, Transcript


@dataclass(frozen=True)
class LogitLens(Attack):
    """The attack that this module describes.

    Attributes:
        k: how many ranks the guess has.
    """

    k: int = 10

    name = "logit-lens"
    title = "Logit lens"
    paper = papers.PRIVACY_BERT.with_deviations("Products with the public table, in place of distances between states.")
    sees = frozenset({Activations})
    assumes = frozenset({"public_model"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return why_no_token_states(transcript, require_known(knowledge.public_model).width)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        turned = require_known(knowledge.public_model).table.float().T
        states = torch.cat([one.hidden.float() for one in transcript.all(Activations)])
        best = [(rows @ turned).topk(self.k).indices for rows in states.split(512)]
        return Guess(by_token=torch.cat(best).numpy())

"""Finds the words of a text from the states that a client sends (Song and Raghunathan 2020, section 4.2).

This is MLC (`mlc.py`) for a server that receives hidden states only: one vector a text, or the mean of one a token. The
attacker runs public text through the same client half with its own draws (Kerckhoffs) and trains one linear layer from
these vectors to the words of the text. A word is guessed if its probability is at least one half.

If a method pools, as CAPE does, no vector stands for a token, and this attack remains. It finds neither the order nor
the number of the words, and only words of the public text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from milkglass import device
from milkglass.attacks import work
from milkglass.attacks.hidden_states.mlc import LinearWordClassifier
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Activations, Transcript


def mean_states(activations: Activations) -> torch.Tensor:
    """Returns (texts, d) the mean of each text's states, on the device."""
    text_of_row = torch.repeat_interleave(torch.arange(len(activations.lengths)), torch.from_numpy(activations.lengths))
    sums = torch.zeros(len(activations.lengths), activations.hidden.shape[1]).index_add_(
        0, text_of_row, activations.hidden.float()
    )
    return device.move(sums / torch.from_numpy(activations.lengths).clamp_min(1)[:, None])


@dataclass(frozen=True)
class HiddenWords(LinearWordClassifier):
    """Names the words of each text by a linear layer over the states that were sent for it."""

    name = "hidden-words"
    title = "Words in a text, from states"
    sees = frozenset({Activations})
    assumes = frozenset({"corpus", "observe"})
    min_seconds = 10.0

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if (require_known(knowledge.corpus).lengths > 0).sum() < 2:
            return "fewer than two public texts hold a token: their vectors cannot be distinguished from others"
        if any(activations.mixed_row_counts is not None for activations in transcript.all(Activations)):
            return "the rows of each text are mixed with random signs, and their mean says nothing"
        widths = {activations.hidden.shape[1] for activations in transcript.all(Activations)}
        return None if len(widths) == 1 else f"the states have {len(widths)} different widths"

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        corpus = require_known(knowledge.corpus)
        public = corpus.select(np.flatnonzero(corpus.lengths > 0))
        own_states = require_known(knowledge.observe)(public, int(rng.integers(2**31)))
        budget.spend(work.layers(1 + own_states.layer, own_states.hidden))
        own_vectors = mean_states(own_states)
        centre, spread = own_vectors.mean(0), own_vectors.std(0, correction=0).clamp_min(1e-6)
        seen_vectors = torch.cat([mean_states(activations) for activations in transcript.all(Activations)])
        vocabulary = np.unique(public.ids)
        layer = self.train((own_vectors - centre) / spread, public, vocabulary, budget, rng)
        was_reached = np.ones(len(seen_vectors), np.bool_)
        return Guess(bags=self.predict_words(layer, (seen_vectors - centre) / spread, was_reached, vocabulary))

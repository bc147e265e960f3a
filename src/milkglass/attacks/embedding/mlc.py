"""MLC: which words does a text contain, from one vector for the whole text (Song and Raghunathan 2020, section 4.2).

Multi-label classification: the attacker runs public text through the scrambled model under a key of its own, takes one
embedding a text (the mean of the last hidden states), and trains one linear layer to say for each public id whether it
is in the text; a word is guessed where its probability is at least one half.

    p(w in text) = sigmoid(a_w . embedding + b_w),     loss: binary cross-entropy over the vocabulary

Order and number are not read. Words that public text hardly has are never guessed: with a small corpus the attack finds
function words and little else.

What it does not know: the tokens, although a server under ObfusLM has their ids. It is the attack for a server that is
sent nothing but embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from milkglass.attacks.forward import body, hidden
from milkglass.modelview import Model
from milkglass.paper import Paper
from milkglass.sequences import Sequences
from milkglass.threat import Attack, Budget, Guess, Knowledge, Observation, Tokens, Transcript, Weights


def embeddings(model: Model, texts: Sequences) -> torch.Tensor:
    """(b, d) the mean of each text's last hidden states; zero for an empty text."""
    states = hidden(body(model), texts)
    owner = torch.from_numpy(texts.owner)
    sums = torch.zeros(len(texts), states.shape[1]).index_add_(0, owner, states)
    return sums / torch.from_numpy(texts.lengths).clamp_min(1)[:, None]


@dataclass(frozen=True)
class MLC(Attack):
    """rate: Adam's. epochs, batch_size: of the linear layer. threshold: a word's probability from which it is named."""

    learning_rate: float = 1e-2
    epochs: int = 30
    batch_size: int = 64
    threshold: float = 0.5

    name: ClassVar[str] = "mlc"
    title: ClassVar[str] = "Words in a text (multi-label)"
    paper: ClassVar[Paper] = Paper(
        "Information Leakage in Embedding Models",
        "Song, Raghunathan",
        2020,
        "CCS",
        ("Rate 1e-2 on standardised embeddings in place of 5e-5: with a small corpus the latter learns nothing.",),
    )
    sees: ClassVar[frozenset[type[Observation]]] = frozenset({Weights, Tokens})
    assumes: ClassVar[frozenset[str]] = frozenset({"public_model", "corpus", "simulate"})
    needs: ClassVar[float] = 30.0

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        assert knowledge.corpus is not None
        assert knowledge.simulate is not None
        own, sigma = knowledge.simulate(int(rng.integers(2**31)))
        public = knowledge.corpus
        given = embeddings(own, public.mapped(sigma))
        centre, spread = given.mean(0), given.std(0).clamp_min(1e-6)
        words = np.unique(public.ids)
        layer = self.train((given - centre) / spread, public, words, budget, rng)
        model = transcript.weights(tuned=False) or transcript.weights(tuned=True)
        assert model is not None
        seen = (embeddings(model, transcript.tokens) - centre) / spread
        with torch.inference_mode():
            named = torch.cat([torch.sigmoid(layer(block)) >= self.threshold for block in seen.split(1024)]).numpy()
        return Guess(bags=tuple(words[row] for row in named))

    def train(
        self, given: torch.Tensor, public: Sequences, words: np.ndarray, budget: Budget, rng: np.random.Generator
    ) -> torch.nn.Linear:
        """One output a word that the public text has."""
        layer = torch.nn.Linear(given.shape[1], len(words))
        torch.nn.init.zeros_(layer.weight)  # nothing is drawn but the order of the texts, and that from `rng`
        column = np.searchsorted(words, public.ids)
        present = torch.zeros(len(public), len(words), dtype=torch.bool)
        present[torch.from_numpy(public.owner), torch.from_numpy(column)] = True
        share = present.float().mean(0).clamp(1e-4, 1 - 1e-4)
        with torch.no_grad():
            layer.bias.copy_(torch.log(share / (1 - share)))  # begin at each word's own frequency
        optimiser = torch.optim.Adam(layer.parameters(), lr=self.learning_rate)
        for epoch in range(self.epochs):
            order = torch.from_numpy(rng.permutation(len(public)))
            for rows in order.split(self.batch_size):
                if budget.left() <= 0:
                    return layer
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    layer(given[rows]), present[rows].float(), reduction="sum"
                ) / len(rows)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
            budget.progress((epoch + 1) / self.epochs)
        return layer

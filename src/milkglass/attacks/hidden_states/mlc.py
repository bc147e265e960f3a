"""Finds the words of a text from one vector for the whole text: MLC (Song and Raghunathan 2020, section 4.2).

Multi-label classification. The attacker runs public text through the scrambled model under a key of its own and takes
one embedding a text, the mean of the last hidden states. One linear layer learns for each public id whether it is in
the text. A word is guessed if its probability is at least one half.

    p(w in text) = sigmoid(a_w . embedding + b_w),     loss: binary cross-entropy over the vocabulary

It is the attack for a server that receives embeddings only. It finds neither order nor number, and never guesses words
that are rare in the public text: with a small corpus it finds function words and little else. With a short budget it
takes a random part of the public text, and names nothing in sent texts that it did not reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.attacks.forward import batches_within, body, hidden_states, stack, take_step
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack, Cost
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript, Weights

# Shares of the budget that must be left after the public texts are embedded, and after the sent ones
SHARE_LEFT_AFTER_PUBLIC, SHARE_LEFT_AFTER_SENT = 0.5, 0.25
TEXTS_AT_A_TIME = 1024  # texts whose words are named at a time


def mean_states(
    model: Model, texts: Sequences, groups: Iterable[Ids], budget: Budget
) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """Computes one embedding of each text, the mean of its last hidden states.

    Args:
        model: runs the texts.
        texts: ids of that model.
        groups: the indices of the texts of each batch; a text that is in none is not read.
        budget: is charged for the forward passes.

    Returns:
        (texts, d) the embeddings, zero for a text that was not read, and (texts,) whether each was read.
    """
    runner = body(model)
    means = torch.zeros(len(texts), runner.config.hidden_size, device=device.current())
    was_read = np.zeros(len(texts), np.bool_)
    for text_indices in groups:
        means[torch.from_numpy(text_indices)] = hidden_states(runner, stack(texts, text_indices)).mean(1)
        was_read[text_indices] = True
        budget.spend(work.forward(runner, int(texts.lengths[text_indices].sum())))
    return means, was_read


@dataclass(frozen=True)
class LinearWordClassifier(Attack):
    """Names the words of a text from one vector, by a linear layer. The base of MLC and hidden-words.

    Attributes:
        learning_rate: Adam's learning rate.
        epochs: how many passes over the public texts.
        batch_size: how many texts a step has.
        threshold: the probability from which on a word is named.
    """

    learning_rate: float = 1e-2
    epochs: int = 30
    batch_size: int = 64
    threshold: float = 0.5

    paper = papers.EMBEDDING_LEAKAGE.with_deviations(
        "Rate 1e-2 on standardised embeddings in place of 5e-5: with a small corpus the latter learns nothing."
    )

    @torch.inference_mode()
    def predict_words(
        self, layer: torch.nn.Linear, vectors: torch.Tensor, is_reached: NDArray[np.bool_], vocabulary: Ids
    ) -> tuple[Ids, ...]:
        """Returns the words of each text, none for a text that was not reached.

        Args:
            layer: from `train`.
            vectors: (texts, d) the texts' vectors, standardised as those that the layer was trained on.
            is_reached: (texts,) whether each text has a vector.
            vocabulary: (w,) the public ids that the layer names.
        """
        bags: list[Ids] = []
        for rows in torch.arange(len(vectors)).split(TEXTS_AT_A_TIME):
            is_named = (
                device.array(torch.sigmoid(layer(vectors[rows])) >= self.threshold) & is_reached[rows.numpy(), None]
            )
            bags += [vocabulary[row] for row in is_named]
        return tuple(bags)

    def train(
        self, vectors: torch.Tensor, public: Sequences, vocabulary: Ids, budget: Budget, rng: np.random.Generator
    ) -> torch.nn.Linear:
        """Returns a layer that is trained to name the words of a text from its vector.

        Args:
            vectors: (texts, d) the standardised vectors of public texts.
            public: these texts, in public ids.
            vocabulary: (w,) the public ids that are named, ascending.
            budget: ends the training.
            rng: draws the order of the texts.
        """
        layer = device.move(torch.nn.Linear(vectors.shape[1], len(vocabulary)))
        torch.nn.init.zeros_(layer.weight)  # nothing is drawn but the order of the texts, and that from `rng`
        columns = np.searchsorted(vocabulary, public.ids)
        is_present = csr_array(
            (np.ones(len(columns), np.float32), (public.sequence_indices, columns)), (len(public), len(vocabulary))
        )
        is_present.sum_duplicates()
        is_present.data[:] = 1.0
        text_share = torch.from_numpy(is_present.sum(axis=0) / len(public)).float().clamp(1e-4, 1 - 1e-4)
        with torch.no_grad():
            layer.bias.copy_(torch.log(text_share / (1 - text_share)))  # begin at each word's own frequency
        optimiser = torch.optim.Adam(layer.parameters(), lr=self.learning_rate, fused=True)
        for epoch in range(self.epochs):
            order = torch.from_numpy(rng.permutation(len(public)))
            for rows in order.split(self.batch_size):
                if budget.left() <= 0:
                    return layer
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    layer(vectors[rows]), device.tensor(is_present[rows.numpy()].toarray()), reduction="sum"
                ) / len(rows)
                take_step(optimiser, loss)
                budget.spend(work.training_step(layer, len(rows)) + work.elements(5.0 * len(rows) * len(vocabulary)))
            budget.progress((epoch + 1) / self.epochs)
        return layer


@dataclass(frozen=True)
class MLC(LinearWordClassifier):
    """Names the words of each text by a linear layer over the mean of its last hidden states."""

    name = "mlc"
    title = "Words in a text (multi-label)"
    cost = Cost(2, per_million_tokens=420)
    baseline = True
    sees = frozenset({Weights, Tokens})
    assumes = frozenset({"public_model", "corpus", "simulate"})
    min_seconds = 30.0

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        corpus = require_known(knowledge.corpus)
        if not len(corpus.ids):
            return "the public text holds no token"
        if (corpus.lengths > 0).sum() < 2:
            return "one public text is too few: its embedding cannot be distinguished from others"
        return None

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        corpus = require_known(knowledge.corpus)
        seconds, (public_rng, sent_rng) = budget.left(), rng.spawn(2)
        own_model, scrambled_id_of = require_known(knowledge.simulate)(int(rng.integers(2**31)))
        scrambled_corpus, sent = corpus.map_ids(scrambled_id_of), transcript.tokens
        means, was_read = mean_states(
            own_model,
            scrambled_corpus,
            batches_within(scrambled_corpus, budget, public_rng, SHARE_LEFT_AFTER_PUBLIC * seconds),
            budget,
        )
        read_corpus, means = corpus.select(np.flatnonzero(was_read)), means[torch.from_numpy(was_read)]
        centre = means.mean(0)
        deviation = means.std(0).clamp_min(1e-6) if len(means) > 1 else torch.ones_like(centre)
        sent_groups = batches_within(sent, budget, sent_rng, SHARE_LEFT_AFTER_SENT * seconds)
        sent_means, is_reached = mean_states(transcript.model, sent, sent_groups, budget)
        vocabulary = np.unique(read_corpus.ids)
        layer = self.train((means - centre) / deviation, read_corpus, vocabulary, budget, rng)
        return Guess(bags=self.predict_words(layer, (sent_means - centre) / deviation, is_reached, vocabulary))

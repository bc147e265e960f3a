"""Trains a model that turns hidden states into tokens (Kugler et al. 2021; settings of Zhou et al. 2023).

The attacker scrambles the public model under a key of its own (Kerckhoffs) and runs public text through its first
layers, which gives pairs of hidden states and tokens. A second transformer learns to map states to tokens and is then
given the client's states. Split inference sends these; under ObfusLM the server computes them from the scrambled ids
and the scrambled model.

    training:    states of the attacker's scrambled model (layer L)  ->  public ids,  token cross-entropy
    attack:      states of the client's scrambled model (layer L)    ->  guessed public ids

Settings of the papers: L = 3, rate 2e-5, batches of 8, 10 epochs, BERT-base as inversion model. Here the inversion
model starts from the public model itself, with its table as output layer. With a short budget the attack takes a random
part of the public text, trains while there is time, and reads a random part of the client's texts.

All initial weights are the public model's, and the order of the batches comes from the attack's own generator. Dropout
does not: torch draws it from one generator for the whole process. Two runs therefore differ slightly if other attacks
run beside them and the model has dropout. Seeding that generator here would disturb the others.

The attack reads each text separately.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.attacks.forward import batches, batches_within, body, places, sample_states, stack, take_step
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Activations, Tokens, Transcript, Weights

# Shares of the budget that must be left after the states of public text, and after those of the client's text
SHARE_LEFT_AFTER_PUBLIC, SHARE_LEFT_AFTER_SENT = 0.7, 0.6
TRAINING_SHARE = 0.8  # share of what is left then that the training may take
TOKENS_AT_A_TIME = 512  # tokens read at a time


class InverterSettings(Protocol):
    """Holds the settings by which an attack trains an inversion model."""

    @property
    def learning_rate(self) -> float:
        """Returns AdamW's learning rate."""

    @property
    def batch_size(self) -> int:
        """Returns the most texts of a batch."""

    @property
    def epochs(self) -> int:
        """Returns how many passes are made over the public text."""


def train(
    inverter: torch.nn.Module,
    states: torch.Tensor,
    corpus: Sequences,
    settings: InverterSettings,
    budget: Budget,
    rng: np.random.Generator,
    max_grad_norm: float | None = None,
) -> None:
    """Trains an inversion model in place, until the epochs are done or the budget is spent.

    Args:
        inverter: maps states (b, t, d) to scores of public ids (b, t, n).
        states: (total, d) one for each id of `corpus`.
        corpus: public text, in public ids.
        settings: the learning rate, the batches and the epochs.
        budget: ends the training.
        rng: draws the order of the batches.
        max_grad_norm: the norm to which a step's gradient is clipped. None: it is not.
    """
    optimiser = torch.optim.AdamW(inverter.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    groups = [
        group
        for text_indices in batches(corpus)
        for group in np.array_split(text_indices, -(-len(text_indices) // settings.batch_size))
    ]
    steps, steps_done = settings.epochs * len(groups), 0
    inverter.train()
    for _ in range(settings.epochs):
        for group_index in rng.permutation(len(groups)).tolist():
            if budget.left() <= 0:
                return
            expected = stack(corpus, groups[group_index])
            inputs = states[torch.from_numpy(places(corpus, groups[group_index]))].reshape(*expected.shape, -1)
            loss = torch.nn.functional.cross_entropy(inverter(inputs).flatten(0, 1), expected.flatten())
            take_step(optimiser, loss, max_grad_norm)
            steps_done += 1
            budget.spend(work.training_step(inverter, expected.numel()))
            budget.progress(steps_done / steps)


@torch.inference_mode()
def invert_states(
    inverter: torch.nn.Module, states: torch.Tensor, tokens: Sequences, groups: Iterable[Ids], k: int, budget: Budget
) -> Ids:
    """Reads texts from their states.

    Args:
        inverter: maps states (b, t, d) to scores of public ids (b, t, n).
        states: (total, d) one for each token of the texts.
        tokens: the texts, of which only the lengths are used.
        groups: the indices of the texts of each batch.
        k: the number of ranks of the guess.
        budget: is charged for the forward passes.

    Returns:
        (total, k) the likeliest public ids, and NO_BELIEF for texts that are in no group.
    """
    inverter.eval()
    guess = np.full((len(tokens.ids), k), NO_BELIEF, np.int64)
    for text_indices in groups:
        token_places = places(tokens, text_indices)
        inputs = states[torch.from_numpy(token_places)].reshape(len(text_indices), -1, states.shape[1])
        guess[token_places] = device.array(inverter(inputs).topk(k, dim=-1).indices.flatten(0, 1))
        budget.spend(work.forward(inverter, len(token_places)))
    return guess


class InvBertModel(torch.nn.Module):
    """Maps states (b, t, d) to scores of public ids (b, t, n), by the public model's body and table."""

    def __init__(self, public: Model, layers: int | None) -> None:
        super().__init__()
        self.body = body(public, layers)
        self.output_layer = device.move(torch.nn.Linear(public.table.shape[1], public.table.shape[0]))
        with torch.no_grad():
            self.output_layer.weight.copy_(public.table)
            self.output_layer.bias.zero_()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns (b, t, n) the scores of public ids for states (b, t, d)."""
        return self.output_layer(self.body(inputs_embeds=states).last_hidden_state)


@dataclass(frozen=True)
class InvBert(Attack):
    """Trains a transformer to turn hidden states into tokens, and gives it the client's states.

    Attributes:
        layer: the layer after which the states are taken.
        depth: how many of the public model's layers the inversion model has. None: all.
        learning_rate: AdamW's learning rate.
        batch_size: the most texts of a batch.
        epochs: how many passes over the public text.
        k: the number of ranks of the guess.
    """

    layer: int = 3
    depth: int | None = None
    learning_rate: float = 2e-5
    batch_size: int = 8
    epochs: int = 10
    k: int = 10

    name = "invbert"
    title = "Inversion model"
    baseline = True
    recovers_ids = True
    paper = papers.INVBERT.with_deviations(
        "The inversion model starts from the public model and its table, not from BERT-base.",
        "Batches hold sentences of one length, at most `batch_size` of them.",
    )
    sees = frozenset({Weights, Tokens})
    assumes = frozenset({"public_model", "corpus", "simulate"})
    min_seconds = 240.0

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        sent_states, texts = self._states_of_layer(transcript), transcript.tokens
        if sent_states and not np.array_equal(
            np.concatenate([activations.lengths for activations in sent_states]), texts.lengths
        ):
            return f"the states after layer {self.layer} are not those of the {len(texts)} texts that were sent"
        if any(len(activations.hidden) != activations.lengths.sum() for activations in sent_states):
            return f"the states after layer {self.layer} are not one for each token"
        return None if len(require_known(knowledge.corpus).ids) else "the public text holds no token"

    def _states_of_layer(self, transcript: Transcript) -> list[Activations]:
        """Returns the observed states of the layer that is attacked."""
        return [activations for activations in transcript.all(Activations) if activations.layer == self.layer]

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        public = require_known(knowledge.corpus)
        seconds, (public_rng, sent_rng, reading_rng) = budget.left(), rng.spawn(3)
        own_model, scrambled_id_of = require_known(knowledge.simulate)(int(rng.integers(2**31)))
        corpus = public.map_ids(scrambled_id_of)
        states, was_run = self.states(
            own_model, corpus, batches_within(corpus, budget, public_rng, SHARE_LEFT_AFTER_PUBLIC * seconds), budget
        )
        has_state = torch.from_numpy(was_run[corpus.sequence_indices])
        corpus = public.select(np.flatnonzero(was_run))
        sent_groups = batches_within(transcript.tokens, budget, sent_rng, SHARE_LEFT_AFTER_SENT * seconds)
        sent_states, is_reached = self.client_states(transcript, sent_groups, budget)
        inverter = InvBertModel(require_known(knowledge.public_model), self.depth)
        train(inverter, states[has_state], corpus, self, budget.part(TRAINING_SHARE, budget.progress), rng)
        reached_texts = np.flatnonzero(is_reached)
        texts = transcript.tokens.select(reached_texts)
        groups = (
            reached_texts[text_indices]
            for text_indices in batches_within(texts, budget, reading_rng, max_tokens=TOKENS_AT_A_TIME)
        )
        k = min(self.k, inverter.output_layer.out_features)
        return Guess(by_token=invert_states(inverter, sent_states, transcript.tokens, groups, k, budget))

    def states(
        self, model: Model, texts: Sequences, groups: Iterable[Ids], budget: Budget
    ) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Returns (total, d) the states of the texts in `groups`, and (texts,) whether each text was run.

        One more layer is run than needed, so that a decoder's last norm is not applied to the layer that is read.
        """
        return sample_states(body(model, self.layer + 1), texts, groups, budget, self.layer)

    def client_states(
        self, transcript: Transcript, groups: Iterable[Ids], budget: Budget
    ) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Returns (total, d) the client's states, and (texts,) whether each text has states.

        If states were sent, all texts have them. Else those of the texts in `groups` are computed from the ids.
        """
        if sent_states := self._states_of_layer(transcript):
            states = device.move(torch.cat([activations.hidden.float() for activations in sent_states]))
            return states, np.ones(len(transcript.tokens), np.bool_)
        return self.states(transcript.model, transcript.tokens, groups, budget)

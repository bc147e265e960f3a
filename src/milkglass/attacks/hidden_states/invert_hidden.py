"""Trains a model that turns the states that a client sends into tokens (Kugler et al. 2021).

The attacker runs public text through the same client half with its own draws (Kerckhoffs: `Knowledge.observe`) and
learns to map the disturbed states to the tokens behind them. Each of `copies` passes over the public text draws new
noise, so the attacker can learn from as many draws as it likes.

    scores (b, t, n) = table . (x + depth transformer layers of x),      x: the states, standardised, through one matrix

The model starts at the states themselves and the public table, so it also reads tokens that the public text lacks.
Unlike nearest neighbours, it uses the context and what training did to the client's half. It reads each text
separately, and does not use that texts repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from milkglass import device, papers
from milkglass.attacks.forward import batches
from milkglass.attacks.hidden_states.invbert import TOKENS_AT_A_TIME, invert_states, train
from milkglass.attacks.hidden_states.own_states import observe_corpus, why_no_token_states
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Activations, Transcript

OBSERVING_SHARE, TRAINING_SHARE = 0.2, 0.8  # of the budget for the attacker's own states; of the rest for training


class StateInverter(torch.nn.Module):
    """Maps states (b, t, d) to scores of public ids (b, t, n).

    Its first weights come from `generator`, since torch's own is shared with attacks that run beside this one.

    Attributes:
        centre, spread: (d,) the mean and the standard deviation of the attacker's own states.
    """

    def __init__(
        self, public: Model, centre: torch.Tensor, spread: torch.Tensor, depth: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        table = public.table
        d = table.shape[1]
        self.register_buffer("centre", centre)
        self.register_buffer("spread", spread)
        self.input_layer = torch.nn.Linear(len(centre), d)
        head_count = next(count for count in (8, 4, 2, 1) if d % count == 0)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(d, head_count, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.output_layer = torch.nn.Linear(d, len(table))
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if name.endswith(("bias", "out_proj.weight", "linear2.weight")):
                    parameter.zero_()
                elif parameter.dim() > 1:
                    parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
            self.input_layer.weight.copy_(torch.diag(spread))
            self.input_layer.bias.copy_(centre)
            self.output_layer.weight.copy_(table)
            self.output_layer.bias.zero_()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        hidden = self.input_layer((states - self.centre) / self.spread)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output_layer(hidden)


@dataclass(frozen=True)
class InvertHidden(Attack):
    """Trains a model on the attacker's own disturbed states to turn states into tokens.

    Attributes:
        depth: how many transformer layers the inversion model has; with 0 it is linear.
        copies: how often the public text is observed, each time with other draws.
        batch_size: the most texts of a batch.
        k: the number of ranks of the guess.
    """

    depth: int = 1
    copies: int = 1
    learning_rate: float = 1e-3
    batch_size: int = 16
    epochs: int = 10
    k: int = 10

    name = "invert-hidden"
    title = "Inversion of states"
    paper = papers.INVBERT.with_deviations(
        "One transformer layer that is drawn, and the public table to read it out, in place of a whole BERT.",
        "Rate 1e-3 and batches of one length, at most `batch_size` texts.",
    )
    sees = frozenset({Activations})
    assumes = frozenset({"public_model", "corpus", "observe"})
    min_seconds = 30.0

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if not len(require_known(knowledge.corpus).ids):
            return "the public text holds no token"
        return why_no_token_states(transcript, require_known(knowledge.public_model).width)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        states, corpus = observe_corpus(knowledge, budget.part(OBSERVING_SHARE), rng, self.copies)
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        centre, spread = states.mean(0), states.std(0, correction=0).clamp_min(1e-6)
        inverter = device.move(
            StateInverter(require_known(knowledge.public_model), centre.cpu(), spread.cpu(), self.depth, generator)
        )
        training_budget = budget.part(TRAINING_SHARE, budget.progress)
        train(inverter, states, corpus, self, training_budget, rng, max_grad_norm=1.0)
        guesses = [self.read(inverter, activations, budget) for activations in transcript.all(Activations)]
        return Guess(by_token=np.concatenate(guesses))

    def read(self, inverter: StateInverter, activations: Activations, budget: Budget) -> Ids:
        """Returns (rows, k) public ids, NO_BELIEF for texts that time does not reach."""
        shape = Sequences(np.zeros(len(activations.hidden), np.int64), activations.lengths)
        groups = takewhile(lambda _: budget.left() > 0, batches(shape, TOKENS_AT_A_TIME))
        k, hidden = min(self.k, inverter.output_layer.out_features), device.move(activations.hidden.float())
        return invert_states(inverter, hidden, shape, groups, k, budget)

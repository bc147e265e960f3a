"""Reads each hidden vector as the public token with the nearest representation.

This is the embedding inversion of Qu et al. 2021, section 4.2, applied to the states that split inference sends.

    layer 0:  argmax over v of cos(h_p, embeddings(v, position p))     position and layer norm as the model has them;
              of a decoder cos(h_p, table(v)): its client holds the table alone
    layer L:  argmax over v of cos(h_p, state after L layers of v, alone between the special tokens)

The attacker knows the positions, since rows come in the order of the text. Cosines ignore that a whole text was scaled,
as clipping does. If all public texts begin and end with the same ids, these are taken for the special tokens; without
public text a token is run alone.

After a few layers a state depends on the sentence more than on its token, and an attack that is trained on states
(`invert_hidden.py`) reads more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.attacks.embeddings.knn import nearest
from milkglass.attacks.forward import body, hidden_states
from milkglass.attacks.hidden_states.own_states import why_no_token_states
from milkglass.models.families import family_of
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Activations, Transcript

TOKENS_AT_A_TIME = 8192  # tokens that the embedding layer is given at a time
SINGLE_TOKENS_AT_A_TIME = 512  # tokens run at a time, each in a text of its own


@dataclass(frozen=True)
class NearHidden(Attack):
    """Reads each hidden state as the public tokens with the nearest states at the same place.

    Attributes:
        k: how many public tokens are guessed for each state.
    """

    k: int = 10

    name = "near-hidden"
    title = "Nearest state"
    paper = papers.PRIVACY_BERT.with_deviations(
        "States are compared with those of public tokens at the same place of the model, positions included.",
        "Cosine in place of Euclidean distance: a clipped text is a scaled one.",
    )
    sees = frozenset({Activations})
    assumes = frozenset({"public_model"})
    uses = frozenset({"corpus"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        public_model = require_known(knowledge.public_model)
        family = family_of(public_model.config)
        if family.kind != "encoder" and any(activations.layer for activations in transcript.all(Activations)):
            return f"{family.name} is a decoder, and of one only the embeddings are sent"
        return why_no_token_states(transcript, public_model.width)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        guesses = [self.read(activations, knowledge, budget) for activations in transcript.all(Activations)]
        return Guess(by_token=np.concatenate(guesses))

    def read(self, activations: Activations, knowledge: Knowledge, budget: Budget) -> Ids:
        """Returns (rows, k) public ids for the states of one observation, NO_BELIEF where the budget ended."""
        public_model = require_known(knowledge.public_model)
        if activations.layer == 0:
            if family_of(public_model.config).kind == "decoder":  # rows of the table, as they are
                return self._nearest(activations.hidden, public_model.table, budget)
            return self._by_position(activations, public_model, budget)
        table = lone_token_states(public_model, common_ends(knowledge.corpus), activations.layer)
        budget.spend(work.layers(activations.layer, table))
        return self._nearest(activations.hidden, table, budget)

    def _by_position(self, activations: Activations, public: Model, budget: Budget) -> Ids:
        """Returns (total, k) the tokens whose embeddings at the same position are nearest."""
        size = len(public.table)
        runner, position_offset = body(public, 0), max(family_of(public.config).pinned(public.config), default=-1) + 1
        positions = np.arange(len(activations.hidden)) - np.repeat(
            np.cumsum(activations.lengths) - activations.lengths, activations.lengths
        )
        guess = np.full((len(activations.hidden), min(self.k, size)), NO_BELIEF, np.int64)
        for position in np.unique(positions).tolist():
            if budget.left() <= 0:
                break
            rows = np.flatnonzero(positions == position)
            table = embed_vocabulary(runner, size, position + position_offset)
            budget.spend(work.elements(3 * table.numel()))
            guess[rows] = self._nearest(activations.hidden[torch.from_numpy(rows)], table, budget)
        return guess

    def _nearest(self, rows: torch.Tensor, table: torch.Tensor, budget: Budget) -> Ids:
        budget.spend(work.comparisons(rows, table))
        return nearest(rows, table, self.k).numpy()


@torch.inference_mode()
def embed_vocabulary(runner: Any, size: int, position: int) -> torch.Tensor:
    """Returns (n, d) the output of the embeddings for every token at this position."""
    embeddings = []
    for ids in torch.arange(size, device=device.current())[:, None].split(TOKENS_AT_A_TIME):
        embeddings.append(runner.embeddings(input_ids=ids, position_ids=torch.full_like(ids, position))[:, 0])
    return torch.cat(embeddings)


def common_ends(corpus: Sequences | None) -> tuple[Ids, Ids]:
    """Returns the id with which all public texts begin, and that with which they end, as arrays (1,), or (0,) if none.

    Texts of fewer than 3 ids do not count, and one text alone shows nothing.
    """
    counted_texts = [text for text in corpus if len(text) > 2] if corpus is not None else []
    firsts, lasts = ({int(text[end]) for text in counted_texts} for end in (0, -1))
    first, last = (
        np.array([*ids] if len(ids) == 1 and len(counted_texts) > 1 else [], np.int64) for ids in (firsts, lasts)
    )
    return first, last


def lone_token_states(public: Model, ends: tuple[Ids, Ids], layer: int) -> torch.Tensor:
    """Returns (n, d) the state of every token after `layer` layers, alone between these ends of a text."""
    runner, (prefix, suffix) = body(public, layer), ends
    states = []
    for token_ids in np.array_split(np.arange(len(public.table)), -(-len(public.table) // SINGLE_TOKENS_AT_A_TIME)):
        columns = [np.tile(prefix, (len(token_ids), 1)), token_ids[:, None], np.tile(suffix, (len(token_ids), 1))]
        texts = device.tensor(np.concatenate(columns, axis=1).astype(np.int64))
        states.append(hidden_states(runner, texts, layer)[:, len(prefix)])
    return torch.cat(states)

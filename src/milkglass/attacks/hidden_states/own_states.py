"""Observes the attacker's own states: public text that runs through the client half, as attacks on states need."""

from __future__ import annotations

import numpy as np
import torch

from milkglass import device
from milkglass.attacks import work
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Activations, Transcript

TEXTS_AT_A_TIME = 256  # texts observed at a time


def observe_corpus(
    knowledge: Knowledge, budget: Budget, rng: np.random.Generator, copies: int = 1
) -> tuple[torch.Tensor, Sequences]:
    """Returns the states of as much public text as time allows, in random order, and that text.

    Args:
        knowledge: has the public text, and `observe`.
        budget: ends the observation, after the first texts at the earliest.
        rng: draws the order of the texts, and the seed of the client half.
        copies: how often the text is observed, each time with other draws.
    """
    corpus = require_known(knowledge.corpus)
    seed = int(rng.integers(2**31))
    states: list[torch.Tensor] = []
    texts: list[Ids] = []
    nonempty = np.flatnonzero(corpus.lengths > 0)
    for copy in range(copies):
        for text_indices in np.array_split(rng.permutation(nonempty), -(-len(nonempty) // TEXTS_AT_A_TIME)):
            if states and budget.left() <= 0:
                break
            selected = corpus.select(text_indices)
            observation = require_known(knowledge.observe)(selected, seed + copy)
            states.append(observation.hidden.float())
            texts.extend(selected)
            budget.spend(work.layers(1 + observation.layer, observation.hidden))
    return device.move(torch.cat(states)), Sequences.of(texts)


def why_no_token_states(transcript: Transcript, width: int | None = None) -> str | None:
    """Returns why the transcript does not have one state for each token, or None.

    Args:
        width: the dimensions that the public model's states have. None: states of any width will do.
    """
    for states in transcript.all(Activations):
        if states.pooled:
            return "the states are one for a text, and say nothing of single tokens"
        if states.mixed_row_counts is not None:
            return "the rows of each text are mixed, and stand for no single token"
        if len(states.hidden) != states.lengths.sum():
            return "the states are not one for each token"
        if width is not None and len(states.hidden) and states.hidden.shape[1] != width:
            return f"the states have {states.hidden.shape[1]} dimensions, the public model {width}"
    return None

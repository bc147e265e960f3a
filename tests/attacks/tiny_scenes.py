"""Scenes with whole tiny models: what was sent to one, and what one generated; groups of which nothing is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from milkglass.attacks.assignment import guess_by_rank
from milkglass.attacks.forward import batches, body, sample_states
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Outputs, Tokens, Transcript, Weights
from milkglass.threat.truth import Truth, score
from tests.attacks.scenes import SPECIAL, Change, chain, plain
from tests.tiny import VOCAB

TABLE = {"bert": "bert.embeddings.word_embeddings.weight", "llama-tied": "model.embed_tokens.weight"}


def hidden(model: Any, sequences: Sequences, layer: int | None = None) -> torch.Tensor:
    """(total, d) the state of every token."""
    return sample_states(model, sequences, batches(sequences), Budget(), layer)[0]


def moved(model: Model, name: str, change: Change, sigma: Ids, seed: int) -> Model:
    table = torch.empty_like(model.table)
    table[torch.from_numpy(sigma)] = change(model.table, seed)
    rest = {key: model.tensors[key] for key in model.tensors}
    heads = {key: table for key in rest if key.endswith("decoder.weight") or key == "lm_head.weight"}
    return Model({**rest, **heads, TABLE[name]: table}, model.config)


def setting(model: Model, change: Change, sentences: int = 60) -> tuple[Transcript, Knowledge, Truth]:
    sigma = np.random.default_rng(5).permutation(VOCAB).astype(np.int64)
    sent = Sequences.of(sigma[one] for one in chain(VOCAB, sentences, 1))
    ordinary = np.arange(VOCAB) >= SPECIAL

    def simulate(seed: int) -> tuple[Model, Ids]:
        own = np.random.default_rng(seed).permutation(VOCAB).astype(np.int64)
        return moved(model, "bert", change, own, seed), own

    return (
        Transcript((Weights(moved(model, "bert", change, sigma, 9)), Tokens(sent)), VOCAB),
        Knowledge(public_model=model, corpus=Sequences.of(chain(VOCAB, 400, 2)), simulate=simulate),
        Truth(np.argsort(sigma), ordinary, ordinary, lambda ids: " ".join(map(str, ids.tolist())), sent),
    )


def graded(attack: Attack, at: tuple[Transcript, Knowledge, Truth], measure: str = "tokens top-1") -> float:
    transcript, knowledge, truth = at
    guess = attack(transcript, knowledge, Budget(), np.random.default_rng(0))
    return score(guess, truth, np.random.default_rng(0))[measure].value


def generated(model: Model, sentences: int = 12) -> tuple[Transcript, Truth]:
    """Prompts and greedy answers of the permuted model."""
    sigma = np.random.default_rng(6).permutation(VOCAB).astype(np.int64)
    served = moved(model, "llama-tied", plain, sigma, 1)
    prompts = [one[:4] for one in chain(VOCAB, sentences, 3)]
    runner, head = body(model), model.table
    answers = []
    for prompt in prompts:
        ids = prompt.tolist()
        for _ in range(5):
            with torch.inference_mode():
                last = runner(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            ids.append(int((head @ last).argmax()))
        answers.append(np.array(ids[4:]))
    sent = Sequences.of(sigma[one] for one in answers)
    seen = (Weights(served), Outputs(sent, Sequences.of(sigma[p] for p in prompts)))
    every = np.ones(VOCAB, np.bool_)
    return (
        Transcript(seen, VOCAB),
        Truth(np.argsort(sigma), every, every, lambda ids: " ".join(map(str, ids.tolist())), sent),
    )


def right(guess: Guess, truth: Truth, measure: str = "tokens top-1") -> float:
    return score(guess, truth, np.random.default_rng(0))[measure].value


def unsolved(truth: Truth) -> Candidates:
    """Groups of about ten, each in an order of its own, with likelihoods that tell nothing."""
    rng, sigma = np.random.default_rng(3), np.argsort(truth.inverse)
    parts = np.array_split(np.arange(VOCAB), VOCAB // 10)
    groups = tuple(Group(rng.permutation(sigma[part]), part) for part in parts)
    flat = Candidates(groups, tuple(np.zeros((len(one.rows), len(one.members))) for one in groups))
    assert right(guess_by_rank(flat, VOCAB), truth) < 0.2
    return flat

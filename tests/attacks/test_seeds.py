"""Attacks that train models run side by side in threads of one process: none may seed what torch draws for the others,
and what it reads follows from its own generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from milkglass.attacks.hidden_states.invbert import InvBert
from milkglass.attacks.hidden_states.mlc import MLC
from milkglass.attacks.token_ids.sda import SDA
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from tests.attacks.scenes import chain
from tests.tiny import VOCAB, save


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Attack, int], Guess]:
    public = Model.open(save("bert", tmp_path_factory.mktemp("models") / "bert"))
    transcript = Transcript((Weights(public), Tokens(Sequences.of(chain(VOCAB, 10, 3)))), VOCAB)

    def simulate(seed: int) -> tuple[Model, Ids]:
        return public, np.arange(VOCAB)

    knowledge = Knowledge(public_model=public, corpus=Sequences.of(chain(VOCAB, 60, 2)), simulate=simulate)

    def guess(attack: Attack, drawn: int) -> Guess:
        torch.manual_seed(drawn)
        found = attack(transcript, knowledge, Budget(), np.random.default_rng(5))
        assert torch.initial_seed() == drawn
        return found

    return guess


def test_sda_reads_the_same_whatever_torch_has_drawn(read: Callable[[Attack, int], Guess]) -> None:
    attack = SDA(learning_rate=1e-3, steps=5, prior=0.0)
    first, second = (read(attack, drawn).by_token for drawn in (1, 2))
    assert first is not None and second is not None
    assert np.array_equal(first, second)


def test_mlc_names_the_same_words_whatever_torch_has_drawn(read: Callable[[Attack, int], Guess]) -> None:
    first, second = (read(MLC(epochs=5, threshold=0.2), drawn).bags for drawn in (1, 2))
    assert first is not None and second is not None
    assert sum(map(len, first)) > 0
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_invbert_starts_the_same_whatever_torch_has_drawn(read: Callable[[Attack, int], Guess]) -> None:
    """Its training draws dropout from torch's one generator; before it nothing is drawn."""
    first, second = (read(InvBert(layer=1, depth=1, epochs=0), drawn).by_token for drawn in (1, 2))
    assert first is not None and second is not None
    assert np.array_equal(first, second)
    read(InvBert(layer=1, depth=1, epochs=1), 3)

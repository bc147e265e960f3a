from __future__ import annotations

import numpy as np
import pytest
import torch

from milkglass.client.codec.codec import Codec
from milkglass.demo.attacker import Attacker, ordinary

N, D = 300, 32
SPECIAL = [0, 1]


class Words:
    """A tokenizer for showing only."""

    def decode(self, ids: list[int]) -> str:
        return " " if ids == [5] else f" w{ids[0]}"


@pytest.fixture
def codec() -> Codec:
    sigma = np.random.default_rng(0).permutation(N).astype(np.int32)
    visible = np.ones(N, np.bool_)
    visible[SPECIAL] = False
    return Codec(Words(), sigma, np.argsort(sigma).astype(np.int64), visible, np.ones(N, np.bool_), 64)


@pytest.fixture
def public() -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1))


def test_against_a_permutation_alone_it_reads_everything(codec: Codec, public: torch.Tensor) -> None:
    attacker = Attacker(public[torch.from_numpy(codec.inverse)], public, Words())
    found = attacker.grade(codec, np.arange(N), 10, sampled=100, seed=0)
    assert (found.vocabulary_top1, found.vocabulary_top3, found.running_top1, found.running_top3) == (1, 1, 1, 1)
    assert (found.sampled, found.running) == (100, N)


def test_against_a_table_of_noise_it_guesses(codec: Codec, public: torch.Tensor) -> None:
    noise = torch.randn(N, D, generator=torch.Generator().manual_seed(2))
    found = Attacker(noise, public, Words()).grade(codec, np.arange(N), 10, sampled=N, seed=0)
    assert found.vocabulary_top1 < 0.03
    assert (found.guess, found.nominal) == (1 / N, 0.1)


def test_special_tokens_are_left_out_of_the_vocabulary(codec: Codec, public: torch.Tensor) -> None:
    attacker = Attacker(public, public, Words())
    assert attacker.grade(codec, np.arange(9), 10, sampled=10_000, seed=0).sampled == N - len(SPECIAL)


def test_ordinary_drops_special_tokens_and_keeps_order(codec: Codec) -> None:
    original = np.array([0, 7, 9, 7, 1])
    assert ordinary(codec, codec.sigma[original]).tolist() == codec.sigma[[7, 9, 7]].tolist()


def test_view_shows_what_was_read_and_what_of_it_is_right(codec: Codec, public: torch.Tensor) -> None:
    table = public[torch.from_numpy(codec.inverse)].clone()
    table[codec.sigma[8]] = public[200]  # this one is misread
    view = Attacker(table, public, Words()).view(codec, "client", codec.sigma[[7, 8, 5]].astype(np.int64))
    assert view.server == tuple(codec.sigma[[7, 8, 5]].tolist())
    assert [(piece.text, piece.right) for piece in view.attacker] == [("w7", True), ("w200", False), ("␣", True)]
    assert view.right == 2


def test_an_empty_reply_has_no_pieces(codec: Codec, public: torch.Tensor) -> None:
    assert Attacker(public, public, Words()).view(codec, "", np.empty(0, np.int64)).attacker == ()

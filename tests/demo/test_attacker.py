from __future__ import annotations

import numpy as np
import pytest
import torch

from milkglass.client.codec.codec import Codec
from milkglass.demo.attacker import Reading, deciphered, neighbours, ordinary
from milkglass.models.view import Model
from milkglass.sequences import Sequences
from milkglass.threat.guess import NO_BELIEF

N, D = 300, 32
SPECIAL = [0, 1]
TABLE = "embeddings.word_embeddings.weight"
CONFIG = {"model_type": "bert"}


class Words:
    """A tokenizer for showing only."""

    def decode(self, ids: list[int]) -> str:
        return " " if ids == [5] else f" w{ids[0]}"


class LongWords(Words):
    """31 goes on with the word before it."""

    def decode(self, ids: list[int]) -> str:
        return "".join("ly" if one == 31 else f" w{one}" for one in ids)


@pytest.fixture
def codec() -> Codec:
    sigma = np.random.default_rng(0).permutation(N).astype(np.int32)
    visible = np.ones(N, np.bool_)
    visible[SPECIAL] = False
    return Codec(Words(), sigma, np.argsort(sigma).astype(np.int64), visible, np.ones(N, np.bool_), 64)


@pytest.fixture
def public() -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1))


def test_neighbours_read_a_permutation_alone(codec: Codec, public: torch.Tensor) -> None:
    uploaded = public[torch.from_numpy(codec.inverse)]
    assert neighbours(uploaded, public, np.arange(N), Words()).rates(codec, np.arange(N)) == (1, 1)


def test_neighbours_guess_where_the_table_is_noise(codec: Codec, public: torch.Tensor) -> None:
    noise = torch.randn(N, D, generator=torch.Generator().manual_seed(2))
    assert neighbours(noise, public, np.arange(N), Words()).rates(codec, np.arange(N))[0] < 0.03


def test_neighbours_read_no_other_ids_than_those_asked_for(codec: Codec, public: torch.Tensor) -> None:
    reading = neighbours(public, public, np.array([7, 9, 7]), Words())
    assert np.flatnonzero(reading.table[:, 0] != NO_BELIEF).tolist() == [7, 9]


def test_decipherment_reads_what_the_mixture_hides(codec: Codec, public: torch.Tensor) -> None:
    """Rows of two are mixed so evenly that the nearest row is a coin toss; neighbours in the text tell them apart."""
    pairs = np.arange(2, N).reshape(-1, 2)
    mixed = public.clone()
    noise = 0.02 * torch.randn(len(pairs), 1, generator=torch.Generator().manual_seed(3))
    first, second = public[pairs[:, 0]], public[pairs[:, 1]]
    mixed[pairs[:, 0]], mixed[pairs[:, 1]] = first * (0.5 + noise) + second * (0.5 - noise), (first + second) / 2
    uploaded = mixed[torch.from_numpy(codec.inverse)]
    rng = np.random.default_rng(4)
    follow = np.array([rng.choice(np.arange(2, N), 3, replace=False) for _ in range(N)])

    def texts(count: int) -> list[np.ndarray]:
        out = []
        for _ in range(count):
            text = [int(rng.integers(2, N))]
            while len(text) < 12:
                text.append(int(rng.choice(follow[text[-1]])))
            out.append(np.array(text, np.int64))
        return out

    private, known = texts(300), texts(600)
    sent = [codec.sigma[text].astype(np.int64) for text in private]
    views = [Model({TABLE: table}, CONFIG) for table in (uploaded, public)]
    reading = deciphered(*views, Sequences.of(sent), Sequences.of(known), Words())
    running = np.concatenate(sent)
    near = neighbours(uploaded, public, running, Words()).rates(codec, running)[0]
    assert reading.rates(codec, running)[0] > 0.9 > near + 0.2


def test_ordinary_drops_special_tokens_and_keeps_order(codec: Codec) -> None:
    original = np.array([0, 7, 9, 7, 1])
    assert ordinary(codec, codec.sigma[original]).tolist() == codec.sigma[[7, 9, 7]].tolist()


def test_view_shows_what_was_read_and_what_of_it_is_right(codec: Codec) -> None:
    table = np.repeat(codec.inverse[:, None], 3, axis=1)
    table[codec.sigma[8]], table[codec.sigma[9]] = 200, NO_BELIEF
    view = Reading(table, Words()).view(codec, "client", codec.sigma[[7, 8, 5, 9]].astype(np.int64))
    assert view.server == tuple(codec.sigma[[7, 8, 5, 9]].tolist())
    shown = [(piece.text, piece.right) for piece in view.attacker]
    assert shown == [("w7", True), ("w200", False), ("␣", True), ("·", False)]
    assert view.right == 2
    assert not any(piece.joined for piece in view.attacker)
    words = LongWords()
    pieces = Reading(table, words).view(codec, "client", codec.sigma[[7, 31, 31]].astype(np.int64)).attacker
    assert [(piece.text, piece.joined) for piece in pieces] == [("w7", False), ("ly", True), ("ly", True)]


def test_an_empty_reply_has_no_pieces(codec: Codec) -> None:
    assert Reading(np.zeros((N, 3), np.int64), Words()).view(codec, "", np.empty(0, np.int64)).attacker == ()

"""Beam search alone, with logits that a test can follow by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from milkglass.server.inference.beam_search import BeamParams, BeamSearch
from milkglass.server.inference.engine import ModelFailed

STOP = 0


def run(params: BeamParams, table: torch.Tensor) -> BeamSearch:
    """A model whose next id depends on the last one alone: logits (n, n), of each last id; the prompt's is 1."""
    search, last = BeamSearch(params), [1]
    while (step := search.step(table[last])) is not None:
        last = step[1]
    return search


def best(table: torch.Tensor, length: int, alpha: float) -> tuple[float, tuple[int, ...]]:
    """Every answer of at most so many ids, by the definition of a score."""
    logs, answers = table.double().log_softmax(-1).tolist(), list[tuple[float, tuple[int, ...]]]()
    ids = range(len(logs))
    for size in range(1, length + 1):
        for one in itertools.product(ids, repeat=size):
            whole = one[-1] == STOP or size == length
            if whole and STOP not in one[:-1]:
                total = sum(logs[a][b] for a, b in itertools.pairwise((1, *one)))
                answers.append((total / size**alpha, one))
    return max(answers)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_search_that_is_wide_enough_finds_the_best_of_all_answers(seed: int, alpha: float) -> None:
    """Of 6 ids 3 are never likely: 3 beams hold every prefix of one id that matters, and 8 of 9 of two."""
    table = torch.randn((24, 24), generator=torch.Generator().manual_seed(seed))
    table[:, 3:] -= 60  # the pool of a step needs a vocabulary; these are never chosen
    score, ids = best(table[:3, :3], 3, alpha)
    search = run(BeamParams(8, 3, frozenset({STOP}), alpha, early_stopping=False), table)
    found = search.finished[0]
    ended_early = len(found.ids) < 3
    assert found.score == pytest.approx(score, abs=1e-5) and found.ids == ids
    assert found.reason == ("stop" if found.ids[-1] == STOP else "length") and (not ended_early or ids[-1] == STOP)


def test_two_beams_find_what_greedy_decoding_misses() -> None:
    """1 -> 2 with 0.6, then four ids of 0.25 each; 1 -> 3 with 0.4, then 4 with 0.97: 0.388 against 0.15."""
    table = torch.full((8, 8), -30.0)
    table[1, 2], table[1, 3] = math.log(0.6), math.log(0.4)
    table[2, 4:] = math.log(0.25)
    table[3, 4], table[3, 5] = math.log(0.97), math.log(0.03)
    found = run(BeamParams(2, 2, frozenset()), table).finished[0]
    assert found.ids == (3, 4) and found.score == pytest.approx(math.log(0.4 * 0.97) / 2, abs=1e-5)


@pytest.mark.parametrize("early", [True, False])
def test_early_stopping_ends_with_the_first_hypotheses(early: bool) -> None:
    """A beam that would win in the end is not waited for, where that was asked."""
    table = torch.full((8, 8), -30.0)
    table[1, STOP], table[1, 2], table[1, 3] = math.log(0.4), math.log(0.35), math.log(0.25)
    table[2, STOP], table[2, 4] = math.log(0.45), math.log(0.55)
    table[3, STOP], table[3, 4] = math.log(0.4), math.log(0.6)
    table[4, 5] = table[5, 6] = table[6, STOP] = 0.0
    found = run(BeamParams(2, 8, frozenset({STOP}), 1.0, early), table).finished
    assert found[0].ids == ((0,) if early else (2, 4, 5, 6, 0)), found


def test_numbers_that_are_not_finite_are_refused() -> None:
    for bad in (math.nan, -math.inf):
        with pytest.raises(ModelFailed):
            BeamSearch(BeamParams(2, 4)).step(torch.full((1, 8), bad))

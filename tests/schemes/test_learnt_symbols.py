"""Symbols that are learnt with the task: on tasks where what must be told apart is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milkglass.errors import UsageError
from milkglass.noise.stream import Stream
from milkglass.schemes.coarse import Coarse
from milkglass.schemes.symbols.finder import Evidence, FoundSymbols, TaskTexts
from milkglass.schemes.symbols.kmeans import Clusters
from milkglass.schemes.symbols.learnt import LearntMap, SmallReader
from milkglass.sequences import Sequences

N = 80  # token 0 is special; of the others the class is their number modulo 4: 0 good, 1 bad, 2 and 3 say nothing


FEWER = 250  # steps


def draws(label: str) -> Stream:
    return Stream(label.encode().ljust(32, b"."))


def task(rows: int = 400, regression: bool = False) -> TaskTexts:
    """Four words each: one that is good or bad, and three that say nothing."""
    rng = np.random.default_rng(3)
    label = rng.integers(0, 2, rows)
    telling = 4 * rng.integers(1, N // 4, rows) + label
    others = 4 * rng.integers(1, N // 4, (rows, 3)) + rng.integers(2, 4, (rows, 3))
    texts = np.concatenate([others, telling[:, None]], axis=1)
    labels = 2.0 * label - 1 if regression else label.astype(np.float64)
    return TaskTexts(Sequences.of(rng.permuted(texts, axis=1).tolist()), labels, 0 if regression else 2)


def evidence(labelled: TaskTexts | None) -> Evidence:
    vectors = np.random.default_rng(5).standard_normal((N, 12)).astype(np.float32)
    counts = np.ones(N, np.int64) if labelled is None else labelled.texts.counts(N)
    return Evidence(counts, np.ones(N, np.float32), np.array([0]), (), labelled, lambda which: vectors)


def found(labelled: TaskTexts, symbols: int = 3, steps: int = FEWER) -> tuple[np.ndarray, FoundSymbols]:
    tokens = np.arange(4, N)
    mass = labelled.texts.counts(N)[tokens] + 0.3
    return tokens, LearntMap(spread=0.3, steps=steps).find(
        evidence(labelled), tokens, mass, symbols, draws, lambda done: None
    )


@pytest.mark.parametrize("regression", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_the_label_depends_on_is_told_apart_and_the_rest_is_not(regression: bool) -> None:
    """Vectors are noise, so that the labels alone can tell."""
    labelled = task(regression=regression)
    tokens, symbols = found(labelled)
    good, bad = symbols.symbol_of_token[tokens % 4 == 0], symbols.symbol_of_token[tokens % 4 == 1]
    silent = symbols.symbol_of_token[tokens % 4 >= 2]
    assert len({int(np.bincount(one).argmax()) for one in (good, bad, silent)}) == 3
    for one in (good, bad, silent):
        assert np.bincount(one).max() / len(one) > 0.85


def test_the_same_key_gives_the_same_map_and_leaves_other_generators_alone() -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    _, one = found(task(), steps=30)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(8)
    assert np.array_equal(one.symbol_of_token, found(task(), steps=30)[1].symbol_of_token)


def test_the_gradient_passes_through_the_choice_of_a_symbol() -> None:
    """Forward reads the centre of each symbol; backward reaches the points behind it."""
    labelled = task(rows=8)
    network = SmallReader(evidence(labelled).vectors("encoder"), np.arange(4, N), labelled, LearntMap()).eval()
    clusters = Clusters(np.arange(4, N), np.ones(N - 4), 2)
    ids, lengths = torch.from_numpy(np.stack(list(labelled.texts))), torch.full((8,), 4)
    plain, nothing = network(ids, lengths, clusters)
    assert nothing.item() == 0
    with torch.no_grad():
        points = network.points(torch.arange(4, N)).numpy()
    clusters.centres, clusters.symbol_of_token = points[:2].copy(), np.arange(N - 4) % 2
    quantised, apart = network(ids, lengths, clusters)
    centres = torch.from_numpy(clusters.centres)[(ids - 4) % 2]
    assert apart.item() == pytest.approx((network.points(ids) - centres).square().sum(-1).mean().item(), rel=1e-5)
    assert not torch.allclose(plain, quantised)
    quantised.sum().backward()
    assert network.offset.weight.grad is not None
    assert network.offset.weight.grad[ids.unique()].abs().sum() > 0


def test_centres_move_to_the_weighted_means_of_their_tokens() -> None:
    """By hand: sqrt(mass) of 1, 3, 1, 1; tokens 0 and 1 lie at 0 and 4, tokens 2 and 3 at 10 and 12."""
    clusters = Clusters(np.arange(4), np.array([1.0, 9.0, 1.0, 1.0]), 2)
    clusters.centres = np.array([[1.0], [11.0]], np.float32)
    clusters.run_round(np.array([[0.0], [4.0], [10.0], [12.0]], np.float32), 0.0, draws("x"))
    assert clusters.symbol_of_token.tolist() == [0, 0, 1, 1]
    assert clusters.centres.ravel().tolist() == pytest.approx([3.0, 11.0])


def test_rows_without_labels_are_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="labels") as caught:
        LearntMap().find(evidence(None), np.arange(4, N), np.ones(N - 4), 3, draws, lambda done: None)
    assert "way=kmeans" in str(caught.value.hint)


@pytest.mark.parametrize("way", ["learnt", "kmeans"])
def test_coarse_finds_its_map_either_way(way: str) -> None:
    scheme = Coarse(symbols=6, function_words=2, way=way, least_bits=0.5, learnt=LearntMap(steps=50))  # type: ignore[arg-type]
    labelled = task()
    made = scheme.fit(evidence(labelled), draws, lambda done: None)
    numbers = made.token_symbols
    assert len(numbers) == N
    assert numbers.max() + 1 <= 6 + 3
    commonest = np.argsort(-labelled.texts.counts(N), kind="stable")[:2]
    for alone in (0, *commonest):
        assert (numbers == numbers[alone]).sum() == 1

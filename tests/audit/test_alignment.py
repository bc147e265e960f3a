"""The order in which a client sent its tokens is found from many texts, and none is found where there is none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from milkglass.audit.alignment import likeliest_places, orders_of
from milkglass.sequences import Ids
from milkglass.threat.guess import NO_BELIEF

VOCABULARY = 2_000
FIRST, LAST = 0, 1  # stand at both ends of every text
SECRET = np.random.default_rng(5).permutation(VOCABULARY)
SYMBOLS = np.random.default_rng(6).integers(0, 16, VOCABULARY)


def texts_of(count: int) -> list[Ids]:
    """Returns texts of 8 to 29 tokens, some of them far more frequent than others."""
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, VOCABULARY - 1)
    words = [rng.choice(np.arange(2, VOCABULARY), rng.integers(6, 28), p=weights / weights.sum()) for _ in range(count)]
    return [np.array([FIRST, *one, LAST]) for one in words]


def moved(change: Callable[[Ids, np.random.Generator], Ids], order: Callable[[int], Ids]) -> tuple[list[Ids], float]:
    """Returns the places found for 400 texts, and the share of tokens whose true place or an equal id's was found."""
    rng = np.random.default_rng(2)
    texts = texts_of(400)
    sent_in_order = [change(ids, rng) for ids in texts]
    truth = [order(len(ids)) for ids in texts]
    sent = [np.empty_like(ids) for ids in texts]
    for one, ids, places in zip(sent, sent_in_order, truth, strict=True):
        one[places] = ids
    orders = [orders_of(len(ids), 1, 1) for ids in texts]
    found = likeliest_places(list(zip(texts, sent, strict=True)), list(zip(*orders, strict=True)))
    right = sum(
        int(np.count_nonzero(one[places[places != NO_BELIEF]] == ids[places != NO_BELIEF]))
        for one, ids, places in zip(sent, sent_in_order, found, strict=True)
    )
    return found, right / sum(map(len, texts))


def as_secret(ids: Ids, rng: np.random.Generator) -> Ids:
    return SECRET[ids]


def as_one_of_four(ids: Ids, rng: np.random.Generator) -> Ids:
    return 4 * SECRET[ids] + rng.integers(0, 4, len(ids))


def as_symbols(ids: Ids, rng: np.random.Generator) -> Ids:
    return SYMBOLS[ids]


def with_noise(ids: Ids, rng: np.random.Generator) -> Ids:
    return np.where(rng.random(len(ids)) < 0.4, ids, rng.integers(0, VOCABULARY, len(ids)))


@pytest.mark.parametrize("change", [as_secret, as_one_of_four, with_noise])
@pytest.mark.parametrize(
    "order",
    [
        lambda count: np.arange(count)[::-1],
        lambda count: (np.arange(count) + 1) % count,
        lambda count: np.array([0, *range(count - 2, 0, -1), count - 1]),
    ],
)
def test_tokens_that_were_moved_alike_are_found(
    change: Callable[[Ids, np.random.Generator], Ids], order: Callable[[int], Ids]
) -> None:
    found, _ = moved(change, order)
    inside = [(places[1:-1], order(len(places))[1:-1]) for places in found]
    assert all(np.array_equal(places, truth) for places, truth in inside)


@pytest.mark.parametrize(
    ("change", "least"), [(as_secret, 0.8), (as_one_of_four, 0.6), (as_symbols, 0.5), (with_noise, 0.35)]
)
def test_tokens_that_were_shuffled_text_by_text_are_found(
    change: Callable[[Ids, np.random.Generator], Ids], least: float
) -> None:
    rng = np.random.default_rng(7)
    _, right = moved(change, rng.permutation)
    assert right > least


@pytest.mark.parametrize(
    "change",
    [
        as_secret,
        as_one_of_four,
        as_symbols,
        with_noise,
        lambda ids, rng: rng.integers(0, VOCABULARY, len(ids)),
        lambda ids, rng: rng.integers(0, 16, len(ids)),
        lambda ids, rng: rng.integers(0, 2, len(ids)),
        lambda ids, rng: rng.permutation(VOCABULARY)[ids],
    ],
)
def test_the_order_of_the_text_is_kept_where_no_other_one_tells_more(
    change: Callable[[Ids, np.random.Generator], Ids],
) -> None:
    """Ids that are drawn for each text tell nothing in any order: an order that fits by chance would overstate it."""
    found, _ = moved(change, np.arange)
    assert all(np.array_equal(places, np.arange(len(places))) for places in found)


def test_texts_without_tokens_and_without_ids_have_places() -> None:
    none = np.zeros(0, np.int64)
    texts = [(none, none), (np.array([3, 4]), none), (none, np.array([5]))]
    in_order = [none, np.array([NO_BELIEF, NO_BELIEF]), none]
    places = likeliest_places(texts, [in_order])
    assert [one.tolist() for one in places] == [[], [NO_BELIEF, NO_BELIEF], []]

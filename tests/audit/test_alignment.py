"""The order in which a client sent its tokens is found from many texts, and none is found where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from milkglass.audit.alignment import IN_ORDER, LEARNT, Alignment, align, fixed_orders
from milkglass.sequences import Ids
from milkglass.threat.guess import NO_BELIEF

VOCABULARY = 2_000
FIRST, LAST = 0, 1  # stand at both ends of every text
SHARES = 1 / np.arange(1, VOCABULARY - 1)
SHARES /= SHARES.sum()  # of the words: some are far more frequent than others
SECRET = np.random.default_rng(5).permutation(VOCABULARY)
SYMBOLS = np.random.default_rng(6).integers(0, 16, VOCABULARY)
Rng = np.random.Generator
Change = Callable[[Ids, Rng], Ids]


def words(count: int, rng: Rng) -> Ids:
    return rng.choice(np.arange(2, VOCABULARY), count, p=SHARES)


def texts_of(count: int) -> list[Ids]:
    """Returns texts of 8 to 29 tokens."""
    rng = np.random.default_rng(1)
    return [np.array([FIRST, *words(int(rng.integers(6, 28)), rng), LAST]) for _ in range(count)]


def forms_of(count: int) -> list[Ids]:
    """Returns texts that differ in two tokens of 25."""
    rng = np.random.default_rng(1)
    return [np.array([FIRST, *range(2, 14), *words(2, rng), *range(14, 23), LAST]) for _ in range(count)]


def sent_in(
    change: Change, order: Callable[[int], Ids], texts: list[Ids] | None = None, **options: Any
) -> tuple[Alignment, float, float]:
    """Returns what is found of texts whose changed ids stand in this order.

    Two shares of the tokens stand beside it: of those whose place has the id that was sent for them, and of those that
    were sent as themselves, by the places that were found and by the true ones.
    """
    rng, texts = np.random.default_rng(2), texts or texts_of(200)
    changed = [change(ids, rng) for ids in texts]
    sent = [np.empty_like(ids) for ids in texts]
    for one, ids in zip(sent, changed, strict=True):
        one[order(len(ids))] = ids
    found = align(list(zip(texts, sent, strict=True)), fixed_orders(1, 1), **options)
    right = unchanged = 0
    for token_ids, ids, one, places in zip(texts, changed, sent, found.places, strict=True):
        is_sent = places != NO_BELIEF
        right += int(np.count_nonzero(one[places[is_sent]] == ids[is_sent]))
        unchanged += int(np.count_nonzero(one[places[is_sent]] == token_ids[is_sent]))
        unchanged -= int(np.count_nonzero(ids == token_ids))
    return found, right / sum(map(len, texts)), unchanged / sum(map(len, texts))


def as_it_is(ids: Ids, rng: Rng) -> Ids:
    return ids


def as_secret(ids: Ids, rng: Rng) -> Ids:
    return SECRET[ids]


def as_one_of_four(ids: Ids, rng: Rng) -> Ids:
    return 4 * SECRET[ids] + rng.integers(0, 4, len(ids))


def as_symbols(ids: Ids, rng: Rng) -> Ids:
    return SYMBOLS[ids]


def with_noise(ids: Ids, rng: Rng) -> Ids:
    """Keeps 40 % of the tokens; the others become words that are as frequent as those of the texts."""
    return np.where(rng.random(len(ids)) < 0.4, ids, words(len(ids), rng))


def with_words_of_the_text(ids: Ids, rng: Rng) -> Ids:
    return np.where(rng.random(len(ids)) < 0.4, ids, rng.choice(ids, len(ids)))


@pytest.mark.parametrize("change", [as_secret, as_one_of_four, with_noise])
@pytest.mark.parametrize(
    "order",
    [
        lambda count: np.arange(count)[::-1],
        lambda count: (np.arange(count) + 1) % count,
        lambda count: np.array([0, *range(count - 2, 0, -1), count - 1]),
    ],
)
def test_tokens_that_were_moved_alike_are_found(change: Change, order: Callable[[int], Ids]) -> None:
    found, _, _ = sent_in(change, order)
    assert found.order not in (IN_ORDER, LEARNT)
    assert all(np.array_equal(places[1:-1], order(len(places))[1:-1]) for places in found.places)


@pytest.mark.parametrize(
    ("change", "least"), [(as_it_is, 1.0), (as_secret, 0.8), (as_one_of_four, 0.6), (as_symbols, 0.5)]
)
def test_tokens_that_were_shuffled_text_by_text_are_found(change: Change, least: float) -> None:
    rng = np.random.default_rng(7)
    found, right, _ = sent_in(change, rng.permutation)
    assert found.order == LEARNT and right >= least


def test_what_is_kept_of_shuffled_words_is_found_and_little_more() -> None:
    """Words that noise draws may stand in the text by chance, so that some are counted as kept."""
    rng = np.random.default_rng(7)
    found, _, surplus = sent_in(with_noise, rng.permutation)
    assert found.order == LEARNT and -0.02 < surplus < 0.15


@pytest.mark.parametrize(
    "change",
    [
        as_it_is,
        as_secret,
        as_one_of_four,
        as_symbols,
        with_noise,
        with_words_of_the_text,
        lambda ids, rng: rng.integers(0, VOCABULARY, len(ids)),
        lambda ids, rng: words(len(ids), rng),
        lambda ids, rng: rng.integers(0, 16, len(ids)),
        lambda ids, rng: rng.integers(0, 2, len(ids)),
        lambda ids, rng: rng.permutation(VOCABULARY)[ids],
    ],
)
def test_the_order_of_the_text_is_kept_where_no_other_one_tells_more(change: Change) -> None:
    """Ids that are drawn for each text tell nothing in any order: an order that fits by chance would overstate it."""
    found, _, _ = sent_in(change, np.arange)
    assert found.order == IN_ORDER
    assert all(np.array_equal(one, np.arange(len(one))) or change is as_it_is for one in found.places)


def test_a_texts_own_ids_are_found_wherever_they_are() -> None:
    """Forms that differ in two tokens say little, and two names may change places: the ids themselves tell."""
    rng = np.random.default_rng(7)
    _, right, _ = sent_in(as_it_is, rng.permutation, forms_of(200))
    assert right == 1

    def with_two_exchanged(count: int) -> Ids:
        places = np.arange(count)
        one, other = rng.choice(np.arange(1, count - 1), 2, replace=False)
        places[[one, other]] = places[[other, one]]
        return places

    _, right, _ = sent_in(as_it_is, with_two_exchanged)
    assert right == 1


def test_the_words_of_forms_are_found() -> None:
    rng = np.random.default_rng(7)
    found, right, _ = sent_in(as_secret, rng.permutation, forms_of(400))
    assert found.order == LEARNT and right > 0.8


def test_an_order_of_its_own_for_each_text_is_not_learnt_where_it_must_not_be() -> None:
    rng = np.random.default_rng(7)
    assert sent_in(as_secret, rng.permutation, learns=False)[0].order == IN_ORDER


def test_texts_without_tokens_or_ids_and_a_single_one_have_places() -> None:
    none, one = np.zeros(0, np.int64), np.array([3])
    found = align([(none, none), (one, one)], fixed_orders())
    assert [places.tolist() for places in found.places] == [[], [0]]
    assert align([], fixed_orders()).places == []
    assert [places.tolist() for places in align([(one, np.array([7]))] * 5, fixed_orders()).places] == [[0]] * 5

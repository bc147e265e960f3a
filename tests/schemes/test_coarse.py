"""A coarse vocabulary: label scores, prices and limits by hand, the rows of symbols, and what the map keeps."""

from __future__ import annotations

from dataclasses import replace
from math import log, log2, sqrt

import numpy as np
import pytest
import torch

from milkglass.client.obfuscate.symbol_rate import rate_of
from milkglass.errors import UsageError
from milkglass.noise.stream import Stream
from milkglass.schemes.catalogue import scheme_named
from milkglass.schemes.coarse import Coarse
from milkglass.schemes.symbols.diversity import DiversityLimits, bits_and_largest_shares, join_symbols
from milkglass.schemes.symbols.finder import Evidence, FoundSymbols, TaskTexts
from milkglass.schemes.symbols.kmeans import KMeans, cheapest_symbols, label_scores, next_price, with_neighbours
from milkglass.schemes.symbols.symbol_map import SymbolMap
from milkglass.sequences import Sequences

N, SPECIAL = 400, np.arange(3)


def draws(label: str) -> Stream:
    return Stream(label.encode().ljust(32, b"."))


def evidence(seed: int = 1, pinned: tuple[int, ...] = (), labels: bool = True) -> Evidence:
    """Tokens in 20 clumps, Zipf's counts, and two classes of texts: odd clumps occur in class 1 alone."""
    rng = np.random.default_rng(seed)
    clump = rng.integers(0, 20, N)
    vectors = (rng.normal(size=(20, 16))[clump] + 0.3 * rng.normal(size=(N, 16))).astype(np.float32)
    counts = (3000 / (1 + rng.permutation(N))).astype(np.int64)
    counts[SPECIAL] = 0
    numbers = rng.integers(0, 2, 60)
    pools = [np.flatnonzero((clump % 2 == one) & (np.arange(N) > 2)) for one in (0, 1)]
    texts = Sequences.of(rng.choice(pools[one], 8) for one in numbers)
    task = TaskTexts(texts, numbers.astype(np.float64), 2) if labels else None
    return Evidence(counts, (counts + 0.3).astype(np.float32), SPECIAL, pinned, task, lambda kind: vectors)


def found(scheme: Coarse, seen: Evidence) -> Coarse:
    return scheme.fit(seen, draws, lambda done: None)


def own(scheme: Coarse, seen: Evidence) -> np.ndarray:
    return scheme.exempt_ids(seen.counts, seen.special, seen.pinned)


# --- the label score --------------------------------------------------------------------------------------------------
def test_label_scores_of_two_classes_by_hand() -> None:
    """Three texts of class 0, two of class 1. Token 5 is in two texts of class 1 and one of class 0, and is counted
    once a text."""
    texts = Sequences.of([[5, 5, 1], [1], [2], [5, 2], [5, 5, 5]])
    scores, trust = label_scores(TaskTexts(texts, np.array([0.0, 0, 0, 1, 1]), 2), 6)
    assert trust.tolist() == pytest.approx([0, 2 / 6, 2 / 6, 0, 0, 3 / 7])
    # log (2 + 1) / (2 + 2) - log (1 + 1) / (3 + 2), times 3 / (3 + 4), over sqrt 2
    assert scores[5, 1] == pytest.approx(3 / 7 * (log(3 / 4) - log(2 / 5)) / sqrt(2))
    assert scores[5, 0] == pytest.approx(-scores[5, 1])
    assert scores[1, 0] == pytest.approx(2 / 6 * (log(3 / 5) - log(1 / 4)) / sqrt(2))
    assert scores[3].tolist() == [0, 0]


def test_each_of_three_classes_is_set_against_the_others() -> None:
    texts = Sequences.of([[0], [0], [1], [0, 1]])
    scores, _ = label_scores(TaskTexts(texts, np.array([0.0, 1, 2, 2]), 3), 2)
    assert scores.shape == (2, 3)
    # token 1: both texts of class 2 hold it, neither of the two others
    assert scores[1, 2] == pytest.approx(2 / 6 * (log(3 / 4) - log(1 / 4)) / sqrt(2))
    assert scores[1, 0] == pytest.approx(2 / 6 * (log(1 / 3) - log(3 / 5)) / sqrt(2))


def test_a_regression_has_the_mean_score_of_the_texts() -> None:
    scores, _ = label_scores(TaskTexts(Sequences.of([[0], [0, 1], [2]]), np.array([1.5, -0.5, 0.25]), 0), 3)
    assert scores[:, 0].tolist() == pytest.approx([2 / 6 * 0.5, 1 / 5 * -0.5, 1 / 5 * 0.25])


def test_what_was_not_seen_has_its_neighbours_score() -> None:
    """Token 2 lies where token 0 lies; token 1, at a right angle, counts exp(-12) as much."""
    unit = np.array([[1, 0], [0, 1], [1, 0], [0, 1]], np.float32)
    scores, trust = np.array([[0.8], [-0.4], [0.0], [0.0]]), np.array([0.5, 0.4, 0.0, 0.0])
    found = with_neighbours(scores, trust, unit)[:, 0]
    near, far = 0.5, 0.4 * np.exp(-12)
    assert found[:2].tolist() == pytest.approx([0.8, -0.4])
    assert found[2] == pytest.approx(0.7 * (near * 0.8 - far * 0.4) / (near + far), abs=1e-6)
    assert found[3] == pytest.approx(-0.7 * 0.4, abs=1e-4)


# --- k-means ----------------------------------------------------------------------------------------------------------
def test_the_price_on_mass_by_hand() -> None:
    """Loads of 3/4 and 1/4 on two symbols: log(2 * 3/4 + 0.05) and log(2 * 1/4 + 0.05)."""
    price = next_price(np.array([1.0, 0.0]), np.array([6.0, 2.0]), 0.5)
    assert price.tolist() == pytest.approx([0.7 + 0.15 * log(1.55), 0.15 * log(0.55)])
    points, centres = np.array([[0.4], [0.6]], np.float32), np.array([[0.0], [1.0]], np.float32)
    assert cheapest_symbols(points, centres, np.zeros(2)).tolist() == [0, 1]
    # 0.4 costs 0.16 at the first centre and 0.36 at the second: a price of more than 0.2 drives it away
    assert cheapest_symbols(points, centres, np.array([0.21, 0.0])).tolist() == [1, 1]
    assert cheapest_symbols(points, centres, np.array([0.19, 0.0])).tolist() == [0, 1]


def test_a_price_evens_the_symbols_out() -> None:
    def most(price: float) -> float:
        scheme = Coarse(12, least_bits=0, most_share=1.0, kmeans=KMeans("table", 0, price))
        numbers = found(scheme, evidence()).token_symbols
        load = np.bincount(numbers[3:], evidence().counts[3:])
        return float((load[load > 0] / load.sum()).max())

    assert most(1.0) < most(0.0)


def test_labels_move_the_symbols() -> None:
    """With a large weight tokens of one class share symbols with their own kind only."""
    seen = evidence()
    assert seen.labelled is not None
    scores, trust = label_scores(seen.labelled, N)

    def mixed(weight: float) -> float:
        scheme = Coarse(12, least_bits=0, most_share=1.0, kmeans=KMeans("table", weight, 0))
        numbers, sure = found(scheme, seen).token_symbols, trust > 0.3
        sign = (scores[:, 1] > 0)[sure]
        share = np.bincount(numbers[sure], sign) / np.maximum(np.bincount(numbers[sure]), 1)
        return float(np.minimum(share, 1 - share)[numbers[sure]].mean())

    assert mixed(5.0) < 0.02 < mixed(0.0)
    plain = found(Coarse(12, kmeans=KMeans("table", 5.0)), evidence(labels=False))
    assert plain.map == found(Coarse(12, kmeans=KMeans("table", 0.0)), seen).map


# --- limits -----------------------------------------------------------------------------------------------------------
def test_bits_and_largest_shares_by_hand() -> None:
    bits, share = bits_and_largest_shares(np.array([0, 0, 0, 1, 1]), np.array([2.0, 1, 1, 3, 1]), 2)
    assert bits.tolist() == pytest.approx([1.5, -(0.75 * log2(0.75) + 0.25 * log2(0.25))])
    assert share.tolist() == pytest.approx([0.5, 0.75])


def test_a_symbol_that_breaks_a_limit_joins_the_nearest_with_which_it_holds() -> None:
    """Symbol 0 is 9 of 10 one token. Its neighbour 1 is too light to help; with 2, further away, the share is 9/19."""
    mass = np.array([9.0, 1, 0.5, 0.5, 5, 4, 4, 5])
    points = np.array([[0.0], [0], [1], [1], [2], [2], [9], [9]], np.float32)
    clusters = FoundSymbols(np.array([0, 0, 1, 1, 2, 2, 3, 3]), points)
    assert join_symbols(clusters, mass, DiversityLimits(0.9, 0.6)).tolist() == [1, 1, 0, 0, 1, 1, 2, 2]
    assert join_symbols(clusters, mass, DiversityLimits(0.0, 0.95)).tolist() == clusters.symbol_of_token.tolist()


def test_limits_hold_for_every_symbol_but_those_of_single_tokens() -> None:
    seen = evidence()
    scheme = found(Coarse(30, function_words=5, least_bits=2.0, most_share=0.6, kmeans=KMeans("table")), seen)
    numbers = scheme.token_symbols
    rate = rate_of(scheme, seen.counts, seen.counts, np.ones(N, np.bool_), own(scheme, seen))
    assert rate.unmet == 0 and rate.alone == len(SPECIAL) + 5
    for number in range(rate.ids):
        members = np.flatnonzero(numbers == number)
        if len(members) > 1:
            share = (seen.counts[members] + 0.3) / (seen.counts[members] + 0.3).sum()
            assert share.max() <= 0.6 and -(share * np.log2(share)).sum() >= 2.0
    commonest = np.argsort(-seen.counts, kind="stable")[:5]
    assert all((numbers == numbers[one]).sum() == 1 for one in (*commonest, *SPECIAL))


def test_what_cannot_be_met_is_reported() -> None:
    """One token has more than half of all mass: no symbol is large enough to hide it."""
    seen = evidence()
    seen.counts[7] = 10 * seen.counts.sum()
    scheme = found(Coarse(30, least_bits=1.0, most_share=0.5, kmeans=KMeans("table")), seen)
    rate = rate_of(scheme, seen.counts, seen.counts, np.ones(N, np.bool_), own(scheme, seen))
    assert rate.unmet == 1 and rate.unmet_running > 0.9
    assert rate.symbols > 10, "the others were not given up for it"


def test_a_symbol_of_one_token_breaks_the_limits_unless_it_is_exempt() -> None:
    scheme = Coarse(2, map=SymbolMap.of(np.array([0, 1, 2, 2]), np.ones(4)))
    rate = rate_of(scheme, np.array([0, 5, 5, 5]), np.array([0, 2, 1, 1]), np.zeros(4, np.bool_), np.array([0]))
    assert (rate.symbols, rate.alone, rate.unmet, rate.unmet_running) == (2, 1, 1, 0.5)


# --- the rate ---------------------------------------------------------------------------------------------------------
def test_the_rate_by_hand() -> None:
    """Two symbols and a special token. 6 and 2 tokens were sent of the symbols: H(3/4, 1/4)."""
    scheme = Coarse(2, map=SymbolMap.of(np.array([2, 0, 0, 1, 1]), np.ones(5)))
    counts, sent = np.array([0, 9, 1, 1, 9]), np.array([0, 4, 2, 1, 1])
    rate = rate_of(scheme, counts, sent, np.array([False, False, True, True, True]), np.array([0]))
    assert (rate.ids, rate.symbols, rate.alone) == (3, 2, 1)
    assert rate.most_bits == pytest.approx(log2(3))
    assert rate.bits == pytest.approx(-(0.75 * log2(0.75) + 0.25 * log2(0.25)))
    assert rate.running == pytest.approx(5 / 8)  # tokens 1 and 4 are the commonest of their symbols
    assert rate.content == pytest.approx(1 / 4)


def test_the_rate_of_exchanged_symbols_by_hand() -> None:
    """Two symbols and a special token; with e^epsilon = 3 a symbol is sent as it is with a chance of 3/4.

    H(1/4, 3/4) bits of a sent symbol are chance, so two symbols have 2^(1 - H) as much room as that many certain ones.
    6 and 2 tokens become 6 * 3/4 + 2 * 1/4 = 5 and 3 on average.
    """
    scheme = Coarse(2, epsilon=log(3), map=SymbolMap.of(np.array([2, 0, 0, 1, 1]), np.ones(5)))
    counts, sent = np.array([0, 9, 1, 1, 9]), np.array([0, 4, 2, 1, 1])
    rate = rate_of(scheme, counts, sent, np.array([False, False, True, True, True]), np.array([0]))
    chance = -(0.75 * log2(0.75) + 0.25 * log2(0.25))
    assert rate.most_bits == pytest.approx(log2(1 + 2 ** (1 - chance)))
    assert rate.bits == pytest.approx(-(5 / 8 * log2(5 / 8) + 3 / 8 * log2(3 / 8)) - chance)
    assert (rate.epsilon, rate.kept) == (log(3), pytest.approx(0.75))
    assert rate.running == pytest.approx(0.75 * 5 / 8)
    assert rate.content == pytest.approx(0.75 * 1 / 4)


def test_a_token_without_company_is_refused_beside_an_epsilon() -> None:
    """It would be sent as it is. Without limits on symbols some have one token."""
    bare = Coarse(100, least_bits=0, most_share=1, kmeans=KMeans("table"))
    numbers = found(bare, evidence()).token_symbols
    single = np.setdiff1d(np.flatnonzero(np.bincount(numbers) == 1), numbers[SPECIAL])
    assert len(single)
    with pytest.raises(UsageError, match=rf"\b{len(single)} of the symbols\b.*epsilon = 1\b"):
        found(replace(bare, epsilon=1.0), evidence())
    kept = found(Coarse(30, epsilon=1.0, kmeans=KMeans("table")), evidence())
    assert np.bincount(kept.token_symbols)[kept.token_symbols[3:]].min() > 1


def test_an_epsilon_is_above_0() -> None:
    with pytest.raises(UsageError, match="epsilon is 0"):
        Coarse(epsilon=0)
    assert scheme_named("coarse", {"epsilon": 2}).document()["epsilon"] == 2
    assert "epsilon" not in Coarse().document()


# --- rows, maps, parameters -------------------------------------------------------------------------------------------
def test_a_row_is_the_weighted_mean_of_its_tokens() -> None:
    rows = SymbolMap.of(np.array([1, 0, 0, 1]), np.array([1.0, 1, 3, 1])).mixture()
    table = torch.tensor([[2.0, 0], [1, 1], [5, 1], [4, 8]])
    assert rows.apply(table, np.array([0, 1])).tolist() == [[4, 1], [3, 4]]
    assert rows.apply(table[:, 0], np.array([1])).tolist() == [3]  # a bias


def test_pinned_tokens_keep_their_number() -> None:
    numbers = found(Coarse(30, kmeans=KMeans("table")), evidence(pinned=(1, 9))).token_symbols
    assert numbers[1] == 1 and numbers[9] == 9
    assert (numbers == 1).sum() == (numbers == 9).sum() == 1
    assert sorted(set(numbers.tolist())) == list(range(int(numbers.max()) + 1))
    with pytest.raises(UsageError, match="token 300 "):
        found(Coarse(30, kmeans=KMeans("table")), evidence(pinned=(300,)))


def test_one_secret_gives_one_map() -> None:
    one, same = (found(Coarse(30, kmeans=KMeans("table")), evidence()) for _ in range(2))
    assert one == same
    other = Coarse(30, kmeans=KMeans("table")).fit(evidence(), lambda label: Stream(b"o" * 32), lambda done: None)
    assert other.map != one.map


def test_a_document_keeps_the_map_and_its_repr_does_not_show_it() -> None:
    scheme = found(Coarse(30, kmeans=KMeans("table")), evidence())
    described = scheme.document()
    assert scheme_named(described.pop("name"), described) == scheme
    assert scheme.map is not None and scheme.map.tokens not in repr(scheme)


def test_maps_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="a number out"):
        SymbolMap.of(np.array([0, 2]), np.ones(2))
    with pytest.raises(UsageError, match="not above 0"):
        SymbolMap.of(np.array([0, 1]), np.array([1.0, 0.0]))
    with pytest.raises(UsageError, match="cannot be read"):
        Coarse(map=SymbolMap("no", "map"))
    with pytest.raises(UsageError, match="no map"):
        _ = Coarse().token_symbols
    with pytest.raises(UsageError, match=r"\b250 symbols(.|\n)*\b198 as --symbols"):
        found(Coarse(250), evidence())
    with pytest.raises(UsageError, match="symbols is 1"):
        Coarse(1)
    with pytest.raises(UsageError, match="most_share is 0"):
        replace(Coarse(), most_share=0.0)

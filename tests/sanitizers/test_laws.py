"""Every mechanism is tested for its law: 100,000 draws and more against the closed form, or a literal simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.spatial.distance import cdist
from scipy.stats import laplace

from milkglass.errors import UsageError
from milkglass.noise.stream import Stream
from milkglass.sanitizers import santext
from milkglass.sanitizers.custext import CusText
from milkglass.sanitizers.rnm import Rnm
from milkglass.sanitizers.sanitizer import UNKNOWN, Sanitizer, SparingRule
from milkglass.sanitizers.santext import SanText, SanTextPlus, SanTextPlusMethod, halfway_epsilon
from milkglass.sanitizers.table import WordVectors
from tests.sanitizers.kit import custext_law, fits, literal, santext_law, table

DRAWS = 200_000


def drawn(sanitizer: Sanitizer, word: int, count: int = DRAWS, seed: int = 1) -> np.ndarray:
    return sanitizer.sanitize(np.full(count, word), Stream.of_seed(seed))


# --- SANTEXT ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("word", [0, 5])
def test_santext_draws_by_the_closed_form(epsilon: float, word: int) -> None:
    words = table()
    x = words.vectors.astype(np.float64)
    fits(drawn(SanText(words, epsilon), word), literal.santext_law(x, x[word], epsilon))


def test_santext_on_three_words_on_a_line() -> None:
    words = WordVectors(("a", "b", "c"), np.array([[0.0], [1.0], [3.0]], np.float32))
    weights = np.array([1, math.exp(-1), math.exp(-3)])
    fits(drawn(SanText(words, 2.0), 0), weights / weights.sum())
    weights = np.array([math.exp(-4 / 3), math.exp(-1 / 3), math.exp(-5 / 3)])  # from the mean, 4/3
    fits(drawn(SanText(words, 2.0), UNKNOWN), weights / weights.sum())


@pytest.mark.parametrize(("head", "epsilon"), [(2, 0.5), (2, 3.0), (8, 3.0), (8, 12.0)])
@pytest.mark.parametrize("word", [0, 17, UNKNOWN])
def test_the_tail_is_drawn_as_the_head(head: int, epsilon: float, word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(santext, "HEAD_WORDS", head)
    words = table(300, 5)
    sanitizer = SanText(words, epsilon)
    x = words.vectors.astype(np.float64)
    law = literal.santext_law(x, x.mean(0) if word == UNKNOWN else x[word], epsilon)
    np.testing.assert_allclose(santext_law(sanitizer, word), law, atol=1e-6)
    found = drawn(sanitizer, word)
    fits(found, law)
    beyond = ~np.isin(found, sanitizer.sampler.near[word if word >= 0 else 300])
    assert beyond.any() and abs(beyond.mean() - (1 - sanitizer.sampler.cumulative[word, -1])) < 0.01


def test_a_tail_that_rejection_cannot_draw_is_drawn_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(santext, "HEAD_WORDS", 2)
    monkeypatch.setattr(santext, "MAX_TRIALS", 1)
    words = table(40, 2)
    sanitizer = SanText(words, 4.0)
    asked: list[int] = []
    full = sanitizer.sampler._draw_full_tail
    monkeypatch.setattr(
        sanitizer.sampler, "_draw_full_tail", lambda places, rng: (asked.append(len(places)), full(places, rng))[1]
    )
    x = words.vectors.astype(np.float64)
    fits(drawn(sanitizer, 3, 100_000), literal.santext_law(x, x[3], 4.0))
    assert sum(asked) > 10_000 and max(asked) <= santext.WORDS_AT_A_TIME


def test_a_words_numbers_do_not_depend_on_its_company() -> None:
    words = table(300, 40)
    alone, together = SanText(words, 3.0), SanText(words, 3.0)
    together.sampler._prepare(np.arange(301))
    for word in (0, 63, 64, 299, 300):
        alone.sampler._prepare(np.array([word]))
        assert np.array_equal(alone.sampler.cumulative[word], together.sampler.cumulative[word])
        assert alone.sampler.slack[word] == together.sampler.slack[word]


def test_words_of_one_batch_are_each_drawn_by_their_own_law() -> None:
    words = table(30, 3)
    ids = np.random.default_rng(0).permutation(np.repeat([3, 9, UNKNOWN], 100_000))
    for sanitizer, law in ((SanText(words, 2.0), santext_law), (CusText(words, 2.0, k=7), custext_law)):
        out = sanitizer.sanitize(ids, Stream.of_seed(2))
        for word in (3, 9, UNKNOWN):
            fits(out[ids == word], law(sanitizer, word))


@pytest.mark.parametrize("head", [2, 64])
def test_santext_plus_draws_sensitive_words_of_the_corpus(head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(santext, "HEAD_WORDS", head)
    words = table(30, 3)
    x = words.vectors.astype(np.float64)
    counts = np.arange(30) % 5  # 0, 5, ... do not occur
    sensitive = counts < 3
    sanitizer = SanTextPlus(words, 2.0, sparing=SparingRule(sensitive, 0.3), occurring=counts > 0)
    corpus = {row: int(count) for row, count in enumerate(counts) if count}
    chosen = {int(row) for row in np.flatnonzero(sensitive)}
    for word in (1, 2, 3, 4, 5):  # sensitive, sensitive, common, common, not in the corpus
        law = np.zeros(30)
        for y, probability in literal.santext_plus_law(x, corpus, chosen, word, 2.0, 0.3).items():
            law[y] = probability
        found = drawn(sanitizer, word)
        fits(found, law)
        assert set(np.unique(found)) <= {y for y in range(30) if counts[y] in (1, 2)} | {word}
        if word in (3, 4):
            assert abs((found == word).mean() - 0.7) < 0.01  # never drawn as its own substitute
    unknown = drawn(sanitizer, UNKNOWN)
    outputs = np.flatnonzero(sensitive & (counts > 0))
    law = np.zeros(30)
    law[outputs] = literal.santext_law(x[outputs], x.mean(0), 2.0)
    fits(unknown, law)
    np.testing.assert_allclose(santext_law(sanitizer, UNKNOWN), law, atol=1e-6)


def test_santext_plus_by_name_draws_what_the_corpus_has() -> None:
    """As recipes and commands make it, from counts."""
    words, counts = table(30, 3), np.arange(30) % 5
    sanitizer = SanTextPlusMethod(epsilon=0.1, sensitive=1.0).sanitizer(words, counts)
    assert np.array_equal(np.unique(drawn(sanitizer, 3)), np.flatnonzero(counts))


def test_santext_plus_with_p_0_keeps_common_words_and_refuses_an_empty_choice() -> None:
    words = table()
    sensitive, occurring = np.arange(12) < 6, np.ones(12, np.bool_)
    kept = SanTextPlus(words, 1.0, sparing=SparingRule(sensitive, 0.0), occurring=occurring)
    assert (drawn(kept, 8, 1000) == 8).all() and len(np.unique(drawn(kept, 2, 1000))) > 1
    with pytest.raises(UsageError, match="corpus is sensitive"):
        SanTextPlus(words, 1.0, sparing=SparingRule(sensitive, 0.3), occurring=~sensitive)
    with pytest.raises(UsageError, match="shape"):
        SanTextPlus(words, 1.0, sparing=SparingRule(sensitive, 0.3), occurring=occurring[:5])


# --- CUSTEXT ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_custext_draws_by_the_closed_form(metric: str, epsilon: float) -> None:
    words = table(23, 3)
    x = words.vectors.astype(np.float64)
    counts = np.random.default_rng(5).integers(0, 50, 23)
    sanitizer = CusText(words, epsilon, k=5, metric=metric, counts=counts)
    groups = literal.custext_groups(x, list(np.argsort(-counts, kind="stable")), 5, metric)
    assert [len(one) for one in groups] == [5, 5, 5, 8]
    for group in (groups[0], groups[-1]):
        law = np.zeros(23)
        law[group] = literal.custext_law(x, group, group[1], epsilon, metric)
        np.testing.assert_allclose(custext_law(sanitizer, group[1]), law, atol=1e-6)
        fits(drawn(sanitizer, group[1]), law)
    fits(drawn(sanitizer, UNKNOWN), np.full(23, 1 / 23))


def test_the_promise_of_custext_holds_within_every_list() -> None:
    sanitizer = CusText(table(40, 3), 1.5, k=6)
    for group in sanitizer.groups.members:
        laws = np.array([custext_law(sanitizer, int(word)) for word in group[group >= 0]])[:, group[group >= 0]]
        assert (laws.max(0) / laws.min(0)).max() <= math.exp(1.5) * (1 + 1e-9)


def test_flat_lists_are_drawn_from_evenly() -> None:
    words = WordVectors(tuple("abcd"), np.array([[1, 0], [1, 0], [0, 0], [0, 0]], np.float32))
    fits(drawn(CusText(words, 9.0, k=2), 0), np.array([0.5, 0.5, 0, 0]))
    strict = Rnm(words, 9.0, k=2, guarantee_kind="strict")
    fits(drawn(strict, 0), np.array([0.5, 0.5, 0, 0]))
    same = WordVectors(tuple("abcd"), np.ones((4, 2), np.float32))
    fits(drawn(Rnm(same, 9.0, k=3), 1), np.array([1, 0, 1, 1]) / 3)


# --- RNM --------------------------------------------------------------------------------------------------------------
def first_wins(gap: float, epsilon: float) -> float:
    """P(u1 + L1 > u2 + L2) for u1 - u2 = gap >= 0 and L ~ Lap(1/eps), in closed form."""
    return 1 - math.exp(-epsilon * gap) * (2 + epsilon * gap) / 4


def noisy_max_law(scores: np.ndarray, scale: float) -> np.ndarray:
    """P(each is the noisy maximum), by integration over its noise."""

    def wins(i: int) -> float:
        others = np.delete(scores, i)
        inside = lambda t: laplace.pdf(t, scores[i], scale) * laplace.cdf(t, others, scale).prod()  # noqa: E731
        kinks = sorted(set(scores))
        return sum(quad(inside, a, b)[0] for a, b in zip([-np.inf, *kinks], [*kinks, np.inf], strict=True))

    return np.array([wins(i) for i in range(len(scores))])


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_rnm_of_two_candidates_has_the_closed_form(epsilon: float) -> None:
    words = WordVectors(("a", "b", "c"), np.array([[1, 0], [1, 0.2], [0, 1]], np.float32))  # b is nearer to a than c is
    better = first_wins(1.0, epsilon)
    assert better == pytest.approx(noisy_max_law(np.array([1.0, 0.0]), 1 / epsilon)[0], abs=1e-7)
    fits(drawn(Rnm(words, epsilon, k=2), 0), np.array([0, better, 1 - better]))


@pytest.mark.parametrize("guaranteed", ["paper", "strict"])
def test_rnm_draws_by_its_law(guaranteed: str) -> None:
    words = table(20, 3)
    x = words.vectors.astype(np.float64)
    sanitizer = Rnm(words, 2.0, k=5, guarantee_kind=guaranteed)
    if guaranteed == "paper":
        group, scores = literal.candidate_list(x, 7, 5)
        assert 7 not in group
    else:
        group = next(one for one in literal.custext_groups(x, list(range(20)), 5, "cosine") if 7 in one)
        near = literal.cosine_row(x, 7)[group]
        scores = list((near - near.min()) / (near.max() - near.min()))
    law = np.zeros(20)
    law[group] = noisy_max_law(np.array(scores), (1 if guaranteed == "paper" else 2) / 2.0)
    assert law.sum() == pytest.approx(1, abs=1e-6)
    found = drawn(sanitizer, 7)
    fits(found, law)
    rng = np.random.default_rng(9)
    simulated = np.array([group[literal.noisy_max(scores, sanitizer.scale, rng)] for _ in range(20_000)])
    fits(simulated, law)
    fits(drawn(sanitizer, UNKNOWN), np.full(20, 1 / 20))


def test_the_strict_promise_holds_and_the_papers_does_not() -> None:
    words, epsilon, p = table(24, 3), 1.0, 0.3
    strict = Rnm(words, epsilon, k=6, guarantee_kind="strict")
    assert strict.guarantee is not None and strict.guarantee.startswith("1-DP")
    group = strict.groups.members[0]
    laws = np.array([noisy_max_law(strict.groups.scores[word], strict.scale) for word in group])
    assert (laws.max(0) / laws.min(0)).max() <= math.exp(epsilon)
    spared = p * laws + (1 - p) * np.eye(6)  # no word is sensitive: the worst case
    kept = Rnm(words, epsilon, 6, "strict", SparingRule(np.zeros(24, np.bool_), p)).guarantee
    assert kept is not None
    promised = float(kept.split("-DP")[0])
    assert promised == pytest.approx(epsilon + math.log(1 + 0.7 * 6 / 0.3), rel=1e-3)
    assert (spared.max(0) / spared.min(0)).max() <= math.exp(promised)
    assert (spared.max(0) / spared.min(0)).max() > math.exp(epsilon)
    paper = Rnm(words, epsilon, k=6)
    assert paper.guarantee is None
    outcomes = [set(paper.substitutes_of(np.array([word]))[0].tolist()) for word in range(24)]
    assert any(one != other for one in outcomes for other in outcomes)


def test_rnm_replaces_sensitive_words_always_and_others_with_probability_p() -> None:
    words = table(20, 3)
    sensitive = np.arange(20) < 10
    sanitizer = Rnm(words, 1.0, 5, sparing=SparingRule(sensitive, 0.3))
    assert (drawn(sanitizer, 3) != 3).all()
    stayed = (drawn(sanitizer, 15) == 15).sum()
    assert abs(stayed - 0.7 * DRAWS) < 5 * math.sqrt(DRAWS * 0.21)


def ratio(one: np.ndarray, other: np.ndarray) -> float:
    """The largest ratio of two laws, outcome by outcome; infinite where one makes possible what the other does not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(one == 0, 0.0, one / other)
    return float(each.max())


@pytest.mark.slow
def test_cmifs_cases_1_and_2_in_numbers() -> None:
    """Section 4.4 bounds the ratio of two words' laws by e^eps (both sensitive) and by e^eps / p (one is not).

    With each word's own list it is infinite: an outcome of one word cannot come of another. Even where two words have
    one list, Lap(1/eps) gives up to e^(2 eps), as their scores are normalised by themselves and one may rise while
    another falls; and a word that is spared shows itself.
    """
    epsilon, p, words = 1.0, 0.3, table(24, 3)
    x = words.vectors.astype(np.float64)

    def law(word: int) -> np.ndarray:
        group, scores = literal.candidate_list(x, word, 6)
        result = np.zeros(24)
        result[group] = noisy_max_law(np.array(scores), 1 / epsilon)
        return result

    def spared(word: int) -> np.ndarray:
        return p * law(word) + (1 - p) * np.eye(24)[word]

    outcomes = [set(np.unique(drawn(Rnm(words, epsilon, 6), word)).tolist()) for word in (0, 1)]
    assert outcomes == [set(np.flatnonzero(law(word)).tolist()) for word in (0, 1)], "what Rnm draws is of these laws"
    assert outcomes[0] - outcomes[1], "and an outcome of one word cannot come of the other"
    assert Rnm(words, epsilon, 6).scale == 1 / epsilon
    assert Rnm(words, epsilon, 6, guarantee_kind="strict").scale == 2 / epsilon
    assert ratio(law(0), law(1)) == math.inf  # case 1
    assert ratio(law(0), spared(1)) == math.inf  # case 2
    assert ratio(spared(1), law(0)) == math.inf  # and the other way
    rises, falls = np.array([1.0, 0.0, *[0.5] * 4]), np.array([0.0, 1.0, *[0.5] * 4])  # two words' scores of one list
    assert math.exp(epsilon) < ratio(noisy_max_law(rises, 1 / epsilon), noisy_max_law(falls, 1 / epsilon))
    assert ratio(noisy_max_law(rises, 2 / epsilon), noisy_max_law(falls, 2 / epsilon)) <= math.exp(epsilon)  # `strict`
    one = noisy_max_law(np.eye(30)[0], 2 / epsilon)
    kept = p * noisy_max_law(np.eye(30)[1], 2 / epsilon) + (1 - p) * np.eye(30)[2]
    assert ratio(one, kept) <= math.exp(epsilon) / p
    assert ratio(kept, one) > math.exp(epsilon) / p


def test_the_epsilon_at_which_half_of_the_words_stay() -> None:
    """Against the law itself, over tables of several sizes and scales: a word's own share, averaged, is near a half."""
    for n, width, scale in ((200, 8, 1.0), (2000, 30, 0.2), (2000, 100, 5.0)):
        vectors = np.random.default_rng(n + width).normal(0, scale, (n, width)).astype(np.float32)
        words = WordVectors(tuple(f"w{i}" for i in range(n)), vectors)
        away = cdist(vectors.astype(np.float64), vectors.astype(np.float64))
        kept = (1 / np.exp(-halfway_epsilon(words) / 2 * away).sum(1)).mean()
        assert 0.25 < kept < 0.6

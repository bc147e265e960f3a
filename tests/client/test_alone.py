"""Models that a client fits by itself."""

from __future__ import annotations

import numpy as np
import pytest

from milkglass.client.alone import BagModel, Committee, pooled
from milkglass.errors import UsageError

GOOD = ["a fine film", "fine and funny", "so fine", "a funny film"]
BAD = ["a dull film", "dull and slow", "so dull!", "a slow film"]
TEXTS, LABELS = [*GOOD, *BAD], [1] * 4 + [0] * 4


@pytest.mark.parametrize("kind", ["logistic", "bayes"])
@pytest.mark.parametrize("neighbours", [False, True])
def test_it_learns_which_words_tell(kind: str, neighbours: bool) -> None:
    fitted = BagModel(kind, neighbours).fit(TEXTS, LABELS)  # type: ignore[arg-type]
    assert fitted.predict(["fine", "dull", "quite funny, this", "how slow"]).tolist() == [1, 0, 1, 0]


def test_naive_bayes_is_the_textbooks() -> None:
    """By hand: two rows "a a b" (class 0) and "b c" (class 1); P(a|0) = 3/6, P(b|0) = 2/6, P(c|1) = 2/5."""
    fitted = BagModel("bayes").fit(["a a b", "b c"], [0, 1])
    assert np.exp(fitted.model.feature_log_prob_[0]) == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    assert np.exp(fitted.model.feature_log_prob_[1]) == pytest.approx([1 / 5, 2 / 5, 2 / 5])


def test_neighbours_tell_what_words_do_not() -> None:
    """Both classes have the same words, once each; only their order differs."""
    texts, labels = ["not good , bad", "not bad , good"] * 8, [0, 1] * 8
    assert BagModel(neighbours=True).fit(texts, labels).predict(texts).tolist() == labels
    assert BagModel().fit(texts, labels).predict(texts).tolist() != labels


def test_words_that_two_texts_share_tell_pairs_apart() -> None:
    words = [f"w{i}" for i in range(40)]
    first = [" ".join(words[i : i + 3]) for i in range(30)]
    second = [one if i % 2 else " ".join(words[-3:]) for i, one in enumerate(first)]
    labels = [i % 2 for i in range(30)]
    fitted = BagModel().fit(first[:24], labels[:24], second[:24])
    assert fitted.predict(first[24:], second[24:]).tolist() == labels[24:]


def test_scores_are_fitted_by_ridge_regression() -> None:
    fitted = BagModel().fit(TEXTS, [2.5] * 4 + [-1.0] * 4, regression=True)
    low, high = fitted.predict(["dull", "fine"])
    assert low < 0.75 < high


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(UsageError, match="one label"):
        BagModel().fit(GOOD, [1] * 4)
    with pytest.raises(UsageError, match="scores"):
        BagModel("bayes").fit(TEXTS, [0.5] * 8, regression=True)


def test_a_committee_is_the_mean_of_its_members_log_probabilities() -> None:
    fitted = Committee().fit(TEXTS, LABELS)
    assert len(fitted.members) == 4
    texts = ["fine", "dull", "how slow"]
    logs = [one.model.predict_log_proba(one.vectorizer.transform(texts)) for one in fitted.members]
    assert fitted.log_probabilities(texts, None, 2) == pytest.approx(sum(logs) / 4)
    assert fitted.predict(texts).tolist() == [1, 0, 0]


def test_a_class_without_a_row_is_as_likely_as_one_further_row() -> None:
    found = Committee().fit(TEXTS, [2 * one for one in LABELS]).log_probabilities(["fine"], None, 3)
    assert found[0, 1] == pytest.approx(-np.log(9)) and found[0, 2] > found[0, 0]


def test_a_committee_of_scores_is_the_mean_of_ridge_regressions() -> None:
    fitted = Committee().fit(TEXTS, [2.5] * 4 + [-1.0] * 4, regression=True)
    assert fitted.predict(["fine"]) == pytest.approx(np.mean([one.predict(["fine"]) for one in fitted.members]))
    with pytest.raises(UsageError, match="scores have no classes"):
        fitted.log_probabilities(["fine"], None, 2)


def test_two_opinions_are_pooled_by_their_product() -> None:
    server, own = np.log([[0.6, 0.4], [0.5, 0.5]]), np.log([[0.2, 0.8], [0.9, 0.1]])
    assert pooled(server, own) == pytest.approx(np.array([[0.12 / 0.44, 0.32 / 0.44], [0.9, 0.1]]))

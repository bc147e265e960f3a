"""The linear model that a client fits by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.naive_bayes import ComplementNB, MultinomialNB
from sklearn.svm import LinearSVC

from milkglass.client import alone
from milkglass.client.alone import (
    FittedCandidate,
    LinearCandidate,
    LinearModel,
    agreement_features,
    candidates,
    pool_probabilities,
)
from milkglass.errors import CorruptCheckpoint, UsageError

GOOD = ["a fine film", "fine and funny", "so fine", "a funny film", "funny, fine", "what a fine thing"]
BAD = ["a dull film", "dull and slow", "so dull!", "a slow film", "slow, dull", "what a dull thing"]
TEXTS, LABELS = [*GOOD, *BAD], [1] * 6 + [0] * 6


def test_it_learns_which_words_tell() -> None:
    fitted = LinearModel.fit(TEXTS, LABELS)
    assert fitted.predict(["fine", "dull", "quite funny, this", "how slow"]).tolist() == [1, 0, 1, 0]
    assert len(fitted.members) == alone.MAX_MEMBERS and fitted.validation_score > 0.8


def test_letters_tell_what_words_do_not() -> None:
    """No word occurs twice: only a part of each tells the class."""
    rng = np.random.default_rng(0)
    stems = ["".join(rng.choice([*"bcdfgklmnprst"], 4)) for _ in range(120)]
    texts = [stem + ("ing" if i % 2 else "ous") for i, stem in enumerate(stems)]
    labels = [i % 2 for i in range(120)]
    fitted = LinearModel.fit(texts[:80], labels[:80])
    assert (fitted.predict(texts[80:]) == labels[80:]).mean() > 0.95


def test_what_two_texts_share_tells_pairs_apart() -> None:
    words = [f"w{i}" for i in range(60)]
    first = [" ".join(words[i : i + 3]) for i in range(50)]
    second = [one if i % 2 else " ".join(words[-3:]) for i, one in enumerate(first)]
    labels = [i % 2 for i in range(50)]
    fitted = LinearModel.fit(first[:40], labels[:40], second[:40])
    assert fitted.predict(first[40:], second[40:]).tolist() == labels[40:]


def test_agreement_is_what_a_person_counts() -> None:
    (row,) = agreement_features(alone.Rows(["A cat, 12"], ["a dog 13"]))
    words = {"a", "cat", ",", "12"}, {"a", "dog", "13"}
    assert row[0] == pytest.approx(len(words[0] & words[1]) / len(words[0] | words[1]))
    assert row[1] == pytest.approx(1 / 4) and row[2] == pytest.approx(1 / 3)
    assert row[-1] == 2, "two numbers stand in one text only"


@pytest.mark.parametrize("kind", ["bayes", "complement", "logistic", "svm"])
@pytest.mark.parametrize("classes", [2, 3])
def test_weights_give_the_outputs_of_scikit_learn(kind: str, classes: int) -> None:
    rng = np.random.default_rng(classes)
    matrix, labels = sparse.csr_matrix(rng.poisson(0.7, (40, 12)).astype(float)), rng.integers(0, classes, 40)
    weights, bias = LinearCandidate("words", kind, 1).fit(matrix, labels)  # type: ignore[arg-type]
    ours = np.asarray(matrix @ weights.T) + bias
    literal = {
        "bayes": MultinomialNB(alpha=1), "complement": ComplementNB(alpha=1),
        "logistic": LogisticRegression(C=1, max_iter=300, tol=1e-3), "svm": LinearSVC(C=1, random_state=0),
    }[kind].fit(matrix, labels)  # fmt: skip
    assert (ours.argmax(1) == literal.predict(matrix)).all()
    if kind != "svm":
        shifted = ours - np.log(np.exp(ours).sum(1, keepdims=True))
        assert shifted == pytest.approx(literal.predict_log_proba(matrix), abs=1e-6)


def test_scores_are_fitted_by_ridge_regression() -> None:
    scores = [2.5] * 6 + [-1.0] * 6
    fitted = LinearModel.fit(TEXTS, scores, is_regression=True)
    low, high = fitted.predict(["dull", "fine"])
    assert low < 0.75 < high and fitted.is_regression and 0 < fitted.validation_score < 1
    matrix = sparse.csr_matrix(np.random.default_rng(0).normal(size=(20, 4)))
    weights, bias = LinearCandidate("words", "ridge", 2).fit(matrix, np.arange(20.0))
    literal = Ridge(alpha=2).fit(matrix, np.arange(20.0))
    assert (matrix @ weights.T + bias)[:, 0] == pytest.approx(literal.predict(matrix))


def test_the_answer_is_the_mean_of_the_members_probabilities() -> None:
    fitted = LinearModel.fit(TEXTS, LABELS)
    rows = alone.Rows(["a fine, slow thing"])
    each = []
    for one in fitted.members:
        matrix = fitted.vectorizers.transform(rows, [one.candidate.features])[one.candidate.features]
        out = np.exp(one.temperature * (np.asarray(matrix @ one.weights.T) + one.bias))
        each.append(out / out.sum())
    found = np.exp(fitted.log_probabilities(rows.texts, None, 2))
    assert found == pytest.approx(np.mean(each, axis=0))


def test_a_class_without_rows_is_unlikely_and_not_impossible() -> None:
    found = LinearModel.fit(TEXTS, [2 * one for one in LABELS]).log_probabilities(["fine"], None, 3)
    assert found.argmax() == 2 and found[0, 1] == pytest.approx(-np.log(13))


def test_every_candidate_is_tried_on_rows_that_it_was_not_fitted_on() -> None:
    """Labels that mean nothing: a model that was asked about its own rows would be right."""
    rng = np.random.default_rng(3)
    texts = [f"w{i} x{i}" for i in range(60)]
    assert LinearModel.fit(texts, rng.integers(0, 2, 60).tolist()).validation_score < 0.75


def test_rare_classes_and_few_rows_are_no_error() -> None:
    assert LinearModel.fit([*TEXTS, "odd one"], [*LABELS, 7]).classes.tolist() == [0, 1, 7]
    assert LinearModel.fit(["yes", "no"], [0, 1]).predict(["yes"]).tolist() in ([0], [1])
    assert LinearModel.fit(["!!", "??", "!!", "??"] * 3, [0, 1] * 6).predict(["!!"]).tolist() == [0]
    one_each = LinearModel.fit([f"text {i}" for i in range(6)], list(range(6)))
    assert one_each.predict(["text 3"]).shape == (1,)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(UsageError, match="one label"):
        LinearModel.fit(GOOD, [1] * 6)
    for texts, labels in ((["a"], [0.5]), ([], [])):
        with pytest.raises(UsageError, match="given"):
            LinearModel.fit(texts, labels, is_regression=True)
    with pytest.raises(UsageError, match="scores"):
        LinearModel.fit(TEXTS, [float(i) for i in range(12)], is_regression=True).log_probabilities(["a"], None, 2)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("regression", [False, True])
def test_a_folder_keeps_the_model(pairs: bool, regression: bool, tmp_path: Path) -> None:
    second = [text[::-1] for text in TEXTS] if pairs else None
    labels = [float(i) for i in range(12)] if regression else LABELS
    fitted = LinearModel.fit(TEXTS, labels, second, regression)
    alone.save(fitted, ["bad", "good"], tmp_path)
    again, names = alone.load(tmp_path)
    assert names == ["bad", "good"] and again.validation_score == fitted.validation_score
    asked, other = ["a fine thing", "how dull: 3", "Ärger & łódź"], ["fine", "x", ""] if pairs else None
    if regression:
        assert again.predict(asked, other) == pytest.approx(fitted.predict(asked, other), abs=1e-4)
    else:
        found = again.log_probabilities(asked, other, 2)
        assert found == pytest.approx(fitted.log_probabilities(asked, other, 2), abs=1e-4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / alone.LINEAR_FILE).unlink(),
        lambda folder: (folder / alone.TENSORS_FILE).write_bytes(b"x"),
        lambda folder: (folder / alone.LINEAR_FILE).write_text("[]"),
        lambda folder: (folder / alone.LINEAR_FILE).write_text('{"version": 2}'),
        lambda folder: (folder / alone.LINEAR_FILE).write_text(
            (folder / alone.LINEAR_FILE).read_text().replace('"kind": "', '"kind": "un')
        ),
    ],
)
def test_a_damaged_folder_is_refused(damage: object, tmp_path: Path) -> None:
    alone.save(LinearModel.fit(TEXTS, LABELS), ["bad", "good"], tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(CorruptCheckpoint):
        alone.load(tmp_path)


def test_the_candidates_are_those_of_the_rows() -> None:
    kinds = {one.kind for one in candidates(["words"], is_regression=True)}
    assert kinds == {"ridge"}
    dense = {one.kind for one in candidates(["agreement"], is_regression=False)}
    assert dense == {"svm", "logistic"}, "counts below zero are nothing for naive Bayes"


def test_members_print_without_the_words_of_the_rows() -> None:
    fitted = LinearModel.fit(TEXTS, LABELS)
    assert "fine" not in repr(fitted)
    assert isinstance(fitted.members[0], FittedCandidate)


def test_a_pool_is_the_product_of_both() -> None:
    server, own = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.2, 0.8], [0.5, 0.5]])
    assert pool_probabilities(server, own) == pytest.approx(np.array([[0.2, 0.8], [0.9, 0.1]]))
    assert pool_probabilities(server + 7, own) == pytest.approx(pool_probabilities(server, own))

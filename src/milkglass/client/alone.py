"""What a client can do alone in seconds, with nothing sent: a linear model over a bag of its words.

A defence is of use to a client only where the model behind it does better than this. Two models of each kind of
feature, words and words with pairs of neighbours (n-grams of up to two):

    "logistic"   regression on how often each occurs, with an L2 penalty; of scores ridge regression
    "bayes"      multinomial naive Bayes (Laplace's count of one); not for scores

The second texts of pairs are words of their own, beside which the words that both texts have stand once more. Fitting
is scikit-learn's.

All four of them vote as a `Committee`: the mean of their log-probabilities. A committee also stands beside a server,

    p(class | text)  ~  p_server(class | what was sent) p_committee(class | text),

a logarithmic opinion pool with equal weights, whose second factor never leaves the client. Out of scope: anything that
a client would train for minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError

WORD = r"[^\W_]+|[^\w\s]"  # marks count: "!" and "?" tell as words do
MOST_ITERATIONS = 1000


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BagModel:
    """A linear model over bags of words.

    Attributes:
        kind: see above.
        neighbours: whether pairs of neighbouring words count as well.
    """

    kind: Literal["logistic", "bayes"] = "logistic"
    neighbours: bool = False

    def fit(
        self, texts: Sequence[str], labels: Sequence[int] | Sequence[float], pairs: Sequence[str] | None = None,
        regression: bool = False,
    ) -> FittedBag:  # fmt: skip
        """Raises UsageError for labels of one class, or scores for "bayes"."""
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.naive_bayes import MultinomialNB

        if regression and self.kind == "bayes":
            raise UsageError("naive Bayes names classes, and the labels are scores", "use logistic")
        if not regression and len(set(labels)) < 2:
            raise UsageError("all rows have one label", "give rows of two classes at least")
        vectorizer = CountVectorizer(token_pattern=WORD, lowercase=True, ngram_range=(1, 2 if self.neighbours else 1))
        features = vectorizer.fit_transform(_joined(texts, pairs))
        linear = Ridge() if regression else LogisticRegression(max_iter=MOST_ITERATIONS)
        model = MultinomialNB() if self.kind == "bayes" else linear
        return FittedBag(vectorizer, model.fit(features, np.asarray(labels)))


@dataclass(frozen=True)
class FittedBag:
    """A model that was fitted.

    Attributes:
        vectorizer: texts to features; scikit-learn's.
        model: features to classes or scores; scikit-learn's.
    """

    vectorizer: Any
    model: Any

    def predict(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> NDArray[Any]:
        """(b,) classes, or scores."""
        return self.model.predict(self.vectorizer.transform(_joined(texts, pairs)))

    def log_probabilities(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Floats:
        """(b, classes), the classes of the fitted rows in their order."""
        return np.asarray(self.model.predict_log_proba(self.vectorizer.transform(_joined(texts, pairs))))


@dataclass(frozen=True)
class Committee:
    """Several models that vote.

    Attributes:
        members: the models; of scores, the "logistic" ones alone.
    """

    members: tuple[BagModel, ...] = tuple(
        BagModel(kind, neighbours) for kind in ("logistic", "bayes") for neighbours in (False, True)
    )

    def fit(
        self, texts: Sequence[str], labels: Sequence[int] | Sequence[float], pairs: Sequence[str] | None = None,
        regression: bool = False,
    ) -> FittedCommittee:  # fmt: skip
        """Raises UsageError for labels of one class."""
        able = [one for one in self.members if not (regression and one.kind == "bayes")]
        return FittedCommittee(tuple(one.fit(texts, labels, pairs, regression) for one in able), len(texts), regression)


@dataclass(frozen=True)
class FittedCommittee:
    """A committee that was fitted.

    Attributes:
        members: each fitted on the same rows.
        rows: how many.
        regression: whether their labels are scores.
    """

    members: tuple[FittedBag, ...]
    rows: int
    regression: bool = False

    def predict(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> NDArray[Any]:
        """(b,) classes, or scores."""
        if self.regression:
            return np.mean([one.predict(texts, pairs) for one in self.members], axis=0)
        return self._classes[self._mean(texts, pairs).argmax(1)]

    def log_probabilities(self, texts: Sequence[str], pairs: Sequence[str] | None, classes: int) -> Floats:
        """(b, classes) by the classes' numbers. A class without a row counts as one that a single further row had."""
        if self.regression:
            raise UsageError("scores have no classes", "leave the client's own models out")
        result = np.full((len(texts), classes), -np.log(self.rows + 1.0))
        result[:, self._classes] = self._mean(texts, pairs)
        return result

    @property
    def _classes(self) -> NDArray[np.int64]:
        return np.asarray(self.members[0].model.classes_, np.int64)

    def _mean(self, texts: Sequence[str], pairs: Sequence[str] | None) -> Floats:
        return np.mean([one.log_probabilities(texts, pairs) for one in self.members], axis=0)


def pooled(server: NDArray[Any], own: Floats) -> Floats:
    """(b, classes) probabilities of both together, from the log-probabilities of each, up to a constant a row."""
    both = np.asarray(server, np.float64) + own
    both = np.exp(both - both.max(1, keepdims=True))
    return np.asarray(both / both.sum(1, keepdims=True))


def _joined(texts: Sequence[str], pairs: Sequence[str] | None) -> list[str]:
    """One text a row. Words of a second text, and those of both, are marked so that they are words of their own."""
    if pairs is None:
        return list(texts)
    return [_pair(one.lower().split(), other.lower().split()) for one, other in zip(texts, pairs, strict=True)]


def _pair(one: list[str], other: list[str]) -> str:
    both = sorted({*one} & {*other})
    return " ".join([*one, *(f"second{word}" for word in other), *(f"both{word}" for word in both)])

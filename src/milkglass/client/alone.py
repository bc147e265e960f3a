"""A linear model over words, which a client trains alone in seconds: the baseline that a defence must beat.

There are two kinds of model, each over words alone and over words and pairs of neighbours (n-grams of up to two). All
are scikit-learn's.

    "logistic"      regression on how often each occurs, with an L2 penalty; for scores ridge regression
    "bayes"         multinomial naive Bayes (Laplace's count of one); not for scores

The words of second texts are features of their own, and so are the words that both texts of a pair contain.

A `Committee` is the mean of the models' log-probabilities. With a server it forms a logarithmic opinion pool of equal
weights, whose second factor never leaves the client:

    p(class | text)  ~  p_server(class | what was sent) p_committee(class | text)
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
        kind: see the module.
        neighbours: whether pairs of neighbouring words are features too.
    """

    kind: Literal["logistic", "bayes"] = "logistic"
    neighbours: bool = False

    def fit(
        self, texts: Sequence[str], labels: Sequence[int] | Sequence[float], pairs: Sequence[str] | None = None,
        regression: bool = False,
    ) -> FittedBag:  # fmt: skip
        """Fits the model. Raises UsageError if all labels are equal, or for scores with "bayes"."""
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
    """A fitted `BagModel`.

    Attributes:
        vectorizer: turns texts into features; scikit-learn's.
        model: turns features into classes or scores; scikit-learn's.
    """

    vectorizer: Any
    model: Any

    def predict(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> NDArray[Any]:
        """Returns (b,) classes or scores."""
        return self.model.predict(self.vectorizer.transform(_joined(texts, pairs)))

    def log_probabilities(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Floats:
        """Returns (b, classes), in the order of the classes of the fitted rows."""
        return np.asarray(self.model.predict_log_proba(self.vectorizer.transform(_joined(texts, pairs))))


@dataclass(frozen=True)
class Committee:
    """Several models whose log-probabilities are averaged.

    Attributes:
        members: the models. For scores only the "logistic" ones are used.
    """

    members: tuple[BagModel, ...] = tuple(
        BagModel(kind, neighbours) for kind in ("logistic", "bayes") for neighbours in (False, True)
    )

    def fit(
        self, texts: Sequence[str], labels: Sequence[int] | Sequence[float], pairs: Sequence[str] | None = None,
        regression: bool = False,
    ) -> FittedCommittee:  # fmt: skip
        """Fits all members on the same rows. Raises UsageError if all labels are equal."""
        able = [one for one in self.members if not (regression and one.kind == "bayes")]
        return FittedCommittee(tuple(one.fit(texts, labels, pairs, regression) for one in able), len(texts), regression)


@dataclass(frozen=True)
class FittedCommittee:
    """A fitted `Committee`.

    Attributes:
        rows: how many rows the members were fitted on.
        regression: whether the labels are scores.
    """

    members: tuple[FittedBag, ...]
    rows: int
    regression: bool = False

    def predict(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> NDArray[Any]:
        """Returns (b,) classes or scores."""
        if self.regression:
            return np.mean([one.predict(texts, pairs) for one in self.members], axis=0)
        return self._classes[self._mean(texts, pairs).argmax(1)]

    def log_probabilities(self, texts: Sequence[str], pairs: Sequence[str] | None, classes: int) -> Floats:
        """Returns (b, classes), by the classes' numbers.

        A class without a row gets the probability 1 / (rows + 1).

        Raises:
            UsageError: the labels are scores.
        """
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
    """Returns (b, classes) probabilities of both together.

    Args:
        server: (b, classes) log-probabilities or logits; each row may have any constant added.
        own: (b, classes) log-probabilities.
    """
    both = np.asarray(server, np.float64) + own
    both = np.exp(both - both.max(1, keepdims=True))
    return np.asarray(both / both.sum(1, keepdims=True))


def _joined(texts: Sequence[str], pairs: Sequence[str] | None) -> list[str]:
    """Returns one text for each row. Words of a second text, and words of both, are marked as features of their own."""
    if pairs is None:
        return list(texts)
    return [_pair(one.lower().split(), other.lower().split()) for one, other in zip(texts, pairs, strict=True)]


def _pair(one: list[str], other: list[str]) -> str:
    both = sorted({*one} & {*other})
    return " ".join([*one, *(f"second{word}" for word in other), *(f"both{word}" for word in both)])

"""What a client can do alone in seconds, with nothing sent: a linear model over a bag of its words.

A defence is of use to a client only where the model behind it does better than this. Two models of each kind of
feature, words and words with pairs of neighbours (n-grams of up to two):

    "logistic"   regression on how often each occurs, with an L2 penalty; of scores ridge regression
    "bayes"      multinomial naive Bayes (Laplace's count of one); not for scores

The second texts of pairs are words of their own, beside which the words that both texts have stand once more. Fitting
is scikit-learn's. Out of scope: anything that a client would train for minutes.
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


def _joined(texts: Sequence[str], pairs: Sequence[str] | None) -> list[str]:
    """One text a row. Words of a second text, and those of both, are marked so that they are words of their own."""
    if pairs is None:
        return list(texts)
    return [_pair(one.lower().split(), other.lower().split()) for one, other in zip(texts, pairs, strict=True)]


def _pair(one: list[str], other: list[str]) -> str:
    both = sorted({*one} & {*other})
    return " ".join([*one, *(f"second{word}" for word in other), *(f"both{word}" for word in both)])

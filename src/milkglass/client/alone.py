"""Linear models over words and letters, which a client trains alone in seconds: the baseline that a defence must beat.

Candidates are the pairs of features and model that `candidates` yields. Cross-validation on the training rows ranks
them; the answer is the mean of the probabilities of the best five. All fitting is scikit-learn's.

    features    "words"         TF-IDF of words, marks and pairs of neighbours, with sublinear counts
                "content"       the same without English stop words, marks and words of one letter
                "letters"       TF-IDF of two to five neighbouring letters inside a word
                "both"          words and letters
                "agreement"     of pairs: how many words, letters and numbers both texts contain, and how many each does
    models      naive Bayes (multinomial, complement), logistic regression, a linear SVM; for scores ridge regression

The words of second texts are features of their own, and so are words that both texts of a pair contain. A text is read
whole, however long it is. Every fitted model is a matrix, so that a folder stores it without pickle.

The client's model and a server's form a logarithmic opinion pool of equal weights. The second factor never leaves the
client:

    p(class | text)  ~  p_server(class | what was sent) p_alone(class | text)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import log_softmax, logsumexp

from milkglass import files
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.progress import Progress

Features = Literal["words", "content", "letters", "both", "agreement"]
ModelKind = Literal["bayes", "complement", "logistic", "svm", "ridge"]
Floats = NDArray[np.float64]

WORD_PATTERN = r"[^\W_]+|[^\w\s]"  # marks are words too: "!" and "?" tell as much
MAX_FEATURES = 300_000  # of one vectorizer: the most frequent features
FOLD_COUNT = 5  # folds of the cross-validation
MAX_VALIDATED_ROWS = 4_000  # rows of the cross-validation, a random sample if there are more
MAX_MEMBERS = 5  # candidates whose mean is the model
STRENGTHS: Mapping[ModelKind, tuple[float, ...]] = {
    "bayes": (0.03, 0.1, 0.3, 1), "complement": (0.03, 0.1, 0.3, 1), "logistic": (1, 10), "svm": (0.1, 0.3, 1),
    "ridge": (0.3, 1, 3, 10),
}  # fmt: skip
# Factors of a classifier's outputs: each candidate gets the one under which its labels are likeliest
TEMPERATURES = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 8)
LINEAR_FILE, TENSORS_FILE = "linear.json", "linear.safetensors"


# --- features ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rows:
    """Holds texts, and the second text of each if rows are pairs."""

    texts: Sequence[str]
    pairs: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def as_texts(self) -> list[str]:
        """Returns one text for each row. Words of a second text, and words of both, are features of their own."""
        if self.pairs is None:
            return list(self.texts)
        return [
            _joined_pair(text.lower().split(), pair.lower().split())
            for text, pair in zip(self.texts, self.pairs, strict=True)
        ]


@dataclass(frozen=True)
class Vectorizers:
    """Turns rows into features: a vectorizer each for "words", "content" and "letters", and scales for "agreement".

    Attributes:
        vectorizer_by_name: scikit-learn's fitted vectorizers, by the names of their features.
        agreement_scales: (2, 22) means and standard deviations of the features of agreement. None: rows are not pairs.
    """

    vectorizer_by_name: Mapping[str, Any]
    agreement_scales: Floats | None = None

    @classmethod
    def fit(cls, rows: Rows) -> Vectorizers:
        """Fits the vectorizers to training rows. Features of which the rows have none are left out."""
        texts, by_name = rows.as_texts(), {}
        for name in ("words", "content", "letters"):
            vectorizer = _vectorizer(name)
            try:
                by_name[name] = vectorizer.fit(texts)
            except ValueError:  # no word is left, as of texts that consist of marks alone
                continue
        if rows.pairs is None:
            return cls(by_name)
        unscaled = agreement_features(rows)
        return cls(by_name, np.stack([unscaled.mean(0), np.maximum(unscaled.std(0), 1e-9)]))

    def feature_names(self) -> list[Features]:
        """Returns the names of the features that the training rows had."""
        joined: list[Features] = ["both"] if {"words", "letters"} <= {*self.vectorizer_by_name} else []
        return [*self.vectorizer_by_name, *joined, *([] if self.agreement_scales is None else ["agreement"])]  # type: ignore[list-item]

    def transform(self, rows: Rows, names: Sequence[Features]) -> dict[Features, Any]:
        """Returns (rows, features) matrices of the named features. They are sparse, but "agreement" is dense."""
        parts = {part for name in names for part in (("words", "letters") if name == "both" else (name,))}
        texts = rows.as_texts()
        features: dict[Any, Any] = {
            name: vectorizer.transform(texts).tocsr()
            for name, vectorizer in self.vectorizer_by_name.items()
            if name in parts
        }
        if "both" in names:
            features["both"] = sparse.hstack([features["words"], features["letters"]]).tocsr()
        if "agreement" in names and self.agreement_scales is not None:
            features["agreement"] = (agreement_features(rows) - self.agreement_scales[0]) / self.agreement_scales[1]
        return {name: features[name] for name in names}


def _vectorizer(name: str) -> Any:
    """Returns scikit-learn's vectorizer, not fitted yet, for "words", "content" or "letters"."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    settings: dict[str, Any] = {"sublinear_tf": True, "max_features": MAX_FEATURES, "dtype": np.float64}
    if name == "letters":
        return TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), **settings)
    if name == "content":
        return TfidfVectorizer(ngram_range=(1, 2), stop_words="english", **settings)
    return TfidfVectorizer(ngram_range=(1, 2), token_pattern=WORD_PATTERN, **settings)


def agreement_features(rows: Rows) -> Floats:
    """Returns (rows, 22) features of each pair of texts.

    For words, for pairs of neighbouring words, and for runs of three letters, these are four shares of what both texts
    contain, the logarithms of how many each text contains, and the logarithm of their ratio. The last feature counts
    the numbers that only one of the two texts contains.
    """
    assert rows.pairs is not None
    return np.array([_agreement(text, other) for text, other in zip(rows.texts, rows.pairs, strict=True)], np.float64)


def _agreement(first_text: str, second_text: str) -> list[float]:
    """Returns the 22 features of one pair of texts (`agreement_features`)."""
    values = list[float]()
    for units in (_words, _neighbours, _trigrams):
        first, second = units(first_text), units(second_text)
        shared, total = len(first & second), len(first | second)
        values += [
            shared / max(total, 1), shared / max(len(first), 1), shared / max(len(second), 1),
            shared / max(np.sqrt(len(first) * len(second)), 1),
            np.log1p(len(first)), np.log1p(len(second)), np.log((len(first) + 1) / (len(second) + 1)),
        ]  # fmt: skip
    return [*values, len({*re.findall(r"\d+", first_text)} ^ {*re.findall(r"\d+", second_text)})]


def _words(text: str) -> set[str]:
    return {*re.findall(WORD_PATTERN, text.lower())}


def _neighbours(text: str) -> set[tuple[str, str]]:
    words = re.findall(WORD_PATTERN, text.lower())
    return {*zip(words, words[1:])}  # noqa: B905 - of unlike lengths


def _trigrams(text: str) -> set[str]:
    text = " ".join(text.lower().split())
    return {text[i : i + 3] for i in range(len(text) - 2)}


def _joined_pair(first_words: list[str], second_words: list[str]) -> str:
    shared_words = sorted({*first_words} & {*second_words})
    marked_words = [*(f"second{word}" for word in second_words), *(f"both{word}" for word in shared_words)]
    return " ".join([*first_words, *marked_words])


# --- candidates -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LinearCandidate:
    """Combines a kind of features with a kind of model.

    Attributes:
        features: which features of a row the model reads.
        kind: the kind of model.
        strength: the smoothing of naive Bayes, the penalty of ridge regression, the inverse penalty of the others.
    """

    features: Features
    kind: ModelKind
    strength: float

    def fit(self, matrix: Any, labels: NDArray[Any]) -> tuple[Floats, Floats]:
        """Returns (outputs, features) weights and (outputs,) biases of the fitted model.

        Args:
            matrix: (rows, features), dense or sparse.
            labels: (rows,) class numbers from 0 on without a gap, or scores for "ridge".
        """
        model = self._model().fit(matrix, labels)
        if self.kind in ("bayes", "complement"):
            prior = model.class_log_prior_ if self.kind == "bayes" else np.zeros(len(model.classes_))
            return np.asarray(model.feature_log_prob_), np.asarray(prior)
        weights, bias = np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
        if self.kind != "ridge" and len(weights) == 1:  # of two classes: a logit of the second
            return np.concatenate([np.zeros_like(weights), weights]), np.concatenate([[0.0], bias])
        return weights, bias

    def _model(self) -> Any:
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.naive_bayes import ComplementNB, MultinomialNB
        from sklearn.svm import LinearSVC

        return {
            "bayes": lambda: MultinomialNB(alpha=self.strength),
            "complement": lambda: ComplementNB(alpha=self.strength),
            "logistic": lambda: LogisticRegression(C=self.strength, max_iter=300, tol=1e-3),
            "svm": lambda: LinearSVC(C=self.strength, random_state=0),
            "ridge": lambda: Ridge(alpha=self.strength),
        }[self.kind]()


def candidates(features: Sequence[Features], is_regression: bool) -> Iterator[LinearCandidate]:
    """Yields every candidate with one of these features, for scores (`is_regression`) or for classes.

    Two are left out: naive Bayes takes no dense features, and logistic regression on letters is slow.
    """
    for name in features:
        kinds: tuple[ModelKind, ...] = ("ridge",) if is_regression else ("bayes", "complement", "svm", "logistic")
        for kind in kinds:
            if (name == "agreement" and kind in ("bayes", "complement")) or (name == "letters" and kind == "logistic"):
                continue
            yield from (LinearCandidate(name, kind, strength) for strength in STRENGTHS[kind])


def _outputs(matrix: Any, weights: Floats, bias: Floats) -> Floats:
    """Returns (rows, outputs) of a linear model."""
    return np.asarray(matrix @ weights.T) + bias


@dataclass(frozen=True, eq=False)
class FittedCandidate:
    """Holds the weights of a fitted candidate.

    Attributes:
        weights: (outputs, features).
        bias: (outputs,).
        temperature: multiplies the outputs before they become probabilities.
    """

    candidate: LinearCandidate
    weights: Floats
    bias: Floats
    temperature: float = 1.0


# --- the model --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class LinearModel:
    """Predicts by the mean of several fitted candidates.

    Attributes:
        vectorizers: turn rows into features.
        members: the fitted candidates, at most MAX_MEMBERS.
        classes: (classes,) the classes' numbers in ascending order; empty for scores.
        row_count: how many rows the model was fitted on.
        validation_score: the accuracy of the mean in the cross-validation; of scores the share of explained variance.
    """

    vectorizers: Vectorizers = field(repr=False)
    members: tuple[FittedCandidate, ...] = field(repr=False)
    classes: NDArray[np.int64]
    row_count: int
    validation_score: float

    @property
    def is_regression(self) -> bool:
        return not len(self.classes)

    @classmethod
    def fit(
        cls, texts: Sequence[str], labels: Sequence[int] | Sequence[float], pairs: Sequence[str] | None = None,
        is_regression: bool = False, seed: int = 0, progress: Progress | None = None,
    ) -> LinearModel:  # fmt: skip
        """Chooses the members by cross-validation, and fits them on all rows.

        Args:
            texts: the text of each row, or the first one of each pair.
            labels: class numbers or scores.
            pairs: the second text of each row, if rows are pairs.
            is_regression: whether labels are scores.
            seed: draws the folds, and the sample of MAX_VALIDATED_ROWS rows.
            progress: receives 1 for each candidate that was tried.

        Raises:
            UsageError: there are fewer than two rows, all class labels are equal, or no row has a word or a letter.
        """
        from threadpoolctl import threadpool_limits

        rows, truth = Rows(texts, pairs), np.asarray(labels)
        if len(rows) < 2:
            count = "one row is" if len(rows) else "no rows are"
            raise UsageError(f"{count} given, too few for a linear model", "give two at least")
        if not is_regression and len({*truth.tolist()}) < 2:
            raise UsageError("all rows have one label", "give rows of two classes at least")
        vectorizers = Vectorizers.fit(rows)
        names = vectorizers.feature_names()
        if not names:
            raise UsageError("no row has a word or a letter", "give rows with text")
        matrices = vectorizers.transform(rows, names)
        classes, class_indices = np.unique(truth, return_inverse=True)
        target = truth.astype(np.float64) if is_regression else class_indices
        sample = np.random.default_rng(seed).permutation(len(rows))[:MAX_VALIDATED_ROWS]
        tried, outputs = list[LinearCandidate](), list[Floats]()
        # OpenBLAS's threads wait by spinning: beside other programs a fit takes six times as long (log, 2026-12-01)
        with threadpool_limits(1, user_api="blas"):
            for candidate in candidates(names, is_regression):
                part = matrices[candidate.features][sample]
                tried.append(candidate)
                outputs.append(
                    _cross_validate(candidate, part, target[sample], 0 if is_regression else len(classes), seed)
                )
                if progress is not None:
                    progress(1)
            chosen_indices, temperatures, validation_score = _choose_members(outputs, target[sample], is_regression)
            members = tuple(
                FittedCandidate(tried[n], *tried[n].fit(matrices[tried[n].features], target), temperatures[n])
                for n in chosen_indices
            )
        class_numbers = np.zeros(0, np.int64) if is_regression else classes.astype(np.int64)
        return cls(vectorizers, members, class_numbers, len(rows), validation_score)

    def predict(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> NDArray[Any]:
        """Returns (texts,) the number of each text's likeliest class, or its score."""
        means = self._mean_outputs(Rows(texts, pairs))
        return means[:, 0] if self.is_regression else self.classes[means.argmax(1)]

    def log_probabilities(self, texts: Sequence[str], pairs: Sequence[str] | None, class_count: int) -> Floats:
        """Returns (texts, classes) log-probabilities. A class without a training row gets 1 / (training rows + 1).

        Args:
            texts: the texts, or the first one of each pair.
            pairs: the second text of each pair. None: rows are not pairs.
            class_count: the number of classes, those without a training row too.

        Raises:
            UsageError: the labels are scores.
        """
        if self.is_regression:
            raise UsageError("scores have no classes", "leave the client's own models out")
        log_probabilities = np.full((len(texts), class_count), -np.log(self.row_count + 1.0))
        log_probabilities[:, self.classes] = self._mean_outputs(Rows(texts, pairs))
        return log_probabilities

    def _mean_outputs(self, rows: Rows) -> Floats:
        """Returns (rows, classes) the logarithms of the members' mean probabilities, or (rows, 1) their mean score."""
        names = list(dict.fromkeys(member.candidate.features for member in self.members))
        matrices = self.vectorizers.transform(rows, names)
        outputs = [
            _outputs(matrices[member.candidate.features], member.weights, member.bias) for member in self.members
        ]
        if self.is_regression:
            return np.mean(outputs, axis=0)
        logs = [log_softmax(member.temperature * out, 1) for member, out in zip(self.members, outputs, strict=True)]
        return np.asarray(logsumexp(logs, axis=0) - np.log(len(logs)))


def _cross_validate(
    candidate: LinearCandidate, matrix: Any, target: NDArray[Any], class_count: int, seed: int
) -> Floats:
    """Returns (rows, outputs): the outputs for each row of a fit without that row.

    A class that a fold lacks is never predicted.

    Args:
        target: (rows,) class numbers from 0 on without a gap, or scores.
        class_count: the number of classes, 0 for scores.
    """
    from sklearn.model_selection import KFold, StratifiedKFold

    folds = min(FOLD_COUNT, len(target))
    rarest = int(np.bincount(target).min()) if class_count else 0
    split = StratifiedKFold(folds, shuffle=True, random_state=seed) if rarest >= folds else (
        KFold(folds, shuffle=True, random_state=seed))  # fmt: skip
    outputs = np.full((len(target), class_count or 1), -1e3 if class_count else 0.0)
    for train, test in split.split(target, target):
        if class_count and len(present := np.unique(target[train])) < 2:
            outputs[test, target[train][0]] = 0
            continue
        columns = present if class_count else np.zeros(1, np.int64)
        fitted_target = np.searchsorted(present, target[train]) if class_count else target[train]
        outputs[np.ix_(test, columns)] = _outputs(matrix[test], *candidate.fit(matrix[train], fitted_target))
    return outputs


def _choose_members(
    outputs: Sequence[Floats], target: NDArray[Any], is_regression: bool
) -> tuple[list[int], list[float], float]:
    """Returns the indices of the best candidates, each candidate's temperature, and the score of the best ones' mean.

    The score is the accuracy, or for a regression the share of explained variance.

    Args:
        outputs: for each candidate (rows, outputs) from the cross-validation.
        target: (rows,) class numbers from 0 on without a gap, or scores.
    """
    if is_regression:
        errors = [float(((output[:, 0] - target) ** 2).mean()) for output in outputs]
        chosen_indices = [int(n) for n in np.argsort(errors, kind="stable")[:MAX_MEMBERS]]
        mean = np.mean([outputs[n][:, 0] for n in chosen_indices], axis=0)
        return chosen_indices, [1.0] * len(outputs), float(1 - ((mean - target) ** 2).mean() / max(target.var(), 1e-12))
    rows = np.arange(len(target))

    def mean_log_likelihood(output: Floats, temperature: float) -> float:
        return float(log_softmax(temperature * output, 1)[rows, target].mean())

    accuracies = [float((output.argmax(1) == target).mean()) for output in outputs]
    temperatures = [max(TEMPERATURES, key=partial(mean_log_likelihood, output)) for output in outputs]
    log_likelihoods = [mean_log_likelihood(*pair) for pair in zip(outputs, temperatures, strict=True)]
    order = sorted(range(len(outputs)), key=lambda n: (-accuracies[n], -log_likelihoods[n]))
    chosen_indices = order[:MAX_MEMBERS]
    mean = logsumexp([log_softmax(temperatures[n] * outputs[n], 1) for n in chosen_indices], axis=0)
    return chosen_indices, temperatures, float((mean.argmax(1) == target).mean())


def pool_probabilities(server_logits: NDArray[Any], local_log_probabilities: Floats) -> Floats:
    """Returns (texts, classes) probabilities of the logarithmic opinion pool of both models, with equal weights.

    Args:
        server_logits: (texts, classes) log-probabilities or logits; each row may have any constant added.
        local_log_probabilities: (texts, classes) log-probabilities.
    """
    sums = np.asarray(server_logits, np.float64) + local_log_probabilities
    sums = np.exp(sums - sums.max(1, keepdims=True))
    return np.asarray(sums / sums.sum(1, keepdims=True))


# --- a folder ---------------------------------------------------------------------------------------------------------
def save(model: LinearModel, label_names: Sequence[str], folder: Path) -> None:
    """Writes a model and the names of its classes to an existing folder.

    The folder is as private as the training rows: the model's vocabulary has words of them.
    """
    from safetensors.numpy import save as packed

    tensors: dict[str, NDArray[Any]] = {}
    for number, member in enumerate(model.members):
        tensors |= {f"weights.{number}": member.weights.astype(np.float32), f"bias.{number}": member.bias}
    for name, vectorizer in model.vectorizers.vectorizer_by_name.items():
        tensors[f"idf.{name}"] = np.asarray(vectorizer.idf_)
    if model.vectorizers.agreement_scales is not None:
        tensors["scales"] = model.vectorizers.agreement_scales
    document = {
        "version": 1,
        "labels": list(label_names),
        "classes": model.classes.tolist(),
        "rows": model.row_count,
        "validated": model.validation_score,
        "members": [
            {"features": member.candidate.features, "kind": member.candidate.kind,
             "strength": member.candidate.strength, "temperature": member.temperature}
            for member in model.members
        ],
        "vocabulary": {
            name: list(vectorizer.get_feature_names_out())
            for name, vectorizer in model.vectorizers.vectorizer_by_name.items()
        },
    }  # fmt: skip
    files.write(folder / TENSORS_FILE, packed(tensors))
    files.write(folder / LINEAR_FILE, json.dumps(document))


def load(folder: Path) -> tuple[LinearModel, list[str]]:
    """Reads a folder of `save`, and returns the model and the names of its classes.

    Raises:
        CorruptCheckpoint: a file is missing, or was not written by `save`.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        document = json.loads((folder / LINEAR_FILE).read_text("utf-8"))
        tensors = load_file(folder / TENSORS_FILE)
        if document["version"] != 1:
            raise ValueError("another version")
        by_name = {}
        for name, vocabulary in document["vocabulary"].items():
            vectorizer = _vectorizer(name)
            vectorizer.set_params(
                vocabulary={word: column for column, word in enumerate(vocabulary)}, max_features=None
            )
            vectorizer.idf_ = tensors[f"idf.{name}"]
            by_name[name] = vectorizer
        members = []
        for number, entry in enumerate(document["members"]):
            candidate = LinearCandidate(
                _one_of(entry["features"], Features), _one_of(entry["kind"], ModelKind), float(entry["strength"])
            )
            weights = tensors[f"weights.{number}"].astype(np.float64)
            members.append(FittedCandidate(candidate, weights, tensors[f"bias.{number}"], float(entry["temperature"])))
        model = LinearModel(
            Vectorizers(by_name, tensors.get("scales")), tuple(members), np.array(document["classes"], np.int64),
            int(document["rows"]), float(document["validated"]),
        )  # fmt: skip
        return model, [str(label) for label in document["labels"]]
    except (OSError, KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise CorruptCheckpoint(
            f"{folder} holds no linear model that can be read ({type(error).__name__})", "make it anew with `compare`"
        ) from None


def _one_of(name: Any, literal: Any) -> Any:
    """Returns a name. Raises ValueError if it is none of the type `literal`."""
    if name not in get_args(literal):
        raise ValueError("an unknown choice")
    return name

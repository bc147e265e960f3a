"""The client's own linear model (client/alone.py) beside a grid that a careful person would try with scikit-learn.

    python bench/alone.py DATA            DATA: the folder of data sets; writes recipes/results/alone.json

The grid: TF-IDF of words and pairs, with and without stop words, of letters, and of both; counts; logistic regression,
linear SVM, two kinds of naive Bayes, each at several strengths: 84 settings. "Best of the grid" is the setting that is
best on the held-out rows themselves, which nobody knows beforehand; "chosen of the grid" is the best by
cross-validation. Accuracy in percent, means over two draws of the rows.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.naive_bayes import ComplementNB, MultinomialNB
from sklearn.pipeline import make_union
from sklearn.svm import LinearSVC

from milkglass import files
from milkglass.client.alone import LinearModel, Rows
from milkglass.experiments import data_refs
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.runs import code_version

OUT = Path(__file__).parents[1] / "recipes" / "results" / "alone.json"
# The data, the rows to train with, and those to ask about: so many that the best of 84 settings is not the luckiest
SETS = {
    "tweets": ("tweet_sentiment:test", 2_000, 3_000), "AG News": ("ag_news:train", 2_000, 3_000),
    "MRPC": ("mrpc:train", 2_400, 1_200), "SST-2": ("sst2/train.tsv", 2_000, 3_000),
}  # fmt: skip
SEEDS = (0, 1)


def features() -> dict[str, Any]:
    words = {"ngram_range": (1, 2), "sublinear_tf": True}
    letters = {"analyzer": "char_wb", "ngram_range": (2, 5), "sublinear_tf": True}
    return {
        "words": TfidfVectorizer(**words),
        "words, no stop words": TfidfVectorizer(stop_words="english", **words),
        "letters": TfidfVectorizer(**letters),
        "both": make_union(TfidfVectorizer(**words), TfidfVectorizer(**letters)),
        "counts": CountVectorizer(ngram_range=(1, 2)),
        "counts, no stop words": CountVectorizer(ngram_range=(1, 2), stop_words="english"),
    }


def models() -> Iterator[Any]:
    yield from (LogisticRegression(C=one, max_iter=1000) for one in (1, 10, 100))
    yield from (LinearSVC(C=one) for one in (0.1, 0.3, 1))
    yield from (MultinomialNB(alpha=one) for one in (0.03, 0.1, 0.3, 1))
    yield from (ComplementNB(alpha=one) for one in (0.03, 0.1, 0.3, 1))


def grid(train: Rows, labels: np.ndarray, asked: Rows, truth: np.ndarray) -> tuple[float, float, float]:
    """Returns the best accuracy on the asked rows, that of the setting chosen by cross-validation, and seconds."""
    begun, found = time.process_time(), list[tuple[float, float]]()
    for one in features().values():
        matrix, other = one.fit_transform(train.as_texts()), one.transform(asked.as_texts())
        for model in models():
            chosen_by = float(cross_val_score(model, matrix, labels, cv=5).mean())
            found.append((chosen_by, float(model.fit(matrix, labels).score(other, truth))))
    return max(right for _, right in found), max(found)[1], time.process_time() - begun


def measured(data: Path, name: str, trained: int, count: int, seed: int) -> dict[str, float]:
    examples = data_refs.load_examples(data, name)
    order = np.random.default_rng(seed).permutation(len(examples))[: trained + count]
    drawn = [examples[i] for i in order]
    numbers = data_refs.class_numbers(name, examples)
    whole = data_refs.labelled_texts(drawn, numbers)
    asked, train = whole.part(slice(0, count)), whole.part(slice(count, None))
    truth, labels = np.asarray(asked.labels), np.asarray(train.labels)
    begun = time.process_time()
    model = LinearModel.fit(train.texts, train.labels, train.pairs, seed=seed)
    seconds = time.process_time() - begun
    right = float((model.predict(asked.texts, asked.pairs) == truth).mean())
    best, chosen, took = grid(Rows(train.texts, train.pairs), labels, Rows(asked.texts, asked.pairs), truth)
    return {
        "ours": 100 * right, "best of the grid": 100 * best, "chosen of the grid": 100 * chosen,
        "seconds of ours": seconds, "seconds of best of the grid": took, "seconds of chosen of the grid": took,
    }  # fmt: skip


if __name__ == "__main__":
    warnings.simplefilter("ignore", ConvergenceWarning)
    made, figures = code_version(), list[ResultRecord]()
    for title, (name, trained, count) in SETS.items():
        each = [measured(Path(sys.argv[1]), name, trained, count, seed) for seed in SEEDS]
        for variant in ("ours", "best of the grid", "chosen of the grid"):
            more = {"seconds": float(np.mean([one[f"seconds of {variant}"] for one in each]))}
            found = [one[variant] for one in each]
            more |= {"least": min(found), "most": max(found)}  # of the draws
            value = float(np.mean(found))
            figures.append(
                ResultRecord(measure="accuracy", value=value, data=title, variant=variant, further_numbers=more)
            )
        print(title, {one.variant: round(one.value, 1) for one in figures[-3:]}, flush=True)
    document = {"recipe": "alone", "made": made, "figures": [one.round_to(2).to_json() for one in figures]}
    files.write(OUT, json.dumps(document, indent=1) + "\n")

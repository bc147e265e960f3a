"""Data sets for classification and regression.

They are eight tasks of GLUE (Wang et al. 2019), in the TSV files of its download script, without quoting; AG News
(Zhang et al. 2015); TweetEval sentiment (Rosenthal et al. 2017, Barbieri et al. 2020); and the sentence polarity data
of Pang and Lee (2005).

GLUE's test files have no labels, so only MRPC has a split "test", from Microsoft's own files. MNLI's "validation" is
the matched one. STS-B is a regression: the label is the score, from 0 to 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from milkglass.errors import CodecError
from milkglass.rows.encoding import lines
from milkglass.rows.place import Place
from milkglass.rows.sets.description import HubDataset, LabelledColumn, Layout, PublicDataset, alternatives
from milkglass.rows.tables import table, text_lines

FILES = {"train": ("train.tsv",), "validation": ("dev.tsv",)}
HUB = {"train": "train", "validation": "validation"}
COLA = ("source", "label", "mark", "sentence")  # CoLA's files have no header
MATCHED_SPLITS = {
    "train": "train",
    "validation": "validation_matched",
    "validation_mismatched": "validation_mismatched",
}


def _number_labels(labels: tuple[str, ...], start: int = 0) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(labels, start)}


def _task(
    name: str, description: str, columns: tuple[str, ...], labels: tuple[str, ...], licence: str, folder: str, *,
    metrics: tuple[str, ...] = ("accuracy",), has_names: bool = False,
    further_labels: Mapping[str, str] = MappingProxyType({}), files: Mapping[str, tuple[str, ...]] = FILES,
    header: tuple[str, ...] | None = None, flawed: bool = False, flaws: str = "", hub_columns: tuple[str, ...] = (),
    hub_splits: Mapping[str, str] = HUB, scores: tuple[float, float] | None = None,
) -> PublicDataset:  # fmt: skip
    """Returns the description of a task of GLUE.

    Args:
        columns: the files' columns: the text, the second text if there is one, the label.
        has_names: whether the files write labels by name. Otherwise they write numbers, as the hub does.
        further_labels: further values of the label column.
        files: for each split the names under which it was published.
        header: the columns of files without a header.
        flawed: whether the files have rows that cannot be used.
        hub_columns: the hub's columns, if they differ.
        scores: the lowest and the highest score of a regression. None: it is a classification.
    """
    name_of_label = {label: label for label in labels} if has_names else {}
    name_of_label |= _number_labels(labels) | dict(further_labels)

    def build(cells: tuple[str, ...]) -> LabelledColumn:
        text, *pair, label = cells
        return LabelledColumn(text, label, name_of_label, pair[0] if pair else None, flawed, scores=scores)

    rows = partial(table, required=columns, header=header, flawed=flawed)
    splits = {split: alternatives(rows, build(columns), *paths) for split, paths in files.items()}
    hub = HubDataset("nyu-mll/glue", name, hub_splits, build(hub_columns or columns))
    return PublicDataset(
        name, description, "regression" if scores else "classification", splits, columns, licence, labels, metrics, hub,
        flaws, (folder,),
    )  # fmt: skip


ENTAILED_LABELS = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
TASKS = (
    _task("sst2", "is a piece of a film review friendly?", ("sentence", "label"), ("negative", "positive"),
          "Stanford, none stated", "SST-2"),
    _task("qnli", "does a sentence answer a question?", ("question", "sentence", "label"), ENTAILED_LABELS,
          "CC BY-SA 4.0 (SQuAD)", "QNLI", has_names=True),
    _task("cola", "is a sentence good English?", ("sentence", "label"), ("unacceptable", "acceptable"),
          "none stated, research", "CoLA", metrics=("matthews",), header=COLA,
          files={"train": ("train.tsv", "in_domain_train.tsv"), "validation": ("dev.tsv", "in_domain_dev.tsv")}),
    _task("mrpc", "are two sentences from the news paraphrases?", ("#1 String", "#2 String", "Quality"),
          ("not_equivalent", "equivalent"), "Microsoft Research Paraphrase Corpus, research only", "MRPC",
          metrics=("accuracy", "f1"), hub_columns=("sentence1", "sentence2", "label"),
          hub_splits={**HUB, "test": "test"},
          files={"train": ("train.tsv", "msr_paraphrase_train.txt"), "validation": ("dev.tsv",),
                 "test": ("msr_paraphrase_test.txt",)}),
    _task("rte", "does a sentence follow from another?", ("sentence1", "sentence2", "label"), ENTAILED_LABELS,
          "none stated, research", "RTE", has_names=True),
    _task("stsb", "how similar two sentences are, from 0 to 5", ("sentence1", "sentence2", "score"), (),
          "STS Benchmark, parts under several terms", "STS-B", metrics=("pearson", "spearman"), scores=(0, 5),
          hub_columns=("sentence1", "sentence2", "label")),
    _task("qqp", "do two questions ask the same?", ("question1", "question2", "is_duplicate"),
          ("not_duplicate", "duplicate"), "Quora's terms, non-commercial", "QQP", metrics=("accuracy", "f1"),
          flawed=True, flaws="rows that a line break tore apart, or with an empty question",
          hub_columns=("question1", "question2", "label")),
    _task("mnli", "does a sentence follow from another?", ("sentence1", "sentence2", "gold_label"), NLI,
          "OANC and others, see the MultiNLI paper", "MNLI", has_names=True, further_labels={"-": ""},
          flaws="rows whose annotators did not agree on a label",
          files={"train": ("train.tsv",), "validation": ("dev_matched.tsv",),
                 "validation_mismatched": ("dev_mismatched.tsv",)},
          hub_columns=("premise", "hypothesis", "label"), hub_splits=MATCHED_SPLITS),
)  # fmt: skip


# --- by topic or mood -------------------------------------------------------------------------------------------------
CLASSES = ("World", "Sports", "Business", "Sci/Tech")
MOODS = ("negative", "neutral", "positive")
SIDES = ("negative", "positive")


def _ag_news() -> PublicDataset:
    """Describes the published CSV (class from 1, title, description; no header), or text<TAB>class name."""
    long_texts = LabelledColumn("title", "class", _number_labels(CLASSES, 1), joined_column="description")
    short_texts = LabelledColumn("text", "class", {name: name for name in CLASSES})
    read_csv = partial(table, required=(), delimiter=",", quoted=True, header=("class", "title", "description"))
    read_tsv = partial(table, required=(), header=("text", "class"))
    splits = {
        name: (Layout((f"{name}.csv",), read_csv, long_texts), Layout((f"{name}.tsv",), read_tsv, short_texts))
        for name in ("train", "test")
    }
    build = LabelledColumn("text", "label", _number_labels(CLASSES))
    hub = HubDataset("fancyzhx/ag_news", None, {"train": "train", "test": "test"}, build)
    return PublicDataset(
        "ag_news", "the topic of a piece of news", "classification", splits, ("title", "description", "class"),
        "non-commercial research", CLASSES, ("accuracy",), hub,
    )  # fmt: skip


def side_by_side(text: Path, labels: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields line n of one file with line n of the other. Raises CodecError if one has fewer lines."""
    for (number, line), (_, label) in zip_longest(lines(text), lines(labels), fillvalue=(0, "")):
        if not number or not label.strip():
            shorter = text.name if not number else labels.name
            raise CodecError(f"{shorter} has fewer lines than the file beside it", "fetch both files again")
        yield Place(text.name, number), {"text": line.strip(), "label": label}


def _tweets() -> PublicDataset:
    build = LabelledColumn("text", "label", _number_labels(MOODS))
    files = {"train": "train", "validation": "val", "test": "test"}
    splits = {
        split: (Layout((f"{file}_text.txt", f"{file}_labels.txt"), side_by_side, build),)
        for split, file in files.items()
    }
    hub = HubDataset("cardiffnlp/tweet_eval", "sentiment", {file: file for file in files}, build)
    return PublicDataset(
        "tweet_sentiment", "the mood of a tweet", "classification", splits, ("text", "label"), "Twitter's terms", MOODS,
        ("macro recall", "accuracy"), hub, folders=("sentiment",),
    )  # fmt: skip


def two_sides(negative: Path, positive: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields rows of Latin-1 files, as published, alternating between the sides, so that any part has both."""
    rows_of_sides = [text_lines(path, encoding="latin-1", strip=True) for path in (negative, positive)]
    for pair in zip_longest(*rows_of_sides):
        for name, placed_row in zip(SIDES, pair, strict=True):
            if placed_row is not None:
                yield placed_row[0], {**placed_row[1], "side": name}


def _rotten_tomatoes() -> PublicDataset:
    build = LabelledColumn("text", "side", {name: name for name in SIDES})
    splits = {"train": (Layout(("rt-polarity.neg", "rt-polarity.pos"), two_sides, build),)}
    hub = HubDataset(
        "cornell-movie-review-data/rotten_tomatoes", None, {split: split for split in ("train", "validation", "test")},
        LabelledColumn("text", "label", _number_labels(SIDES)),
    )  # fmt: skip
    return PublicDataset(
        "rotten_tomatoes", "is a sentence of a film review friendly? Published without splits", "classification",
        splits, ("text",), "none stated", SIDES, ("accuracy",), hub, folders=("rt-polaritydata",),
    )  # fmt: skip


TOPICS = (_ag_news(), _tweets(), _rotten_tomatoes())

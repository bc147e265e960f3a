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
from milkglass.rows.encoding import numbered_lines
from milkglass.rows.place import Place
from milkglass.rows.sets.description import HubDataset, LabelledTextBuilder, Layout, PublicDataset, single_file_layouts
from milkglass.rows.tables import table_rows, text_lines

GLUE_FILES = {"train": ("train.tsv",), "validation": ("dev.tsv",)}
HUB_SPLITS = {"train": "train", "validation": "validation"}
COLA_COLUMNS = ("source", "label", "mark", "sentence")  # CoLA's files have no header
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
    further_labels: Mapping[str, str] = MappingProxyType({}), files: Mapping[str, tuple[str, ...]] = GLUE_FILES,
    header: tuple[str, ...] | None = None, is_flawed: bool = False, flaws: str = "", hub_columns: tuple[str, ...] = (),
    hub_splits: Mapping[str, str] = HUB_SPLITS, scores: tuple[float, float] | None = None,
) -> PublicDataset:  # fmt: skip
    """Returns the description of a task of GLUE.

    Args:
        name: the task's name.
        description: what is asked, in words.
        columns: the files' columns: the text, the second text if there is one, the label.
        labels: the label names, in the order of their numbers; empty for a regression.
        licence: the licence, or that none is stated.
        folder: the name of the folder in GLUE's own archive.
        metrics: names of metrics/glue.py.
        has_names: whether the files write labels by name. Otherwise they write numbers, as the hub does.
        further_labels: further values of the label column.
        files: for each split the names under which it was published.
        header: the columns of files without a header.
        is_flawed: whether the files have rows that cannot be used.
        hub_columns: the hub's columns, if they differ.
        scores: the lowest and the highest score of a regression. None: it is a classification.
    """
    name_of_label = {label: label for label in labels} if has_names else {}
    name_of_label |= _number_labels(labels) | dict(further_labels)

    def build(cells: tuple[str, ...]) -> LabelledTextBuilder:
        text, *pair, label = cells
        return LabelledTextBuilder(text, label, name_of_label, pair[0] if pair else None, is_flawed, score_range=scores)

    rows = partial(table_rows, required=columns, header=header, is_flawed=is_flawed)
    splits = {split: single_file_layouts(rows, build(columns), *paths) for split, paths in files.items()}
    hub = HubDataset("nyu-mll/glue", name, hub_splits, build(hub_columns or columns))
    return PublicDataset(
        name, description, "regression" if scores else "classification", splits, columns, licence, labels, metrics, hub,
        flaws, (folder,),
    )  # fmt: skip


ENTAILED_LABELS = ("entailment", "not_entailment")
NLI_LABELS = ("entailment", "neutral", "contradiction")
TASKS = (
    _task("sst2", "is a piece of a film review friendly?", ("sentence", "label"), ("negative", "positive"),
          "Stanford, none stated", "SST-2"),
    _task("qnli", "does a sentence answer a question?", ("question", "sentence", "label"), ENTAILED_LABELS,
          "CC BY-SA 4.0 (SQuAD)", "QNLI", has_names=True),
    _task("cola", "is a sentence good English?", ("sentence", "label"), ("unacceptable", "acceptable"),
          "none stated, research", "CoLA", metrics=("matthews",), header=COLA_COLUMNS,
          files={"train": ("train.tsv", "in_domain_train.tsv"), "validation": ("dev.tsv", "in_domain_dev.tsv")}),
    _task("mrpc", "are two sentences from the news paraphrases?", ("#1 String", "#2 String", "Quality"),
          ("not_equivalent", "equivalent"), "Microsoft Research Paraphrase Corpus, research only", "MRPC",
          metrics=("accuracy", "f1"), hub_columns=("sentence1", "sentence2", "label"),
          hub_splits={**HUB_SPLITS, "test": "test"},
          files={"train": ("train.tsv", "msr_paraphrase_train.txt"), "validation": ("dev.tsv",),
                 "test": ("msr_paraphrase_test.txt",)}),
    _task("rte", "does a sentence follow from another?", ("sentence1", "sentence2", "label"), ENTAILED_LABELS,
          "none stated, research", "RTE", has_names=True),
    _task("stsb", "how similar two sentences are, from 0 to 5", ("sentence1", "sentence2", "score"), (),
          "STS Benchmark, parts under several terms", "STS-B", metrics=("pearson", "spearman"), scores=(0, 5),
          hub_columns=("sentence1", "sentence2", "label")),
    _task("qqp", "do two questions ask the same?", ("question1", "question2", "is_duplicate"),
          ("not_duplicate", "duplicate"), "Quora's terms, non-commercial", "QQP", metrics=("accuracy", "f1"),
          is_flawed=True, flaws="rows that a line break tore apart, or with an empty question",
          hub_columns=("question1", "question2", "label")),
    _task("mnli", "does a sentence follow from another?", ("sentence1", "sentence2", "gold_label"), NLI_LABELS,
          "OANC and others, see the MultiNLI paper", "MNLI", has_names=True, further_labels={"-": ""},
          flaws="rows whose annotators did not agree on a label",
          files={"train": ("train.tsv",), "validation": ("dev_matched.tsv",),
                 "validation_mismatched": ("dev_mismatched.tsv",)},
          hub_columns=("premise", "hypothesis", "label"), hub_splits=MATCHED_SPLITS),
)  # fmt: skip


# --- by topic or mood -------------------------------------------------------------------------------------------------
NEWS_LABELS = ("World", "Sports", "Business", "Sci/Tech")
TWEET_LABELS = ("negative", "neutral", "positive")
REVIEW_LABELS = ("negative", "positive")


def _ag_news() -> PublicDataset:
    """Returns the description of AG News.

    It was published as CSV without a header: the class from 1, the title, the description. Another layout is TSV
    without a header: the text and the name of the class.
    """
    long_texts = LabelledTextBuilder("title", "class", _number_labels(NEWS_LABELS, 1), appended_column="description")
    short_texts = LabelledTextBuilder("text", "class", {name: name for name in NEWS_LABELS})
    read_csv = partial(table_rows, required=(), delimiter=",", is_quoted=True, header=("class", "title", "description"))
    read_tsv = partial(table_rows, required=(), header=("text", "class"))
    splits = {
        name: (Layout((f"{name}.csv",), read_csv, long_texts), Layout((f"{name}.tsv",), read_tsv, short_texts))
        for name in ("train", "test")
    }
    build = LabelledTextBuilder("text", "label", _number_labels(NEWS_LABELS))
    hub = HubDataset("fancyzhx/ag_news", None, {"train": "train", "test": "test"}, build)
    return PublicDataset(
        "ag_news", "the topic of a piece of news", "classification", splits, ("title", "description", "class"),
        "non-commercial research", NEWS_LABELS, ("accuracy",), hub,
    )  # fmt: skip


def side_by_side(text: Path, labels: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields line n of one file with line n of the other. Raises CodecError if one has fewer lines."""
    for (number, line), (_, label) in zip_longest(numbered_lines(text), numbered_lines(labels), fillvalue=(0, "")):
        if not number or not label.strip():
            shorter = text.name if not number else labels.name
            raise CodecError(f"{shorter} has fewer lines than the file beside it", "fetch both files again")
        yield Place(text.name, number), {"text": line.strip(), "label": label}


def _tweets() -> PublicDataset:
    build = LabelledTextBuilder("text", "label", _number_labels(TWEET_LABELS))
    files = {"train": "train", "validation": "val", "test": "test"}
    splits = {
        split: (Layout((f"{file}_text.txt", f"{file}_labels.txt"), side_by_side, build),)
        for split, file in files.items()
    }
    hub = HubDataset("cardiffnlp/tweet_eval", "sentiment", {file: file for file in files}, build)
    return PublicDataset(
        "tweet_sentiment", "the mood of a tweet", "classification", splits, ("text", "label"), "Twitter's terms",
        TWEET_LABELS, ("macro recall", "accuracy"), hub, other_folder_names=("sentiment",),
    )  # fmt: skip


def two_sides(negative: Path, positive: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields rows of Latin-1 files, as published, alternating between the sides, so that any part has both."""
    rows_of_sides = [text_lines(path, encoding="latin-1", strip=True) for path in (negative, positive)]
    for pair in zip_longest(*rows_of_sides):
        for name, placed_row in zip(REVIEW_LABELS, pair, strict=True):
            if placed_row is not None:
                yield placed_row[0], {**placed_row[1], "side": name}


def _rotten_tomatoes() -> PublicDataset:
    build = LabelledTextBuilder("text", "side", {name: name for name in REVIEW_LABELS})
    splits = {"train": (Layout(("rt-polarity.neg", "rt-polarity.pos"), two_sides, build),)}
    hub = HubDataset(
        "cornell-movie-review-data/rotten_tomatoes", None, {split: split for split in ("train", "validation", "test")},
        LabelledTextBuilder("text", "label", _number_labels(REVIEW_LABELS)),
    )  # fmt: skip
    return PublicDataset(
        "rotten_tomatoes", "is a sentence of a film review friendly? Published without splits", "classification",
        splits, ("text",), "none stated", REVIEW_LABELS, ("accuracy",), hub, other_folder_names=("rt-polaritydata",),
    )  # fmt: skip


TOPICS = (_ag_news(), _tweets(), _rotten_tomatoes())

"""GLUE (Wang et al. 2019): eight of its tasks, in the TSV files of its download script, quoting off.

Its test files have no labels, so there is no split "test", but for MRPC's in Microsoft's own files. MNLI's "validation"
is the matched one. STS-B is a regression: the label is the score, from 0 to 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from milkglass.datasets.description import Description, Hub, LabelledColumn, Layout, ScoredPair
from milkglass.datasets.rows import tsv

FILES = {"train": ("train.tsv",), "validation": ("dev.tsv",)}
HUB = {"train": "train", "validation": "validation"}
COLA = ("source", "label", "mark", "sentence")  # CoLA's files have no header
MATCHED = {"train": "train", "validation": "validation_matched", "validation_mismatched": "validation_mismatched"}


def _task(
    name: str, about: str, columns: tuple[str, ...], labels: tuple[str, ...], licence: str, folder: str, *,
    metrics: tuple[str, ...] = ("accuracy",), named: bool = False, others: Mapping[str, str] = MappingProxyType({}),
    files: Mapping[str, tuple[str, ...]] = FILES, header: tuple[str, ...] | None = None, flawed: bool = False,
    flaws: str = "", hub_columns: tuple[str, ...] = (), hub_splits: Mapping[str, str] = HUB,
) -> Description:  # fmt: skip
    """A classification.

    Args:
        columns: of the files: the text, the second text where there is one, the label.
        named: whether the files write labels by name; otherwise they write numbers, as the hub does.
        others: further values of the label column.
        files: for each split the names under which it was published.
        header: of files without one.
        flawed: whether the files have rows that nobody can use.
        hub_columns: as the hub names them, where that differs.
    """
    values = {one: one for one in labels} if named else {}
    values |= {str(number): label for number, label in enumerate(labels)} | dict(others)

    def build(cells: tuple[str, ...]) -> LabelledColumn:
        text, *pair, label = cells
        return LabelledColumn(text, label, values, pair[0] if pair else None, flawed)

    rows = partial(tsv, needed=columns, header=header, flawed=flawed)
    splits = {split: tuple(Layout((one,), rows, build(columns)) for one in paths) for split, paths in files.items()}
    hub = Hub("nyu-mll/glue", name, hub_splits, build(hub_columns or columns))
    return Description(
        name, about, "classification", splits, columns, licence, labels, metrics, hub, flaws, (folder,)
    )  # fmt: skip


def _stsb() -> Description:
    columns = ("sentence1", "sentence2", "score")
    rows, build = partial(tsv, needed=columns), ScoredPair(*columns, 0, 5)
    splits = {split: tuple(Layout((one,), rows, build) for one in paths) for split, paths in FILES.items()}
    hub = Hub("nyu-mll/glue", "stsb", HUB, ScoredPair("sentence1", "sentence2", "label", 0, 5))
    return Description(
        "stsb", "how similar two sentences are, from 0 to 5", "regression", splits, columns,
        "STS Benchmark, parts under several terms", (), ("pearson", "spearman"), hub, folders=("STS-B",),
    )  # fmt: skip


ENTAILED = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
TASKS = (
    _task("sst2", "is a piece of a film review friendly?", ("sentence", "label"), ("negative", "positive"),
          "Stanford, none stated", "SST-2"),
    _task("qnli", "does a sentence answer a question?", ("question", "sentence", "label"), ENTAILED,
          "CC BY-SA 4.0 (SQuAD)", "QNLI", named=True),
    _task("cola", "is a sentence good English?", ("sentence", "label"), ("unacceptable", "acceptable"),
          "none stated, research", "CoLA", metrics=("matthews",), header=COLA,
          files={"train": ("train.tsv", "in_domain_train.tsv"), "validation": ("dev.tsv", "in_domain_dev.tsv")}),
    _task("mrpc", "are two sentences from the news paraphrases?", ("#1 String", "#2 String", "Quality"),
          ("not_equivalent", "equivalent"), "Microsoft Research Paraphrase Corpus, research only", "MRPC",
          metrics=("accuracy", "f1"), hub_columns=("sentence1", "sentence2", "label"),
          hub_splits={**HUB, "test": "test"},
          files={"train": ("train.tsv", "msr_paraphrase_train.txt"), "validation": ("dev.tsv",),
                 "test": ("msr_paraphrase_test.txt",)}),
    _task("rte", "does a sentence follow from another?", ("sentence1", "sentence2", "label"), ENTAILED,
          "none stated, research", "RTE", named=True),
    _stsb(),
    _task("qqp", "do two questions ask the same?", ("question1", "question2", "is_duplicate"),
          ("not_duplicate", "duplicate"), "Quora's terms, non-commercial", "QQP", metrics=("accuracy", "f1"),
          flawed=True, flaws="rows that a line break tore apart, or with an empty question",
          hub_columns=("question1", "question2", "label")),
    _task("mnli", "does a sentence follow from another?", ("sentence1", "sentence2", "gold_label"), NLI,
          "OANC and others, see the MultiNLI paper", "MNLI", named=True, others={"-": ""},
          flaws="rows whose annotators did not agree on a label",
          files={"train": ("train.tsv",), "validation": ("dev_matched.tsv",),
                 "validation_mismatched": ("dev_mismatched.tsv",)},
          hub_columns=("premise", "hypothesis", "label"), hub_splits=MATCHED),
)  # fmt: skip

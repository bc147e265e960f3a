"""GLUE (Wang et al. 2019): eight of its tasks, in the TSV files of its download script, quoting off.

Its test files have no labels, so there is no split "test", but for MRPC's in Microsoft's own files. MNLI's "validation"
is the matched one. STS-B is a regression: the label is the score, from 0 to 5.
"""

from __future__ import annotations

from functools import partial

from milkglass.datasets.description import Build, Description, Hub, LabelledColumn, Layout, ScoredPair
from milkglass.datasets.rows import tsv

HUB = {"train": "train", "validation": "validation"}
COLA = ("source", "label", "mark", "sentence")  # CoLA's files have no header
MATCHED = {"train": "train", "validation": "validation_matched", "validation_mismatched": "validation_mismatched"}


def _splits(needed: tuple[str, ...], build: Build, flawed: bool = False) -> dict[str, tuple[Layout, ...]]:
    """train.tsv and dev.tsv with a header."""
    rows = partial(tsv, needed=needed, flawed=flawed)
    return {"train": (Layout(("train.tsv",), rows, build),), "validation": (Layout(("dev.tsv",), rows, build),)}


def _single(name: str, about: str, labels: tuple[str, str], licence: str, folder: str, metric: str) -> Description:
    """One sentence, labels 0 and 1."""
    values = dict(zip("01", labels, strict=True))
    build = LabelledColumn("sentence", "label", values)
    hub = Hub("nyu-mll/glue", name, HUB, build)
    if name == "cola":
        rows = partial(tsv, needed=("sentence", "label"), header=COLA)
        splits: dict[str, tuple[Layout, ...]] = {
            "train": (Layout(("train.tsv",), rows, build), Layout(("in_domain_train.tsv",), rows, build)),
            "validation": (Layout(("dev.tsv",), rows, build), Layout(("in_domain_dev.tsv",), rows, build)),
        }
    else:
        splits = _splits(("sentence", "label"), build)
    return Description(
        name, about, "classification", splits, ("sentence", "label"), licence, labels, (metric,), hub, folders=(folder,)
    )


def _entailed(name: str, about: str, text: str, pair: str, licence: str, folder: str) -> Description:
    """Two texts; the files name their labels, the hub numbers them."""
    labels = ("entailment", "not_entailment")
    build = LabelledColumn(text, "label", {one: one for one in labels} | dict(zip("01", labels, strict=True)), pair)
    needed = (text, pair, "label")
    hub = Hub("nyu-mll/glue", name, HUB, build)
    return Description(
        name, about, "classification", _splits(needed, build), needed, licence, labels, ("accuracy",), hub,
        folders=(folder,),
    )  # fmt: skip


def _mrpc() -> Description:
    labels = ("not_equivalent", "equivalent")
    values = dict(zip("01", labels, strict=True))
    needed = ("#1 String", "#2 String", "Quality")
    build = LabelledColumn("#1 String", "Quality", values, "#2 String")
    rows = partial(tsv, needed=needed)
    splits = {
        "train": (Layout(("train.tsv",), rows, build), Layout(("msr_paraphrase_train.txt",), rows, build)),
        "validation": (Layout(("dev.tsv",), rows, build),),
        "test": (Layout(("msr_paraphrase_test.txt",), rows, build),),
    }
    hub = Hub(
        "nyu-mll/glue", "mrpc", {**HUB, "test": "test"}, LabelledColumn("sentence1", "label", values, "sentence2")
    )
    return Description(
        "mrpc", "are two sentences from the news paraphrases?", "classification", splits, needed,
        "Microsoft Research Paraphrase Corpus, research only", labels, ("accuracy", "f1"), hub, folders=("MRPC",),
    )  # fmt: skip


def _stsb() -> Description:
    build = ScoredPair("sentence1", "sentence2", "score", 0, 5)
    needed = ("sentence1", "sentence2", "score")
    hub = Hub("nyu-mll/glue", "stsb", HUB, ScoredPair("sentence1", "sentence2", "label", 0, 5))
    return Description(
        "stsb", "how similar two sentences are, from 0 to 5", "regression", _splits(needed, build), needed,
        "STS Benchmark, parts under several terms", (), ("pearson", "spearman"), hub, folders=("STS-B",),
    )  # fmt: skip


def _qqp() -> Description:
    labels = ("not_duplicate", "duplicate")
    values = dict(zip("01", labels, strict=True))
    needed = ("question1", "question2", "is_duplicate")
    build = LabelledColumn("question1", "is_duplicate", values, "question2", flawed=True)
    hub = Hub("nyu-mll/glue", "qqp", HUB, LabelledColumn("question1", "label", values, "question2", flawed=True))
    return Description(
        "qqp", "do two questions ask the same?", "classification", _splits(needed, build, flawed=True), needed,
        "Quora's terms, non-commercial", labels, ("accuracy", "f1"), hub,
        flaws="rows that a line break tore apart, or with an empty question", folders=("QQP",),
    )  # fmt: skip


def _mnli() -> Description:
    labels = ("entailment", "neutral", "contradiction")
    values = {one: one for one in labels} | dict(zip("012", labels, strict=True)) | {"-": ""}
    needed = ("sentence1", "sentence2", "gold_label")
    build = LabelledColumn("sentence1", "gold_label", values, "sentence2")
    rows = partial(tsv, needed=needed)
    files = {"train": "train", "validation": "dev_matched", "validation_mismatched": "dev_mismatched"}
    splits = {split: (Layout((f"{file}.tsv",), rows, build),) for split, file in files.items()}
    hub = Hub("nyu-mll/glue", "mnli", MATCHED, LabelledColumn("premise", "label", values, "hypothesis"))
    return Description(
        "mnli", "does a sentence follow from another?", "classification", splits, needed,
        "OANC and others, see the MultiNLI paper", labels, ("accuracy",), hub,
        flaws="rows whose annotators did not agree on a label", folders=("MNLI",),
    )  # fmt: skip


TASKS = (
    _single("sst2", "is a piece of a film review friendly?", ("negative", "positive"), "Stanford, none stated", "SST-2",
            "accuracy"),
    _entailed("qnli", "does a sentence answer a question?", "question", "sentence", "CC BY-SA 4.0 (SQuAD)", "QNLI"),
    _single("cola", "is a sentence good English?", ("unacceptable", "acceptable"), "none stated, research", "CoLA",
            "matthews"),
    _mrpc(),
    _entailed("rte", "does a sentence follow from another?", "sentence1", "sentence2", "none stated, research", "RTE"),
    _stsb(),
    _qqp(),
    _mnli(),
)  # fmt: skip

"""AG News (Zhang et al. 2015), TweetEval sentiment (Rosenthal et al. 2017, Barbieri et al. 2020) and the sentence
polarity data of Pang and Lee (2005), which are classified by topic or mood.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from milkglass.datasets.description import Description, Hub, LabelledColumn, Layout
from milkglass.datasets.rows import Place, comma, lines, texts, tsv
from milkglass.errors import CodecError

CLASSES = ("World", "Sports", "Business", "Sci/Tech")
MOODS = ("negative", "neutral", "positive")
SIDES = ("negative", "positive")


def _numbered(labels: tuple[str, ...], start: int = 0) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(labels, start)}


def _ag_news() -> Description:
    """The published CSV (class from 1, title, description; no header), or text<TAB>class name."""
    table = LabelledColumn("title", "class", _numbered(CLASSES, 1), also="description")
    short = LabelledColumn("text", "class", {name: name for name in CLASSES})
    read_csv = partial(comma, needed=(), header=("class", "title", "description"))
    read_tsv = partial(tsv, needed=(), header=("text", "class"))
    splits = {
        name: (Layout((f"{name}.csv",), read_csv, table), Layout((f"{name}.tsv",), read_tsv, short))
        for name in ("train", "test")
    }
    hub = Hub(
        "fancyzhx/ag_news",
        None,
        {"train": "train", "test": "test"},
        LabelledColumn("text", "label", _numbered(CLASSES)),
    )
    return Description(
        "ag_news", "the topic of a piece of news", "classification", splits, ("title", "description", "class"),
        "non-commercial research", CLASSES, ("accuracy",), hub,
    )  # fmt: skip


def side_by_side(text: Path, labels: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Line n of one file belongs to line n of the other."""
    for (number, one), (_, label) in zip_longest(lines(text), lines(labels), fillvalue=(0, "")):
        if not number or not label.strip():
            shorter = text.name if not number else labels.name
            raise CodecError(f"{shorter} has fewer lines than the file beside it", "fetch both files again")
        yield Place(text.name, number), {"text": one.strip(), "label": label}


def _tweets() -> Description:
    build = LabelledColumn("text", "label", _numbered(MOODS))
    files = {"train": "train", "validation": "val", "test": "test"}
    splits = {
        split: (Layout((f"{file}_text.txt", f"{file}_labels.txt"), side_by_side, build),)
        for split, file in files.items()
    }
    hub = Hub("cardiffnlp/tweet_eval", "sentiment", {one: one for one in files}, build)
    return Description(
        "tweet_sentiment", "the mood of a tweet", "classification", splits, ("text", "label"), "Twitter's terms", MOODS,
        ("macro recall", "accuracy"), hub, folders=("sentiment",),
    )  # fmt: skip


def two_sides(negative: Path, positive: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Latin-1, as it was published; every second row is of the other side, so that a part of them is of both."""
    sides = (texts(negative, "latin-1"), texts(positive, "latin-1"))
    for pair in zip_longest(*sides):
        for name, result in zip(SIDES, pair, strict=True):
            if result is not None:
                yield result[0], {**result[1], "side": name}


def _rotten() -> Description:
    build = LabelledColumn("text", "side", {name: name for name in SIDES})
    splits = {"train": (Layout(("rt-polarity.neg", "rt-polarity.pos"), two_sides, build),)}
    hub = Hub(
        "cornell-movie-review-data/rotten_tomatoes", None, {one: one for one in ("train", "validation", "test")},
        LabelledColumn("text", "label", _numbered(SIDES)),
    )  # fmt: skip
    return Description(
        "rotten_tomatoes", "is a sentence of a film review friendly? Published without splits", "classification",
        splits, ("text",), "none stated", SIDES, ("accuracy",), hub, folders=("rt-polaritydata",),
    )  # fmt: skip


TOPICS = (_ag_news(), _tweets(), _rotten())

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from milkglass.demo.data.make import DESK_OF_LABEL, HELD_OUT_SITUATIONS, INSTRUCTION, main, read_situations

DATA = files("milkglass.demo") / "data"
NAMES = ("tickets_train.jsonl", "tickets_test.jsonl", "replies_train.jsonl", "replies_test.jsonl")


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def shape(text: str) -> str:
    """The text without names and numbers: two texts of one shape are one template with swapped names."""
    return " ".join(word for word in text.split() if not re.search(r"\d|^[A-Z]", word)).lower()


@pytest.mark.parametrize(("name", "each"), [("tickets_train.jsonl", 160), ("tickets_test.jsonl", 40)])
def test_labels_are_balanced(name: str, each: int) -> None:
    assert Counter(row["label"] for row in rows(name)) == dict.fromkeys(("urgent", "appointment", "billing"), each)


@pytest.mark.parametrize("name", NAMES[:2])
def test_tickets_are_well_formed(name: str) -> None:
    for row in rows(name):
        assert set(row) == {"text", "label"}
        assert 8 <= len(row["text"].split()) <= 40
        assert not re.search(r"[\[\]{}|]|  ", row["text"]), "a slot or a choice was left unfilled"


def test_no_text_occurs_twice_in_or_across_the_splits() -> None:
    texts = [row["text"] for name in NAMES[:2] for row in rows(name)]
    assert len(set(texts)) == len(texts) == 600


def test_texts_differ_by_more_than_names() -> None:
    shapes = Counter(shape(row["text"]) for name in NAMES[:2] for row in rows(name))
    assert len(shapes) > 500
    assert max(shapes.values()) <= 4


def test_test_situations_are_not_in_training() -> None:
    messages = {label: [one["message"] for one in group] for label, group in read_situations().items()}
    assert all(len(group) == 40 for group in messages.values())
    assert {one for group in messages.values() for one in group[-HELD_OUT_SITUATIONS:]}.isdisjoint(
        one for group in messages.values() for one in group[:-HELD_OUT_SITUATIONS]
    )
    train = {shape(row["text"]) for row in rows("tickets_train.jsonl")}
    assert train.isdisjoint(shape(row["text"]) for row in rows("tickets_test.jsonl"))


@pytest.mark.parametrize(("name", "count"), [("replies_train.jsonl", 240), ("replies_test.jsonl", 60)])
def test_replies_are_about_the_tickets_of_their_split(name: str, count: int) -> None:
    tickets = {row["text"]: row["label"] for row in rows(name.replace("replies", "tickets"))}
    pairs = rows(name)
    assert len({(pair["instruction"], pair["input"]) for pair in pairs}) == count
    assert {pair["instruction"] for pair in pairs} == {INSTRUCTION}
    assert [pair["output"] for pair in pairs] == [DESK_OF_LABEL[tickets[pair["input"]]] for pair in pairs]


def test_the_generator_writes_what_is_shipped(tmp_path: Path) -> None:
    main(tmp_path)
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_the_data_stays_small() -> None:
    assert sum(len((DATA / name).read_bytes()) for name in NAMES) < 400_000

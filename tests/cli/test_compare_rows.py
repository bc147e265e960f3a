"""A row is trained with or held out, not both, and equal rows count once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.compare.chat_rows import QUICK, ChatRows
from milkglass.compare.rows import ComparisonRows, stratified_mask
from milkglass.errors import CodecError
from milkglass.models.checkpoint import Checkpoint
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import Example, summarise
from milkglass.rows.repeats import Repeats, answer_digest, distinct_indices, question_digest, unrelated_indices
from tests import tiny
from tests.cli.kit import call, refused
from tests.cli.test_coarse import written


def labelled(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"text": f"The scan of room {n} is ready", "label": "ab"[n % 3 % 2]} for n in range(start, start + count)]


def chats(count: int, answer: str = "it is ready") -> list[dict[str, Any]]:
    return [{"instruction": f"what of room {number}", "output": f"{answer} {number % 7}"} for number in range(count)]


def read(path: Path, validation: Path | None = None) -> ComparisonRows:
    return ComparisonRows.read(DataFile(path), None if validation is None else DataFile(validation), 0)


def read_chats(base: Checkpoint, path: Path, validation: Path | None = None) -> ChatRows:
    asked = None if validation is None else DataFile(validation)
    return ChatRows.of(base, DataFile(path), asked, 0, QUICK, 96, summarise(DataFile(path)))


def test_rows_that_occur_three_times_count_once(tmp_path: Path) -> None:
    """Else a model that remembers its rows would have all answers right, whatever the labels are."""
    spaced = [{**row, "text": f"  {row['text'].upper()} "} for row in labelled(120)]
    found = read(written(tmp_path / "rows.jsonl", [*labelled(120), *spaced, *labelled(120)]))
    assert len(found.train.texts) + len(found.held_out.texts) == 120
    assert {*found.train.texts}.isdisjoint(found.held_out.texts)
    assert found.repeat_notes == ("240 of 360 rows equal earlier ones: equal rows count once",)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_each_class_is_asked_about_in_its_share(tmp_path: Path, classes: int) -> None:
    """Else naming the commonest class has another share of right answers than the rows have of that class."""
    rows = [{"text": f"The scan of room {n} is ready", "label": f"desk {min(n % 17, classes - 1)}"} for n in range(510)]
    found = read(written(tmp_path / "rows.jsonl", rows))
    every, asked = Counter(row["label"] for row in rows), Counter(found.held_out.labels)
    assert len(found.held_out.texts) == 102 and len(asked) == classes
    for number, name in enumerate(found.class_names):
        assert abs(asked[number] - every[name] / 5) < 1


@pytest.mark.parametrize(
    ("large", "small_count", "small", "held_out"),
    [(1000, 250, 2, 300), (300, 100, 3, 120), (100, 34, 3, 40), (80, 1, 1, 40)],
)
def test_many_rare_classes_do_not_change_the_share_of_a_large_one(
    large: int, small_count: int, small: int, held_out: int
) -> None:
    labels = ["large"] * large + [f"small {n}" for n in range(small_count) for _ in range(small)]
    labels = [labels[index] for index in np.random.default_rng(1).permutation(len(labels))]
    mask = stratified_mask(labels, held_out)
    counts = Counter(label for label, is_held_out in zip(labels, mask, strict=True) if is_held_out)
    assert mask.sum() == held_out and abs(counts["large"] - held_out * large / len(labels)) < 1
    assert all(abs(counts[label] - held_out * labels.count(label) / len(labels)) < 1 for label in set(labels))


def test_labels_that_all_differ_or_are_all_the_same_are_drawn_evenly() -> None:
    for labels in ([f"id {n}" for n in range(100)], ["x"] * 100, [None] * 100):
        assert stratified_mask(labels, 20).sum() == 20


def test_scores_are_drawn_without_regard_to_their_values(tmp_path: Path) -> None:
    """A score that many rows have is no class: rows whose score occurs once are asked about, too."""
    rows = [{"text": f"Room {n} is ready", "label": "0.5" if n % 2 else f"{n}.25"} for n in range(400)]
    found = ComparisonRows.read(DataFile(written(tmp_path / "rows.jsonl", rows)), None, 0, task="regression")
    repeated = sum(score == 0.5 for score in found.held_out.labels)
    assert len(found.held_out.labels) == 80 and 20 < repeated < 60


def test_what_is_asked_about_is_not_trained_with(tmp_path: Path) -> None:
    data = written(tmp_path / "rows.jsonl", labelled(200))
    overlapping = written(tmp_path / "asked.jsonl", labelled(60, start=170))
    found = read(data, overlapping)
    assert len(found.train.texts) == 170 and len(found.held_out.texts) == 60
    assert found.repeat_notes == ("30 rows are not trained with, since a held-out row asks the same",)
    with pytest.raises(CodecError, match="has 0 rows to train with, and 200 that ask the same as a held-out row"):
        read(data, data)


def test_a_text_with_two_labels_is_on_one_side_and_reported(tmp_path: Path) -> None:
    other_label = {"a": "b", "b": "a"}
    contradicting = [{**row, "label": other_label[row["label"]]} for row in labelled(150)]
    found = read(written(tmp_path / "rows.jsonl", [*labelled(150), *contradicting]))
    assert {*found.train.texts}.isdisjoint(found.held_out.texts)
    assert found.repeat_notes[-1] == "150 texts have several labels (such as rows 1 and 151, 2 and 152, 3 and 153)"
    one = written(tmp_path / "one.jsonl", [*labelled(150), contradicting[0]])
    assert read(one).repeat_notes[-1] == "1 text has several labels (such as rows 1 and 151)"
    told = call("data", one, "--out", tmp_path / "clean.jsonl").stderr
    assert "warning: 1 text has several labels (such as rows 1 and 151)" in told


def test_too_few_different_rows_are_refused(tmp_path: Path) -> None:
    model = tiny.save("bert", tmp_path / "model")
    repeated = written(tmp_path / "rows.jsonl", labelled(60) * 3)
    refused(call("compare", model, repeated), 5, "60 different rows (120 equal earlier ones), 80 are needed")
    few = written(tmp_path / "few.jsonl", labelled(30))
    more = written(tmp_path / "more.jsonl", labelled(50, start=100))
    refused(call("compare", model, few, "--validation", more), 5, "few.jsonl has 30 rows to train with")


def test_conversations_that_ask_the_same_are_on_one_side(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("llama-tied", tmp_path / "model"))
    rows = [*chats(120), *chats(120), *chats(30, "the nurse knows")]
    found = read_chats(base, written(tmp_path / "rows.jsonl", rows))
    questions, asked = ([question_digest(row) for row in part] for part in (found.chats, found.asked))
    assert {*questions}.isdisjoint(asked)
    assert found.repeat_notes[0] == "120 of 270 rows equal earlier ones: equal rows count once"
    assert found.repeat_notes[-1] == "30 questions have several answers (such as rows 1 and 241, 2 and 242, 3 and 243)"
    overlapping = written(tmp_path / "asked.jsonl", chats(60))
    other = read_chats(base, written(tmp_path / "more.jsonl", chats(140)), overlapping)
    assert (len(other.asked), len(other.chats)) == (40, 100)
    assert {*map(question_digest, other.chats)}.isdisjoint(map(question_digest, other.asked))


def test_what_makes_rows_equal() -> None:
    def row(text: str, pair: str | None = None, label: str = "a") -> Example:
        return Example(1, "labelled", text, pair, label)

    assert question_digest(row("A  text\n")) == question_digest(row("a text")) != question_digest(row("a text!"))
    assert question_digest(row("a", "b c")) != question_digest(row("a b", "c")) != question_digest(row("a b c"))
    assert answer_digest(row("x", label="A")) == answer_digest(row("y", label="A")) != answer_digest(row("x"))
    rows = [row("x"), row("X"), row("x", label="b"), row("y")]
    assert distinct_indices(rows) == [0, 2, 3] and unrelated_indices(rows, rows[3:]) == [0, 1, 2]
    assert Repeats.of(rows) == Repeats(4, 1, 1, ((1, 1),), "text")
    system = {"role": "system", "content": "be brief"}
    question, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}
    plain, instructed = (
        Example(1, "chat", messages=messages) for messages in ((question, answer), (system, question, answer))
    )
    assert question_digest(plain) != question_digest(instructed) and answer_digest(plain) == answer_digest(instructed)
    indented = replace(plain, messages=(question, {**answer, "content": "good\n  day"}))
    assert answer_digest(indented) != answer_digest(plain), "code is another program with other spaces"


def test_calls_of_tools_are_equal_but_for_their_ids() -> None:
    def asked(identifier: str, city: str = "Rome") -> Example:
        call = {
            "id": identifier,
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"of": "{city}"}}'},
        }
        return Example(1, "chat", messages=(
            {"role": "user", "content": "is it warm"}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "30", "tool_call_id": identifier}, {"role": "assistant", "content": "yes"},
        ))  # fmt: skip

    rows = [asked("call_1"), asked("call_2"), asked("call_1", "Oslo")]
    assert distinct_indices(rows) == [0, 2]
    weighted = replace(rows[0], messages=(*rows[0].messages[:3], {**rows[0].messages[3], "weight": 1}))
    assert distinct_indices([rows[0], weighted]) == [0]


def test_a_conversation_and_its_continuation_are_on_one_side() -> None:
    hello = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"})
    more = ({"role": "user", "content": "my arm hurts"}, {"role": "assistant", "content": "since when?"})
    other = ({"role": "user", "content": "I need a bill"}, {"role": "assistant", "content": "which one?"})
    short, long, sibling = (Example(1, "chat", messages=messages) for messages in (hello, hello + more, hello + other))
    assert unrelated_indices([short, sibling], [long]) == [1], "the answer to hello is in the long one"
    assert unrelated_indices([long, sibling], [short]) == [], "both answer hello"
    assert unrelated_indices([sibling], [long]) == [0]


def test_a_row_that_differs_in_punctuation_from_a_held_out_one_is_not_trained_with(tmp_path: Path) -> None:
    """With a copy of each text, labels at random were learnt by heart, and 90 % of them answered."""
    rng = np.random.default_rng(5)
    texts = [" ".join(rng.choice([*"abcdefghij"], 12)) for _ in range(100)]
    labels = rng.choice(["yes", "no"], 100).tolist()
    copies = [texts, [f"{text.upper()}" for text in texts], [f"{text} ." for text in texts]]
    entries = [{"text": text, "label": label} for part in copies for text, label in zip(part, labels, strict=True)]
    found = read(written(tmp_path / "rows.jsonl", entries))
    bare = [{text.lower().removesuffix(" .") for text in part.texts} for part in (found.train, found.held_out)]
    assert bare[0].isdisjoint(bare[1]) and bare[0] and bare[1]
    assert any("since a held-out row asks the same" in note for note in found.repeat_notes)

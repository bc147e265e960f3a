"""The audit of an attested endpoint: sizes and times of encrypted answers, and what is read if hardware fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.audit.records import audit_endpoint, read_answers
from milkglass.errors import CodecError, EmptyText
from milkglass.threat.budget import Budget
from tests.cli.kit import call, document, refused


def rows(telling: bool, count: int = 120) -> list[dict[str, Any]]:
    """Answers on three topics. telling: tokens of one topic are longer than those of another, and are streamed."""
    rng = np.random.default_rng(3)
    found = []
    for number in range(count):
        topic = number % 3
        lengths = rng.integers(1 + 2 * topic, 5 + 2 * topic, int(rng.integers(15, 25))).tolist()
        sizes = [300, *(80 + one for one in lengths), 40] if telling else [16_384]
        times = [0.3 + 0.01 * place for place in range(len(sizes))]
        found.append({"topic": ("law", "cooking", "travel")[topic], "sizes": sizes, "times": times, "lengths": lengths})
    return found


def file(folder: Path, found: list[dict[str, Any]]) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return path


def test_streamed_answers_tell_topics_and_lengths_of_tokens_and_the_control_does_not(tmp_path: Path) -> None:
    found = audit_endpoint(read_answers(file(tmp_path, rows(True))), 1, Budget(60))
    assert found.reading["topics"].value > 0.9 and found.reading["token lengths"].value > 0.9
    assert found.control["topics"].value < 0.6 and abs(found.guess_share - 1 / 3) < 0.01
    told = dict(found.table_rows())
    assert "no text; the topic of" in told["hardware holds"] and "all of the text" in told["hardware fails"]


def test_padded_answers_tell_nothing(tmp_path: Path) -> None:
    found = audit_endpoint(read_answers(file(tmp_path, rows(False))), 1, Budget(60))
    assert found.reading["topics"].low <= 0.45 and found.reading["token lengths"].value < 0.5


def test_the_command_names_both_cases(tmp_path: Path) -> None:
    path = file(tmp_path, rows(True))
    shown = call("audit", "--records", path)
    assert shown.exit_code == 0 and "120 answers on 3 topics" in shown.stdout
    assert "hardware holds" in shown.stdout and "hardware fails" in shown.stdout
    found = document(call("audit", "--records", path, "--json"))
    assert found["hardware holds"]["text"] == 0 and found["hardware fails"]["text"] == 1
    assert found["hardware holds"]["sizes"]["topics"]["value"] > 0.9
    bare = file(tmp_path, [{name: one[name] for name in ("topic", "sizes", "times")} for one in rows(True)])
    assert "token lengths" not in document(call("audit", "--records", bare, "--json"))["hardware holds"]["sizes"]
    refused(call("audit", "--records", path, "--text", path), 2, "--text")
    refused(call("audit", "--records", tmp_path / "none"), 2, "none")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": "1"}, "no list sizes"), ({"sizes": [1, -1]}, "no numbers from 0"), ({"sizes": [True]}, "no numbers"),
        ({"times": [0.1]}, "sizes and 1 times"), ({"topic": None}, "topic"), ({"lengths": [1e12]}, "no numbers"),
        ({"sizes": [float("nan")]}, ""),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    found = rows(True)
    found[6] = {**found[6], **change}
    with pytest.raises(CodecError, match=f"line 7 of answers.jsonl.*{words}"):
        read_answers(file(tmp_path, found))


def test_too_few_answers_or_topics_and_lengths_of_some_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EmptyText, match="19 answers"):
        read_answers(file(tmp_path, rows(True, 19)))
    with pytest.raises(EmptyText, match="on 1 topics"):
        read_answers(file(tmp_path, rows(True)[::3]))
    found = rows(True)
    del found[4]["lengths"]
    with pytest.raises(CodecError, match="119 of 120"):
        read_answers(file(tmp_path, found))


def test_answers_to_one_question_are_in_one_half(tmp_path: Path) -> None:
    """Sizes tell the question and not the topic: recordings of the same questions read it, those of others do not."""
    rng = np.random.default_rng(0)
    size_of = rng.permutation(40) * 100 + 400
    found = [
        {"topic": ("law", "travel")[question % 2], "sizes": [int(size_of[question])] * 3, "times": [0.1, 0.2, 0.3],
         "question": f"question {question}"}
        for question in [*range(40)] * 8
    ]  # fmt: skip
    bare = [{name: value for name, value in one.items() if name != "question"} for one in found]
    assert audit_endpoint(read_answers(file(tmp_path, bare)), 1, Budget(60)).reading["topics"].value > 0.9
    known = audit_endpoint(read_answers(file(tmp_path, found)), 1, Budget(60))
    assert known.reading["topics"].value < 0.75 and [*known.control] == ["topics"]
    del found[5]["question"]
    with pytest.raises(CodecError, match="319 of 320"):
        read_answers(file(tmp_path, found))
    alone = [{**one, "question": "the same"} if one["topic"] == "law" else one for one in rows(True)]
    with pytest.raises(CodecError, match="questions"):
        read_answers(file(tmp_path, alone))
    with pytest.raises(EmptyText, match="one question"):
        read_answers(file(tmp_path, [{**one, "question": one["topic"]} for one in rows(True)]))


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"topic": "ab"[index % 2], "sizes": [], "times": []} for index in range(40)], "line 1 of .* has no record"),
        ([{"topic": f"t{index}", "sizes": [5], "times": [0.1]} for index in range(40)], "40 of 40 topics"),
    ],
)
def test_answers_of_which_nothing_can_be_read_are_refused(
    rows: list[dict[str, object]], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with pytest.raises((CodecError, EmptyText), match=named):
        read_answers(path)

"""`finetune --task regression` and `classify` of what it made: floats cross, standardised, and come back as scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from milkglass.client.key.file import write_key
from milkglass.client.key.key import KeyInfo
from milkglass.rows.labels import Scale
from tests import tiny
from tests.cli.kit import PASSPHRASE, SECRET, Owner, call, document, has_model_of, refused
from tests.cli.test_commands import job_server
from tests.client.stub import Stub, rows_of

SCORES = [0.0, 2.5, 5.0, 4.75]


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    path = tmp_path / "scored.jsonl"
    rows = [{"text": f"{SECRET} {one}", "label": score} for one, score in zip(tiny.TEXTS, SCORES, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_scores_cross_standardised_and_the_scale_stays(stub: Stub, encoder: Owner, scored: Path) -> None:
    encoder.reset()
    asked = job_server(stub)
    document(call("finetune", "mine", scored, "--key", encoder.path, "--task", "regression", "--json"))
    ours = {"learning_rate": 1e-4, "n_epochs": 10.0, "warmup_ratio": 0.06}  # too few rows to hold any out
    assert asked["hyperparameters"] == {"max_length": 130, "task": "regression", **ours}
    scores = rows_of(stub.content[asked["training_file"]])["scores"]
    scale = Scale.of(SCORES)
    assert scores == pytest.approx([scale.standardise(one) for one in SCORES])
    assert encoder.about["scale"] == scale.document()
    assert encoder.about["scales"] == {"ftjob-77aa": scale.document()}
    assert encoder.about.get("labels") is None
    wire = b"".join(body + json.dumps(headers).encode() + call.encode() for call, headers, body in stub.calls)
    assert SECRET.encode() not in wire and str(scale.mean).encode() not in wire


def knows(encoder: Owner, **more: Any) -> None:
    """The key file, with this beside what it has."""
    key = replace(encoder.key, info=KeyInfo({**encoder.key.info.document, **more}))
    write_key(encoder.path, key, PASSPHRASE, scrypt_n=2, replace=True)


def test_a_second_fine_tune_keeps_the_scale(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    first = Scale.of(SCORES).document()
    knows(encoder, scale=first)
    asked = job_server(stub)
    run = ("--key", encoder.path, "--task", "regression", "--json")
    alike, other = tmp_path / "alike.jsonl", tmp_path / "other.jsonl"
    alike.write_text("".join(json.dumps({"text": "a nurse", "label": one}) + "\n" for one in (1, 4)))
    other.write_text("".join(json.dumps({"text": "a nurse", "label": one}) + "\n" for one in (1, 400)))
    document(call("finetune", "mine", alike, *run))
    assert encoder.about["scale"] == first
    scores = rows_of(stub.content[asked["training_file"]])["scores"]
    assert scores == pytest.approx([Scale(*first).standardise(one) for one in (1, 4)])
    document(call("finetune", "mine", other, *run))
    assert encoder.about["scale"] == Scale.of([1, 400]).document()
    encoder.reset()


def test_classify_says_the_score(stub: Stub, encoder: Owner) -> None:
    scale = Scale.of(SCORES)
    knows(encoder, scale=scale.document(), scales={"ftjob-77aa": scale.document()})
    data = [{"index": 0, "score": scale.standardise(3.25), "num_classes": 1}]
    stub.replies["POST /classify"] = lambda h: h.answer(200, {"data": data})
    has_model_of(stub, encoder)
    run = ("the nurse", "--key", encoder.path)
    assert call("classify", "ft-77aa", *run).stdout == "3.25\n"
    assert document(call("classify", "ft-77aa", *run, "--json"))["results"] == [{"score": pytest.approx(3.25)}]
    unknown = call("classify", "ft-other", *run)
    assert float(unknown.stdout) == pytest.approx(scale.standardise(3.25), abs=1e-3)
    assert "has no scale for ft-other" in unknown.stderr
    for choice in ("newest", "ftjob-77aa"):
        assert call("classify", "ft-other", *run, "--labels-of", choice).stdout == "3.25\n"
    refused(call("classify", "ft-other", *run, "--labels-of", "x"), 2, "knows no labels of the job x")
    encoder.reset()


@pytest.mark.parametrize("score", [True, "high", None, float("nan"), [1.0]])
def test_a_servers_score_is_checked(stub: Stub, encoder: Owner, score: Any) -> None:
    raw = json.dumps({"data": [{"index": 0, "score": score}]}).encode()
    stub.replies["POST /classify"] = lambda h: h.answer(200, raw)
    has_model_of(stub, encoder)
    refused(call("classify", "mine", "the nurse", "--key", encoder.path), 6, "score is not a finite number")


def test_scores_are_refused_where_they_are_none(stub: Stub, encoder: Owner, scored: Path, tmp_path: Path) -> None:
    run = ("--key", encoder.path)
    result = call("finetune", "mine", scored, *run)
    refused(result, 5, f"the column label of {scored.name}")
    assert "--task regression" in result.stderr
    names = tmp_path / "names.jsonl"
    names.write_text('{"text": "a", "label": "urgent"}\n')
    refused(
        call("finetune", "mine", names, *run, "--task", "regression"),
        5,
        "line 1 of names.jsonl has a label that is not a number",
    )
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"instruction": "a", "output": "b"}\n')
    refused(call("finetune", "mine", chats, *run, "--task", "regression"), 5, "line 1 of chats.jsonl has no label")
    assert not stub.calls

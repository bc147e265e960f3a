"""What a server has: models, jobs and uploads, listed and deleted."""

from __future__ import annotations

from typing import Any

import pytest

from milkglass.client.remote.connection import RetryPolicy
from tests.cli.kit import Owner, call, document, refused
from tests.client.stub import Stub


def models(stub: Stub, *found: dict[str, Any]) -> None:
    stub.replies["GET /v1/models"] = lambda h: h.answer(200, {"data": list(found)})


def test_a_servers_models(stub: Stub, encoder: Owner) -> None:
    common = {"kind": "encoder", "vocab_size": 300, "bytes": 2_500_000, "created": 1_763_000_000}
    own = {"id": "mine", **common, "parent": None, "job": None, "key_id": encoder.key.identifier}
    tuned = {"id": "ft-1\x1b[2J", **common, "parent": "mine", "job": "ftjob-1", "key_id": "0" * 32}
    foreign = {"id": "foreign", "kind": "decoder", "vocab_size": 5}
    models(stub, own, tuned, foreign)
    lines = call("models").stdout.splitlines()
    assert lines[0].split("  ")[0] == "model" and "fine-tuned from" in lines[0]
    assert encoder.key.identifier in lines[1] and "2.5 MB" in lines[1] and "2025-11-1" in lines[1]
    assert "\x1b" not in lines[2] and " mine " in lines[2] and "not said" in lines[3]
    fitting = call("models", "--key", encoder.path).stdout
    assert "this key" in fitting.splitlines()[1] and "another key" in fitting.splitlines()[2]
    found = document(call("models", "--key", encoder.path, "--json"))["models"]
    assert [one["key_fits"] for one in found] == [True, False, None]
    assert found[1]["parent"] == "mine" and found[0]["bytes"] == 2_500_000
    assert "demo:minilm" in call("models", "--supported").stdout  # also where a server is named
    assert "demo:minilm" not in call("models").stdout
    models(stub)
    assert "the server has no models" in call("models").stdout


def test_key_and_delete_need_a_server() -> None:
    refused(call("models", "--delete", "mine"), 2, "are about a server's models")


def test_a_servers_jobs(stub: Stub) -> None:
    running = {"id": "ftjob-2", "model": "mine", "status": "running", "created_at": 1_763_000_000,
               "progress": {"step": 7, "total_steps": 30, "loss": 1.25}}  # fmt: skip
    failed = {"id": "ftjob-1", "model": "mine", "status": "failed", "error": {"message": "out of memory"}}
    stub.replies["GET /v1/fine_tuning/jobs"] = lambda h: h.answer(200, {"data": [running, failed]})
    lines = call("jobs").stdout.splitlines()
    assert "7 of 30" in lines[1] and "1.2500" in lines[1] and "failed" in lines[2]
    assert document(call("jobs", "--json"))["jobs"][0]["progress"]["loss"] == 1.25
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-2"] = lambda h: h.answer(200, running)
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-1"] = lambda h: h.answer(200, failed)
    assert "steps: 7 of 30\nloss: 1.2500" in call("job", "ftjob-2").stdout
    assert "error: out of memory" in call("job", "ftjob-1").stdout
    refused(call("job", "ftjob-1", "--follow", "--delete"), 2, "more than one thing to do")


def test_uploads(stub: Stub) -> None:
    files = [{"id": "file-1", "purpose": "fine-tune", "bytes": 1_000_000, "created_at": 1_763_000_000}]
    parts = [{"id": "upload-2", "purpose": "model", "bytes": 4, "received": 1, "created_at": 1_763_000_000}]
    stub.replies["GET /v1/files"] = lambda h: h.answer(200, {"data": files})
    stub.replies["GET /v1/uploads"] = lambda h: h.answer(200, {"data": parts})
    lines = call("uploads").stdout.splitlines()
    assert "file-1" in lines[1] and "whole" in lines[1] and "upload-2" in lines[2] and "25 %" in lines[2]
    assert document(call("uploads", "--json"))["unfinished"] == parts


@pytest.mark.parametrize(
    ("words", "route"),
    [
        (("models", "--delete", "mine"), "DELETE /v1/models/mine"),
        (("job", "ftjob-1", "--delete"), "DELETE /v1/fine_tuning/jobs/ftjob-1"),
        (("uploads", "--delete", "file-1"), "DELETE /v1/files/file-1"),
        (("uploads", "--delete", "upload-1"), "DELETE /v1/uploads/upload-1"),
    ],
)
def test_deleting_asks_first(stub: Stub, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], route: str) -> None:
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-1"] = lambda h: h.answer(200, {"id": "ftjob-1"})
    stub.replies[route] = lambda h: h.answer(200, {"deleted": True})
    refused(call(*words), 2, "there is no terminal to ask at")
    monkeypatch.setattr("milkglass.cli.ui.terminal._is_stdin_terminal", lambda: True)
    assert call(*words, stdin="n\n").exit_code == 130 and not stub.count(route)
    assert call(*words, stdin="y\n").exit_code == 0 and stub.count(route) == 1
    assert document(call(*words, "--yes", "--json")) == {"id": words[-1 if words[0] != "job" else 1], "deleted": True}
    assert stub.count(route) == 2


@pytest.mark.parametrize(
    ("words", "get", "delete"),
    [
        (("models", "--delete", "bad"), "GET /v1/models/bad", "DELETE /v1/models/bad"),
        (("job", "bad", "--delete"), "GET /v1/fine_tuning/jobs/bad", "DELETE /v1/fine_tuning/jobs/bad"),
    ],
)
def test_what_is_not_there_and_what_cannot_be_read(stub: Stub, words: tuple[str, ...], get: str, delete: str) -> None:
    stub.replies[delete] = lambda h: h.answer(200, {"deleted": True})
    stub.replies[get] = lambda h: h.answer(404, {"error": {"message": "there is no such thing", "hint": "look"}})
    refused(call(*words, "--yes"), 6, "there is no such thing")
    assert not stub.count(delete)
    stub.replies[get] = lambda h: h.answer(
        500, {"error": {"message": "the record cannot be read", "hint": "delete it"}}
    )
    assert call(*words, "--yes").exit_code == 0 and stub.count(delete) == 1


def test_a_server_that_is_down_is_told_soon(encoder: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(self: RetryPolicy, attempt: int, answer: object = None) -> None:
        waits.append(min(self.last_limit, self.first_limit * 2**attempt))  # at most

    monkeypatch.setattr(RetryPolicy, "wait", wait)
    classify = ("classify", "m", "x", "--key", encoder.path)
    for words in (("models",), ("jobs",), ("job", "ftjob-1", "--follow"), classify):
        waits.clear()
        result = call(*words, "--server", "http://127.0.0.1:9")
        refused(result, 6, "http://127.0.0.1:9 does not answer")
        assert waits and sum(waits) < 1, "a server that never answered is not waited for"
        assert len(result.stderr.splitlines()) == 2


def test_a_missing_token_is_asked_for_in_the_commands_own_words(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILKGLASS_TOKEN")
    result = call("models")
    refused(result, 6, "401")
    assert "--token-file FILE or MILKGLASS_TOKEN" in result.stderr and "Authorization" not in result.stderr

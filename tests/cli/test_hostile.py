"""Commands against a server that answers what it likes: every answer ends in words, and none steers a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from typer.testing import Result

import milkglass.cli.ui.terminal as terminal
from tests.cli.kit import Owner, call, document, has_model_of, refused
from tests.client.odd_json import objects, written
from tests.client.stub import Handler, Stub

STEERING = "\x1b]0;PWNED\x07\x1b[31m\x9b31m\x7f\x08\u202eevil\u2066\ud800"
HUGE = "1" + "0" * 400
JOB, EVENTS = "GET /v1/fine_tuning/jobs/j1", "GET /v1/fine_tuning/jobs/j1/events"


def harmless(result: Result) -> None:
    """Printable, and either an answer or one of our own errors."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 4, 5, 6), result.stderr
    for text in (result.stdout, result.stderr):
        assert all(line.isprintable() for line in text.split("\n")), repr(text)


def answers(stub: Stub, route: str, raw: bytes | str) -> None:
    stub.replies[route] = lambda h: h.answer(200, raw.encode() if isinstance(raw, str) else raw)


def sends(stub: Stub, *data: str, **state: Any) -> None:
    """A job that told these events and is over."""
    lines = [f"id: {n}\ndata: {one}\n\n" for n, one in enumerate(data)] + ["event: done\ndata: {}\n\n"]
    stub.replies[EVENTS] = lambda h: h.events(lines)
    answers(stub, JOB, json.dumps({"id": "j1", "status": "succeeded", "fine_tuned_model": "ft", **state}))


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar of a terminal, drawn into the test's own stderr."""
    monkeypatch.setattr("milkglass.cli.ui.job_progress.is_stderr_terminal", lambda: True)


# --- strings ----------------------------------------------------------------------------------------------------------
def everywhere(stub: Stub) -> None:
    """Every text of every record steers."""
    record = dict.fromkeys(("id", "kind", "parent", "job", "key_id", "purpose", "model", "status", STEERING), STEERING)
    listed = json.dumps({"data": [record]})
    for route in ("GET /v1/models", "GET /v1/files", "GET /v1/uploads", "GET /v1/fine_tuning/jobs"):
        answers(stub, route, listed)
    answers(stub, "GET /v1/models/m", json.dumps({**record, "key_id": None, "vocab_size": 300, "kind": "encoder"}))
    sends(stub, json.dumps({"message": STEERING}), **{**record, "error": {"message": STEERING}})


@pytest.mark.usefixtures("bar")
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_no_text_of_a_server_steers_a_terminal(stub: Stub, encoder: Owner, as_json: tuple[str, ...]) -> None:
    everywhere(stub)
    key = ("--key", encoder.path)
    for words in (("models",), ("models", *key), ("uploads",), ("jobs",), ("job", "j1"), ("classify", "m", "x", *key)):
        harmless(call(*words, *as_json))
    result = call("job", "j1", "--follow", *as_json)
    assert "\x1b]" not in result.stderr and "\x9b" not in result.stderr and "\u202e" not in result.stderr
    assert result.exit_code == 6 and "evil" in result.stderr
    stub.replies["GET /v1/models"] = lambda h: h.answer(400, {"error": {"message": STEERING, "hint": STEERING}})
    result = call("models", *as_json)
    harmless(result)
    assert "evil" in result.stderr


def test_the_state_of_a_failed_job_is_text_of_the_servers(stub: Stub) -> None:
    sends(stub, status=STEERING, error={"message": STEERING})
    result = call("job", "j1", "--follow")
    harmless(result)
    refused(result, 6, "the job j1 is \ufffd]0;PWNED\ufffd")


def test_json_is_printable_and_means_the_same() -> None:
    text = terminal.json_text({"a": STEERING, "b": "naïve 👩"})
    assert text.isprintable() and json.loads(text) == {"a": STEERING, "b": "naïve 👩"} and "naïve 👩" in text


def test_json_of_a_models_own_text_is_printable(stub: Stub, decoder: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_of(stub, decoder)
    lines = [f"data: {json.dumps({'choices': [{'token_ids': [5]}]})}\n\n", "data: [DONE]\n\n"]
    stub.replies["POST /v1/completions"] = lambda h: h.events(lines)
    monkeypatch.setattr("milkglass.client.codec.streaming.StreamDecoder.push", lambda self, ids: "\x9b31m\u202e")
    result = call("generate", "m", "hello", "--json", "--key", decoder.path)
    harmless(result)
    assert document(result)["text"].startswith("\x9b31m\u202e")


# --- numbers and shapes -----------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("bar")
@pytest.mark.parametrize(
    "data",
    [
        "[1]",
        '"loss"',
        '{"step": "abc", "total_steps": 2}',
        '{"step": 1, "total_steps": "[red]x"}',
        f'{{"step": 1, "total_steps": 2, "loss": {HUGE}}}',
        '{"step": -1, "total_steps": 2}',
        '{"step": 1.5}',
        '{"step": 1, "eta_seconds": "soon"}',
        '{"step": true}',
    ],
)
def test_events_that_cannot_be_are_one_error(stub: Stub, data: str) -> None:
    sends(stub, f'{{"message": "x", "data": {data}}}')
    result = call("job", "j1", "--follow")
    assert result.exit_code == 6 and isinstance(result.exception, SystemExit)
    assert "error: " in result.stderr and "Traceback" not in result.stderr


@pytest.mark.usefixtures("bar")
def test_a_loss_that_is_no_number_does_not_end_the_watching(stub: Stub) -> None:
    """A training that diverges says NaN: the job goes on, and so does whoever watches it."""
    sends(stub, '{"message": "x", "data": {"step": 1, "total_steps": 2, "loss": NaN, "eta_seconds": Infinity}}')
    found = document(call("job", "j1", "--follow", "--json"))
    assert found["steps"] == 1 and found["metrics"] == {"loss": None}
    assert call("job", "j1", "--follow").exit_code == 0


@pytest.mark.parametrize(
    ("route", "words", "raw"),
    [
        ("GET /v1/models", ("models",), f'{{"data": [{{"id": "a", "bytes": {HUGE}}}]}}'),
        ("GET /v1/models", ("models",), '{"data": [{"id": 5}]}'),
        ("GET /v1/models", ("models",), '{"data": [{"id": "a", "parent": ["x"]}]}'),
        ("GET /v1/files", ("uploads",), f'{{"data": [{{"id": "a", "bytes": 5, "received": {HUGE}}}]}}'),
        ("GET /v1/fine_tuning/jobs", ("jobs",), '{"data": [{"id": "a", "progress": [1]}]}'),
        ("GET /v1/fine_tuning/jobs", ("jobs",), '{"data": [{"id": "a", "error": {"message": 5}}]}'),
        (JOB, ("job", "j1"), f'{{"id": "j1", "progress": {{"step": 1, "loss": {HUGE}}}}}'),
        (JOB, ("job", "j1"), '{"id": "j1", "progress": {"loss": "high"}}'),
        (JOB, ("job", "j1"), '{"id": "j1", "status": ["running"]}'),
    ],
)
def test_records_that_cannot_be_are_one_error(stub: Stub, route: str, words: tuple[str, ...], raw: str) -> None:
    answers(stub, "GET /v1/uploads", '{"data": []}')
    answers(stub, route, raw)
    result = call(*words)
    harmless(result)
    assert result.exit_code == 6 and result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "row",
    [
        f'{{"index": 0, "label": "LABEL_0", "probs": [{HUGE}, 0.5]}}',
        '{"index": 0, "label": "LABEL_0", "probs": [NaN, Infinity]}',
        '{"index": 0, "label": "LABEL_2", "probs": [0.5, 0.5]}',
        '{"index": 0, "label": "LABEL_0", "probs": []}',
        '{"index": 0, "label": "LABEL_0", "probs": [0.1, 0.9]}',
        '{"index": 0, "label": "LABEL_0", "probs": [7.5, -6.5]}',
        f'{{"index": 0, "score": {HUGE}}}',
    ],
)
def test_classifications_that_cannot_be_are_one_error(stub: Stub, encoder: Owner, row: str) -> None:
    has_model_of(stub, encoder)
    answers(stub, "POST /classify", f'{{"data": [{row}]}}')
    result = call("classify", "m", "the nurse", "--key", encoder.path)
    harmless(result)
    assert result.exit_code == 6


ROUTES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("models",): ("GET /v1/models",),
    ("uploads",): ("GET /v1/files", "GET /v1/uploads"),
    ("jobs",): ("GET /v1/fine_tuning/jobs",),
    ("job", "j1"): (JOB,),
    ("job", "j1", "--cancel"): (JOB, "POST /v1/fine_tuning/jobs/j1/cancel"),
    ("models", "--delete", "m", "--yes"): ("GET /v1/models/m", "DELETE /v1/models/m"),
}


def any_answer(stub: Stub, words: tuple[str, ...], value: dict[str, Any], row: dict[str, Any]) -> None:
    for route in ROUTES[words]:
        answers(stub, route, written({**value, "data": [row]}))
    for as_json in ((), ("--json",)):
        harmless(call(*words, *as_json))


def any_event(stub: Stub, value: dict[str, Any], state: dict[str, Any]) -> None:
    sends(stub, written(value).decode(), written({"message": "x", "data": value}).decode())
    harmless(call("job", "j1", "--follow"))
    answers(stub, JOB, written(state | {"status": "succeeded"}))
    harmless(call("job", "j1", "--follow", "--json"))


FIXED = [HealthCheck.function_scoped_fixture]  # the stub is the same for all examples, and each sets its answers anew


@pytest.mark.parametrize("words", ROUTES)
@settings(max_examples=4, deadline=None, suppress_health_check=FIXED)
@given(value=objects, row=objects)
def test_any_json_in_the_place_of_an_answer(stub: Stub, words: Any, value: dict[str, Any], row: dict[str, Any]) -> None:
    any_answer(stub, words, value, row)


@settings(max_examples=4, deadline=None, suppress_health_check=FIXED)
@given(value=objects, state=objects)
def test_any_json_in_the_place_of_an_event(stub: Stub, value: dict[str, Any], state: dict[str, Any]) -> None:
    any_event(stub, value, state)


@pytest.mark.slow
@pytest.mark.parametrize("words", ROUTES)
@settings(max_examples=50, deadline=None, suppress_health_check=FIXED)
@given(value=objects, row=objects)
def test_much_json_in_the_place_of_an_answer(
    stub: Stub, words: Any, value: dict[str, Any], row: dict[str, Any]
) -> None:
    any_answer(stub, words, value, row)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=FIXED)
@given(value=objects, state=objects)
def test_much_json_in_the_place_of_an_event(stub: Stub, value: dict[str, Any], state: dict[str, Any]) -> None:
    any_event(stub, value, state)


# --- no end -----------------------------------------------------------------------------------------------------------
def tokens(count: int, owner: Owner) -> list[str]:
    one = int(owner.codec.encode(["nurse"]).ids[0][-1])
    return [f"data: {json.dumps({'choices': [{'token_ids': [one]}]})}\n\n" for _ in range(count)]


def spent(owner: Owner) -> int:
    return int(document(call("key", "status", owner.path, "--json"))["tokens"])


def cut(handler: Handler, lines: list[str]) -> None:
    handler.events(lines)
    handler.cut()


@pytest.mark.parametrize(
    "end", [["data: [DONE]\n\n"], ['data: {"error": {"message": "full"}}\n\n'], ["data: x\n\n"], []]
)
def test_what_was_answered_is_counted_however_the_answer_ends(stub: Stub, decoder: Owner, end: list[str]) -> None:
    has_model_of(stub, decoder)
    stub.replies["POST /v1/completions"] = lambda h: cut(h, [*tokens(9, decoder), *end])
    before = spent(decoder)
    call("generate", "m", "hello", "--key", decoder.path)
    prompt = len(json.loads(stub.calls[-1][2])["prompt"])
    assert spent(decoder) - before == prompt + 9


def test_a_killed_command_has_counted_nearly_all(stub: Stub, decoder: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    from milkglass.client.key import usage

    added: list[int] = []
    monkeypatch.setattr(usage, "add", lambda key, texts, count: (added.append(count), usage.read(key))[1])
    has_model_of(stub, decoder)
    stub.replies["POST /v1/completions"] = lambda h: h.events([*tokens(150, decoder), "data: [DONE]\n\n"])
    call("generate", "m", "hello", "--key", decoder.path, "--max-tokens", 200)
    assert added[1:] == [64, 64, 22]


def test_more_than_was_asked_for_is_not_shown(stub: Stub, decoder: Owner) -> None:
    has_model_of(stub, decoder)
    stub.replies["POST /v1/completions"] = lambda h: h.events(tokens(5000, decoder))
    found = document(call("generate", "m", "hello", "--key", decoder.path, "--max-tokens", 4, "--json"))
    assert found["tokens"] == 4 and 0 < len(found["text"]) < 100


def test_what_is_fetched_after_training_fits_the_model(
    stub: Stub, encoder: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milkglass.client.obfuscate.preflight.MAX_HEAD_BYTES", 1_000_000)
    has_model_of(stub, encoder)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": "the nurse", "label": name}) + "\n" for name in "ab"))
    answers(stub, "POST /v1/fine_tuning/jobs", '{"id": "j1"}')
    sends(stub)
    files = [{"name": name, "bytes": size} for name, size in (("config.json", 2), ("model.safetensors", 50_000_000))]
    answers(stub, "GET /v1/models/ft/files", json.dumps({"data": files}))
    result = call("finetune", "m", data, "--key", encoder.path, "--fetch", tmp_path / "out")
    assert result.exit_code == 6 and "the server offers 50 MB, and this model has at most" in result.stderr
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".out*"))
    encoder.reset()

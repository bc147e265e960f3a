"""Garbage at every door: a clear error in the one shape, nothing of the request in it, and the server stays up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from milkglass.errors import Conflict, UsageError
from milkglass.server.app import create_app
from milkglass.server.http import errors
from milkglass.server.settings import HomeFolder, ServerSettings
from tests.server.kit import error, register, running, settings

SECRET = "the-private-diagnosis"
JSON = {"Content-Type": "application/json"}


def _many_fields() -> bytes:
    return b", ".join(b'"f%d": 0' % number for number in range(50_000))


@pytest.fixture(scope="module")
def served(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with running(tmp_path_factory.mktemp("door") / "home", max_json=1 << 20, max_inputs=4) as client:
        register(client, "llama", folders["llama-untied"])
        register(client, "bert", folders["classifier"])
        yield client
        assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic YTpi", "Bearer a-token-for-the-testsx"])
def test_only_the_token_opens(served: TestClient, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    bare = TestClient(served.app)
    for method, path in [("GET", "/v1/models"), ("POST", "/classify"), ("GET", "/openapi.json"), ("GET", "/nowhere")]:
        answer = bare.request(method, path, headers=headers)
        assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        assert error(answer)["code"] == "unauthorized"
    assert bare.get("/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": "llama", "prompt": [NaN]}',
        b'{"model": "llama", "prompt": [1], "temperature": Infinity}',
        b'{"model": "llama", "prompt": [1], "temperature": -1}',
        b'{"model": "llama", "prompt": [' + b"9" * 5000 + b"]}",
        b'{"model": "llama", "prompt": [1e400]}',
        b'{"model": "llama", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "llama", "prompt": ["1"]}',
        b'{"model": "llama", "prompt": [true]}',
        b'{"model": "llama", "prompt": [1.5]}',
        b'{"model": "llama", "prompt": [-1]}',
        b'{"model": "llama", "prompt": [[1], 2]}',
        b'{"model": "llama", "prompt": {"a": 1}}',
        b'{"model": "llama", "prompt": "\xff"}',
        b'{"model": "\\ud800", "prompt": [1]}',
        b'{"model": "../llama", "prompt": [1]}',
        b'{"model": "llama", "prompt": []}',
        b'{"model": "llama", "prompt": [[1], []]}',
        b'{"model": "llama", "prompt": [300]}',
        b'{"model": "llama", "prompt": [[1], [2147483647]]}',
        b'{"model": "llama", "prompt": [1], "max_tokens": 0}',
        b'{"model": "llama", "prompt": [1], "max_tokens": 128}',
        b'{"model": "llama", "prompt": [1], "the-private-diagnosis": 1}',
        b'{"model": "bert", "prompt": [1]}',
    ],
)
def test_a_bad_completion_is_a_clear_400(served: TestClient, body: bytes) -> None:
    answer = served.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    error(answer)
    assert SECRET not in answer.text and "2147483647" not in answer.text


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"prompt": SECRET}, "text never reaches"),
        ({"prompt": [SECRET]}, "text never reaches"),
        ({"stop": [SECRET]}, "stop"),
        ({"stop": SECRET}, "stop"),
        ({"logit_bias": {SECRET: 1}}, "logit_bias"),
        ({"logit_bias": {"2000": 1}}, "logit_bias names an id beyond"),
        ({"logprobs": 21}, "logprobs"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"guided_json": {SECRET: 1}}, "guided_json"),
        ({"echo": True}, "echo"),
        ({"n": 2}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
    ],
)
def test_what_the_client_must_do_is_refused_by_name(served: TestClient, more: dict[str, Any], named: str) -> None:
    answer = served.post("/v1/completions", json={"model": "llama", "prompt": [1]} | more)
    assert answer.status_code == 400
    assert named in error(answer)["message"] and SECRET not in answer.text


def test_neutral_settings_are_taken(served: TestClient) -> None:
    neutral = {"n": 1, "stop": None, "echo": False, "logit_bias": {}, "presence_penalty": 0.0, "logprobs": None}
    answer = served.post("/v1/completions", json={"model": "llama", "prompt": [1], "max_tokens": 1, **neutral})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "bert", "input": []}, 400),
        ({"model": "bert", "input": SECRET}, 400),
        ({"model": "bert", "input": [300]}, 400),
        ({"model": "bert", "input": [1] * 131}, 400),
        ({"model": "bert", "input": [[1, 2]], "token_type_ids": [[0]]}, 400),
        ({"model": "bert", "input": [[1, 2]], "token_type_ids": [[0, 2]]}, 400),
        ({"model": "bert", "input": [[1]] * 5}, 413),
        ({"model": "llama", "input": [1]}, 400),
        ({"model": "nobody", "input": [1]}, 404),
    ],
)
def test_a_bad_classification(served: TestClient, body: dict[str, Any], status: int) -> None:
    answer = served.post("/classify", json=body)
    assert answer.status_code == status, answer.text
    assert error(answer)["message"] and SECRET not in answer.text


def test_a_10_mb_prompt_is_413_with_its_length_and_without(served: TestClient) -> None:
    body = b'{"model": "llama", "prompt": [' + b"1," * 5_000_000 + b"1]}"
    answer = served.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 413 and error(answer)["code"] == "too_large"

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(body), 1 << 16):
            yield body[at : at + (1 << 16)]

    answer = served.post("/v1/completions", content=pieces(), headers=JSON)
    assert "content-length" not in answer.request.headers
    assert answer.status_code == 413 and error(answer)["code"] == "too_large"


def test_a_prompt_of_many_tokens_within_the_body_limit(served: TestClient) -> None:
    answer = served.post("/v1/completions", json={"model": "llama", "prompt": [1] * 9000})
    assert answer.status_code == 413 and "9000 tokens" in error(answer)["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/..",
        "/v1/models/%2e%2e%2ftoken",
        "/v1/models/llama/files/..%2f..%2f..%2ftoken",
        "/v1/models/llama/files/%2e%2e",
        "/v1/models/.llama.partial",
        "/v1/files/%00/content",
        "/v1/files/..%5ctoken",
        "/v1/uploads/" + "a" * 129,
        "/v1/fine_tuning/jobs/..%2f..%2ftoken/events",
        "/v1/models/llama/files/token",
        "/nowhere",
    ],
)
def test_path_tricks(served: TestClient, path: str) -> None:
    answer = served.get(path)
    assert answer.status_code in (400, 404), answer.text
    error(answer)


def test_a_wrong_method_and_a_wrong_content_type(served: TestClient) -> None:
    assert error(served.delete("/v1/completions"))["code"] == "http_405"
    answer = served.post(
        "/classify", content=b'{"model": "bert", "input": [1]}', headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 400 and error(answer)


def test_a_fault_of_ours_says_nothing_private(
    served: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr("milkglass.server.http.routes_inference.require_prompts", broken)
    with caplog.at_level(logging.INFO, "milkglass.server"):
        answer = served.post("/classify", json={"model": "bert", "input": [1]})
    assert answer.status_code == 500 and error(answer)["code"] == "internal_error"
    assert SECRET not in answer.text and SECRET not in caplog.text
    assert "ZeroDivisionError at test_door.py" in caplog.text


def test_the_access_log_holds_no_names_bodies_or_tokens(served: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "milkglass.server"):
        served.get(f"/v1/models/{SECRET}")
        served.get("/v1/files", params={"purpose": SECRET})
    assert "GET /v1/models/{model_id} 404" in caplog.text
    assert SECRET not in caplog.text and "a-token-for" not in caplog.text


def test_the_token_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    first = create_app(ServerSettings(tmp_path / "home")).state.token
    path = tmp_path / "home" / "token"
    assert path.stat().st_mode & 0o777 == 0o600 and len(first) >= 43
    assert create_app(ServerSettings(tmp_path / "home")).state.token == first
    path.write_text("")
    with pytest.raises(UsageError):
        create_app(ServerSettings(tmp_path / "home"))


def test_one_home_is_for_one_server(tmp_path: Path) -> None:
    with running(tmp_path / "home"), pytest.raises(Conflict), running(tmp_path / "home"):
        pytest.fail("two servers in one home")
    HomeFolder(tmp_path / "home", 0).lock().close()


def test_a_home_is_closed_to_others(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    create_app(ServerSettings(home))
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o755)
    (home / "token").chmod(0o644)
    create_app(ServerSettings(home))
    assert home.stat().st_mode & 0o777 == 0o700 and (home / "token").stat().st_mode & 0o777 == 0o600

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    foreign.chmod(0o755)
    (foreign / "diary").touch()
    with pytest.raises(UsageError, match="not a server's home"):
        create_app(ServerSettings(foreign))
    assert foreign.stat().st_mode & 0o777 == 0o755 and [path.name for path in foreign.iterdir()] == ["diary"]


@pytest.mark.parametrize("bad", [{"port": 70000}, {"token": "short"}, {"max_batch": 0}, {"tls_key": Path("k")}])
def test_settings_that_cannot_be(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        settings(tmp_path, **bad)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"model": "llama", "prompt": [%s]}' % (b"-1," * 300_000 + b"-1")),
        ("/v1/completions", b'{"model": "llama", "prompt": [%s]}' % (b"[-1]," * 200_000 + b"[-1]")),
        ("/v1/completions", b'{"model": "llama", "prompt": [[%s]]}' % (b"-1," * 300_000 + b"-1")),
        ("/v1/completions", b'{"model": "llama", "prompt": [1], "stop_token_ids": [%s]}' % (b"-1," * 300_000 + b"-1")),
        ("/v1/completions", b'{"model": "llama", "prompt": [1], %s}' % _many_fields()),
        ("/classify", b'{"model": "bert", "input": [1], "token_type_ids": [%s]}' % (b"-1," * 300_000 + b"-1")),
        ("/v1/models", b'{"id": "m", "config": {}, "files": [%s]}' % (b"0," * 300_000 + b"0")),
        ("/v1/fine_tuning/jobs", b'{"model": "m", "training_file": "f", "hyperparameters": {%s}}' % _many_fields()),
    ],
    ids=["negative", "nested", "one row", "stop", "fields", "types", "files", "hyperparameters"],
)
def test_a_body_of_faults_is_refused_at_the_first(
    served: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes
) -> None:
    """One error an item took ten seconds of everybody's time."""
    counted: list[int] = []
    message = errors.validation_message

    def counting(found: Any) -> str:
        counted.append(len(found.errors()))
        return message(found)

    monkeypatch.setattr(errors, "validation_message", counting)
    assert served.post(path, content=body, headers=JSON).status_code == 400
    assert counted and counted[0] < 5

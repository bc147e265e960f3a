"""The client against a server that fails in every way that a network can."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.client.remote import connection
from milkglass.client.remote.connection import RetryPolicy
from milkglass.client.remote.remote import Remote, Sampling
from milkglass.errors import (
    CorruptCheckpoint,
    JobFailed,
    ModelNotFound,
    RemoteError,
    Unauthorized,
    Unreachable,
    UsageError,
)
from milkglass.progress import Stage, no_stage
from tests import tiny
from tests.client.stub import TOKEN, Handler, Stub, busy, fine, hang_up, lose_answer

QUICK = RetryPolicy(max_attempts=5, pause=lambda seconds: None)
DATA = bytes(range(256)) * 20  # 5,120 bytes: 6 chunks


def upload(remote: Remote, path: Path, stage: Stage = no_stage) -> str:
    """Any bytes, as `Remote.upload` sends them once it has looked at them."""
    return remote._send_file(path, "fine-tune", "data.safetensors", path.name, stage)


@pytest.fixture
def remote(stub: Stub) -> Iterator[Remote]:
    with Remote(stub.url, TOKEN, retry=QUICK) as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    path.write_bytes(DATA)
    return path


# --- the door ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("url", ["http://gpu.example:8420", "http://10.0.0.1", "http://127.0.0.1.evil.example"])
def test_a_token_never_crosses_a_network_in_the_clear(url: str) -> None:
    with pytest.raises(UsageError, match="would carry the token in the clear"):
        Remote(url, TOKEN)
    Remote(url, TOKEN, allow_http=True).connection.close()


@pytest.mark.parametrize("url", ["ftp://x", "gpu.example", "", "https://", "https://user:secret@host", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Remote(url, TOKEN)
    assert "secret" not in str(caught.value)
    assert "@" in url or not url or url.rstrip("/") in caught.value.message


def test_loopback() -> None:
    assert all(map(connection.is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(connection.is_loopback, ("localhost.evil.example", "0.0.0.0", "10.0.0.1", "::", "")))


def test_a_proxy_of_the_environment_is_not_asked_about_this_machine(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    stub.replies["GET /v1/models"] = lambda h: h.answer(200, {"data": [{"id": "m"}]})
    with Remote(stub.url, TOKEN, retry=RetryPolicy(max_attempts=1)) as remote:
        assert remote.models() == [{"id": "m"}]


def test_a_wrong_token(stub: Stub) -> None:
    with Remote(stub.url, "wrong", retry=QUICK) as remote, pytest.raises(Unauthorized) as caught:
        remote.models()
    assert caught.value.message == "the server answered 401: the token is wrong"
    with Remote(stub.url, None, retry=QUICK) as remote, pytest.raises(Unauthorized, match="no token was given"):
        remote.models()
    assert "--token-file FILE or MILKGLASS_TOKEN" in caught.value.hint and "look again" not in caught.value.hint
    assert "wrong-token" not in repr(remote)


@pytest.mark.parametrize("token", ["with space", "grün", "line\nbreak", ""])
def test_a_token_that_cannot_be(token: str) -> None:
    with pytest.raises(UsageError):
        Remote("http://127.0.0.1:1", token)


def test_nobody_answers() -> None:
    with Remote("http://127.0.0.1:9", TOKEN, retry=QUICK) as remote, pytest.raises(Unreachable, match="127.0.0.1:9"):
        remote.models()


def test_somebody_listens_and_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_SILENCE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        patience = RetryPolicy(pause=lambda seconds: pytest.fail("a wrong address must not look like a slow command"))
        with Remote(url, TOKEN, retry=patience) as remote, pytest.raises(Unreachable, match="does not answer"):
            remote.models()


def test_a_redirect_is_not_followed(stub: Stub, remote: Remote) -> None:
    stub.replies["GET /v1/models"] = lambda h: h.answer(307, {}, Location="http://127.0.0.1:9/")
    with pytest.raises(RemoteError, match="307"):
        remote.models()


def test_a_servers_words_cannot_rewrite_the_terminal(stub: Stub, remote: Remote) -> None:
    evil = {"error": {"message": "\x1b[2Jgone\r\n" + "x" * 9999, "hint": 7}}
    stub.replies["GET /v1/models"] = lambda h: h.answer(400, evil)
    with pytest.raises(RemoteError) as caught:
        remote.models()
    assert "\x1b" not in caught.value.message and len(caught.value.message) < 600
    assert caught.value.hint == ""


@pytest.mark.parametrize("raw", [b"<html>", b"[]", b"null", b"[" * 100_000, b'{"data": 3}', b'{"data": [3]}'])
def test_answers_that_cannot_be(stub: Stub, remote: Remote, raw: bytes) -> None:
    stub.replies["GET /v1/models"] = lambda h: h.answer(200, raw)
    with pytest.raises(RemoteError):
        remote.models()


# --- trying again -----------------------------------------------------------------------------------------------------
def test_reading_is_tried_again(stub: Stub, remote: Remote) -> None:
    stub.replies["GET /v1/models"] = lambda h: h.answer(200, {"data": []})
    stub.faults["GET"] = [hang_up, busy, busy, hang_up]
    assert remote.models() == []
    assert stub.count("GET /v1/models") == 5


def test_patience_ends(stub: Stub, remote: Remote) -> None:
    stub.faults["GET"] = [busy] * 9
    with pytest.raises(RemoteError, match="503: busy"):
        remote.models()
    assert stub.count("GET /v1/models") == QUICK.max_attempts


def test_a_job_is_never_started_twice(stub: Stub, remote: Remote) -> None:
    stub.replies["POST /v1/fine_tuning/jobs"] = lambda h: h.answer(200, {"id": "ftjob-1"})
    stub.faults["POST"] = [lose_answer]
    with pytest.raises(Unreachable):
        remote.create_job("m", "file-1", {})
    assert stub.count("POST /v1/fine_tuning/jobs") == 1


@pytest.mark.parametrize("status", [502, 504])
def test_what_may_have_been_done_is_not_asked_twice(stub: Stub, remote: Remote, status: int) -> None:
    def gateway(handler: Handler) -> bool:
        handler.answer(status, {"error": {"message": "gateway"}})
        return True

    stub.replies["POST /v1/fine_tuning/jobs"] = lambda h: h.answer(200, {"id": "ftjob-1"})
    stub.replies["GET /v1/models"] = lambda h: h.answer(200, {"data": []})
    stub.faults = {"POST": [gateway], "GET": [gateway]}
    with pytest.raises(RemoteError, match=f"{status}: gateway"):
        remote.create_job("m", "file-1", {})
    assert stub.count("POST /v1/fine_tuning/jobs") == 1
    assert remote.models() == [] and stub.count("GET /v1/models") == 2


@pytest.mark.parametrize("asked", ["²", "-1", "soon", "1e9"])
def test_a_strange_retry_after_is_not_obeyed(stub: Stub, remote: Remote, asked: str) -> None:
    def later(handler: Handler) -> bool:
        handler.answer(503, {}, Retry_After=asked)
        return True

    stub.replies["GET /v1/models"] = lambda h: h.answer(200, {"data": []})
    stub.faults["GET"] = [later]
    assert remote.models() == []


def test_long_waits_are_told(stub: Stub) -> None:
    told: list[str] = []
    patience = RetryPolicy(max_attempts=5, pause=lambda seconds: None, notice=told.append)
    stub.replies["GET /v1/models"] = lambda h: h.answer(200, {"data": []})
    stub.faults["GET"] = [hang_up, busy, hang_up, hang_up]
    with Remote(stub.url, TOKEN, retry=patience) as remote:
        assert remote.models() == []
    assert told and all(re.fullmatch(r"the server does not answer; trying again in \d s", one) for one in told)
    patience.wait(6)
    assert len(told) <= 3, "short waits are not worth a line"


def test_a_server_that_answered_once_is_waited_for(stub: Stub) -> None:
    waits: list[float] = []

    def once(handler: Handler) -> None:
        handler.answer(200, {"data": []}, Connection="close")
        handler.close_connection = True

    stub.replies["GET /v1/models"] = once
    with Remote(stub.url, TOKEN, retry=RetryPolicy(max_attempts=6, pause=waits.append)) as remote:
        remote.models()
        stub.shutdown()
        stub.server_close()
        with pytest.raises(Unreachable):
            remote.models()
    assert len(waits) == 5


# --- no answer fills the memory ---------------------------------------------------------------------------------------
def endless(status: int, piece: bytes) -> Any:
    """Sends `piece` until the client hangs up, at most 1000 times; notes how often."""

    def reply(handler: Handler) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.close_connection = True
        handler.server.sent = 0  # type: ignore[attr-defined]
        for _ in range(1000):
            handler.wfile.write(piece)
            handler.server.sent += 1  # type: ignore[attr-defined]

    return reply


@pytest.mark.parametrize(("status", "told"), [(200, "more than 200000 bytes"), (400, "answered 400: no reason")])
def test_a_long_answer_is_not_read_to_its_end(
    stub: Stub, remote: Remote, monkeypatch: pytest.MonkeyPatch, status: int, told: str
) -> None:
    monkeypatch.setattr(connection, "MAX_ANSWER_BYTES", 200_000)
    stub.replies["GET /v1/models"] = endless(status, b" " * 100_000)
    with pytest.raises(RemoteError, match=told):
        remote.models()
    assert stub.sent < 1000  # type: ignore[attr-defined]


@pytest.mark.parametrize("piece", [b"x" * 100_000, b"data: " + b"x" * 99_993 + b"\n"])
def test_a_long_event_is_not_read_to_its_end(
    stub: Stub, remote: Remote, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    monkeypatch.setattr(connection, "MAX_EVENT_BYTES", 200_000)
    stub.replies["POST /v1/completions"] = endless(200, piece)
    with pytest.raises(RemoteError, match="more than 200000 bytes"):
        list(remote.generate("m", [1]))
    assert stub.sent < 1000  # type: ignore[attr-defined]


def test_a_compressed_answer_is_refused(stub: Stub, remote: Remote) -> None:
    stub.replies["GET /v1/models"] = lambda h: h.answer(200, gzip.compress(b'{"data": []}'), Content_Encoding="gzip")
    with pytest.raises(RemoteError, match="compressed"):
        remote.models()
    assert stub.calls[0][1]["Accept-Encoding"] == "identity"


def test_waiting_grows_and_obeys_the_server() -> None:
    waits: list[float] = []
    patience = RetryPolicy(first_limit=1, last_limit=8, pause=waits.append)
    for attempt in range(6):
        patience.wait(attempt)
    assert all(0.5 * bound <= wait <= bound for wait, bound in zip(waits, (1, 2, 4, 8, 8, 8), strict=True))


# --- uploads ----------------------------------------------------------------------------------------------------------
def test_an_upload_arrives_whole(stub: Stub, remote: Remote, file: Path) -> None:
    told: dict[str, list[int]] = {}
    assert upload(remote, file, stage=lambda name, total: told.setdefault(name, []).append) == "file-0"
    assert stub.content["file-0"] == DATA
    assert {name: sum(done) for name, done in told.items()} == {
        "check train.parquet": len(DATA),
        "upload train.parquet": len(DATA),
    }
    assert stub.count("PUT /v1/uploads/upload-0") == 6


@pytest.mark.parametrize("fault", [hang_up, lose_answer, busy])
@pytest.mark.parametrize("where", ["POST /v1/uploads", "PUT", "POST complete", "GET"])
def test_a_cut_anywhere_costs_nothing(stub: Stub, remote: Remote, file: Path, fault: Any, where: str) -> None:
    call = "POST /v1/uploads/upload-0/complete" if where == "POST complete" else where
    stub.faults[call] = [fault] if where != "PUT" else [fine, fine, fault, fine, fault, fault]
    key = upload(remote, file)
    assert stub.content[key] == DATA
    assert len(stub.files) == 1


def test_a_killed_client_goes_on(stub: Stub, remote: Remote, file: Path) -> None:
    class Killed(BaseException):
        pass

    def die(done: int) -> None:
        if stub.count("PUT /v1/uploads/upload-0") == 3:
            raise Killed

    with pytest.raises(Killed):
        upload(remote, file, stage=lambda name, total: die)
    before = stub.count("PUT /v1/uploads/upload-0")
    with Remote(stub.url, TOKEN, retry=QUICK) as another:
        key = upload(another, file)
    assert stub.content[key] == DATA
    assert stub.count("POST /v1/uploads") == 1
    assert stub.count("PUT /v1/uploads/upload-0") - before == 3


def test_an_upload_that_the_server_forgot_begins_anew(stub: Stub, remote: Remote, file: Path) -> None:
    stub.faults["PUT"] = [fine, *[hang_up] * 5]
    with pytest.raises(Unreachable):
        upload(remote, file)
    stub.uploads.clear()
    assert stub.content[upload(remote, file)] == DATA


def test_what_is_there_is_not_sent_again(stub: Stub, remote: Remote, file: Path) -> None:
    first = upload(remote, file)
    assert upload(remote, file) == first
    assert stub.count("POST /v1/uploads") == 1


def test_the_note_of_an_upload_says_nothing(stub: Stub, remote: Remote, file: Path, tmp_path: Path) -> None:
    stub.faults["PUT"] = [fine, *[hang_up] * 5]
    with pytest.raises(Unreachable):
        upload(remote, file)
    (note,) = (tmp_path / "cache" / "uploads").iterdir()
    assert json.loads(note.read_text()) == {"id": "upload-0"}
    assert "train" not in note.name and str(stub.server_port) not in note.name
    note.write_text('{"id": "../../evil"}')
    assert stub.content[upload(remote, file)] == DATA


def test_a_server_that_damages_an_upload_is_told(stub: Stub, remote: Remote, file: Path, tmp_path: Path) -> None:
    def damage(handler: Handler) -> bool:
        stub.uploads["upload-0"]["data"] = b"x" * len(DATA)
        return False

    stub.faults["POST /v1/uploads/upload-0/complete"] = [damage]
    with pytest.raises(RemoteError, match="checksum is wrong"):
        upload(remote, file)
    assert not list((tmp_path / "cache" / "uploads").iterdir())


def test_a_server_that_stands_still_is_given_up(stub: Stub, remote: Remote, file: Path) -> None:
    def stay(handler: Handler) -> bool:
        handler.answer(200, {"received": 0})
        return True

    stub.faults["PUT"] = [stay] * 50
    with pytest.raises(RemoteError, match="stays at 0 of 5120"):
        upload(remote, file)


def test_the_name_of_a_file_stays_here(stub: Stub, remote: Remote, tmp_path: Path) -> None:
    path = tmp_path / "zanzibar.parquet"
    path.write_bytes(DATA)
    upload(remote, path)
    assert not [call for call in stub.calls if b"zanzibar" in repr(call).encode()]


@pytest.mark.parametrize(
    "answer", [{}, {"id": "../x", "received": 0}, {"id": "u"}, {"id": "u", "received": "x"}, {"id": 5, "received": 0}]
)
def test_an_upload_that_cannot_be(stub: Stub, remote: Remote, file: Path, answer: dict[str, Any]) -> None:
    stub.replies["POST /v1/uploads"] = lambda h: h.answer(200, answer)
    with pytest.raises(RemoteError, match="the answer has no proper"):
        upload(remote, file)


# --- models -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As `obfuscate` leaves it: no tokenizer, no names."""
    target = tmp_path / "scrambled"
    tiny.build("llama-tied").save_pretrained(target, max_shard_size="40KB")
    (target / "milkglass.json").write_text("{}")
    return target


def test_a_model_is_sent_shard_by_shard(stub: Stub, remote: Remote, folder: Path) -> None:
    stub.chunk_bytes = 1 << 20
    assert remote.upload_model(folder, "mine") == "mine"
    sent = stub.models["mine"]
    assert sent["config"] == json.loads((folder / "config.json").read_text())
    assert sent["index"] == json.loads((folder / "model.safetensors.index.json").read_text())
    assert sent["delta"] is None
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    assert [one["name"] for one in sent["files"]] == shards and len(shards) > 1
    for one in sent["files"]:
        assert stub.content[one["file_id"]] == (folder / one["name"]).read_bytes()


def test_a_model_whose_answer_was_lost_is_asked_for_again(stub: Stub, remote: Remote, folder: Path) -> None:
    stub.chunk_bytes = 1 << 20
    stub.faults["POST /v1/models"] = [lose_answer, hang_up]
    told: list[tuple[str, int]] = []

    def stage(name: str, total: int) -> Any:
        return (lambda done: told.append((name, done))) if total == 0 else (lambda done: None)

    assert remote.upload_model(folder, "mine", stage) == "mine"
    assert stub.count("POST /v1/models") == 3 and list(stub.models) == ["mine"]
    assert told == [("the server puts the model together", 1)]


def test_the_name_of_a_folder_stays_here(stub: Stub, remote: Remote, folder: Path) -> None:
    stub.chunk_bytes = 1 << 20
    first, second = (remote.upload_model(folder) for _ in range(2))
    assert re.fullmatch("model-[0-9a-f]{8}", first) and first != second
    assert not [call for call in stub.calls if b"scrambled" in repr(call).encode()]


@pytest.mark.parametrize(
    "stray",
    ["tokenizer.json", "vocab.txt", "merges.txt", "chat_template.jinja", "spiece.model", "Tokenizer_Config.json"],
)
def test_a_folder_with_a_tokenizer_stays_here(stub: Stub, remote: Remote, folder: Path, stray: str) -> None:
    (folder / stray).write_text("{}")
    with pytest.raises(UsageError, match="holds a tokenizer"):
        remote.upload_model(folder)
    assert not stub.calls


@pytest.mark.parametrize("name", ["id2label", "label2id", "_name_or_path", "auto_map", "stop_strings"])
def test_a_config_with_names_stays_here(stub: Stub, remote: Remote, folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": {name: {"0": "ill"}}}))
    with pytest.raises(UsageError, match=f"holds {name}"):
        remote.upload_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({name: {"0": "ill"}}))
    with pytest.raises(UsageError, match=f"holds {name}"):
        remote.upload_model(folder)
    assert not stub.calls


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label_names", ["cancer", "hiv"]),
        ("dataset", "stmary-oncology"),
        ("clinics", {"list": [{"of": "stmary"}]}),
        ("architectures", ["Dr Somebody, oncology"]),
        ("rope_parameters", {"rope_type": "default", "note": "stmary"}),
        ("Dr Somebody", 1),
    ],
)
def test_a_config_with_words_of_its_own_stays_here(
    stub: Stub, remote: Remote, folder: Path, name: str, value: Any
) -> None:
    for file in ("config.json", "generation_config.json"):
        before = (folder / file).read_text()
        (folder / file).write_text(json.dumps({**json.loads(before), name: value}))
        with pytest.raises(UsageError, match=f"{file} of scrambled holds") as caught:
            remote.upload_model(folder)
        assert "Somebody" not in str(caught.value)
        (folder / file).write_text(before)
    assert not stub.calls


@pytest.mark.parametrize(
    "more",
    [
        {"metadata": {"total_size": 1, "author": "Dr Somebody"}},
        {"metadata": {"total_size": "Dr Somebody"}},
        {"metadata": "Dr Somebody"},
        {"author": "Dr Somebody"},
        {"weight_map": {"Dr Somebody": "model.safetensors"}},
    ],
)
def test_an_index_with_notes_stays_here(stub: Stub, remote: Remote, folder: Path, more: dict[str, Any]) -> None:
    index = folder / "model.safetensors.index.json"
    assert require_scrambled(folder), "what transformers writes may go"
    index.write_text(json.dumps({**json.loads(index.read_text()), **more}))
    with pytest.raises(UsageError, match=r"index\.json of scrambled holds") as caught:
        remote.upload_model(folder)
    assert "Somebody" not in str(caught.value) and not stub.calls


def test_a_config_with_numbered_labels_may_go(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    numbered = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
    (folder / "config.json").write_text(json.dumps({**config, **numbered}))
    assert require_scrambled(folder)
    numbered["label2id"]["LABEL_ill"] = 1
    (folder / "config.json").write_text(json.dumps({**config, **numbered}))
    with pytest.raises(UsageError, match="holds label2id"):
        require_scrambled(folder)


def test_an_unmarked_folder_stays_here(stub: Stub, remote: Remote, folder: Path) -> None:
    (folder / "milkglass.json").unlink()
    with pytest.raises(UsageError, match="nothing says that it was scrambled"):
        remote.upload_model(folder)
    assert not stub.calls


def test_folders_that_are_no_models(remote: Remote, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        remote.upload_model(tmp_path)
    with pytest.raises(UsageError, match="--name"):
        remote.upload_model(folder, "../evil")


def serve_model(stub: Stub, folder: Path, checksums: bool = True) -> None:
    entries = []
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest() if checksums else None
        entries.append({"name": path.name, "bytes": len(raw), "sha256": digest})

        def reply(handler: Handler, raw: bytes = raw) -> None:
            asked = handler.headers.get("Range")
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
            handler.answer(206 if asked else 200, raw[start:])

        stub.replies[f"GET /v1/models/ft/files/{path.name}"] = reply
    stub.replies["GET /v1/models/ft/files"] = lambda h: h.answer(200, {"data": entries})


def half(handler: Handler) -> bool:
    """Promise everything, send a part."""
    if "/files/model" not in handler.path or handler.headers.get("Range"):
        return False
    handler.send_response(200)
    handler.send_header("Content-Length", "99999999")
    handler.end_headers()
    handler.wfile.write(handler.server.model_bytes[:5000])  # type: ignore[attr-defined]
    handler.wfile.flush()
    handler.cut()
    return True


def test_a_fetched_model_is_the_servers(stub: Stub, remote: Remote, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny.build("bert").save_pretrained(source)
    serve_model(stub, source)
    stub.model_bytes = (source / "model.safetensors").read_bytes()  # type: ignore[attr-defined]
    stub.faults["GET /v1/models/ft/files/model.safetensors"] = [half]
    out = remote.fetch_model("ft", tmp_path / "fetched")
    fetched = {p.name: p.read_bytes() for p in out.iterdir()}
    assert json.loads(fetched.pop("milkglass.json")) == {"format": "milkglass-scrambled/1"}
    assert fetched == {p.name: p.read_bytes() for p in source.iterdir()}
    assert [p.name for p in require_scrambled(out)] == ["model.safetensors"]
    ranges = [h.get("Range") for call, h, _ in stub.calls if call.endswith("model.safetensors")]
    assert ranges == [None, "bytes=5000-"]
    with pytest.raises(UsageError, match="exists already"):
        remote.fetch_model("ft", out)


def test_two_models_are_never_mixed(stub: Stub, remote: Remote, tmp_path: Path) -> None:
    """The first one's download breaks off; the second has fewer files."""
    first, second = tmp_path / "first", tmp_path / "second"
    tiny.build("llama-tied").save_pretrained(first)
    tiny.build("bert").save_pretrained(second)
    serve_model(stub, first)
    stub.replies["GET /v1/models/ft/files/model.safetensors"] = lambda h: h.answer(404, {})
    with pytest.raises(RemoteError, match="404"):
        remote.fetch_model("ft", tmp_path / "out")
    (staging,) = tmp_path.glob(".out*")
    assert (staging / "generation_config.json").is_file()
    serve_model(stub, second)
    fetched = {p.name for p in remote.fetch_model("ft", tmp_path / "out").iterdir()}
    assert fetched == {p.name for p in second.iterdir()} | {"milkglass.json"}
    assert not list(tmp_path.glob(".out*")), "what was begun for this place is of no use now"


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/x.json", "model.bin", "run.py", "tokenizer.json", ".hidden.json", 5]
)
def test_a_server_cannot_choose_where_files_go(stub: Stub, remote: Remote, tmp_path: Path, name: Any) -> None:
    entries = [{"name": "config.json", "bytes": 2, "sha256": None}, {"name": name, "bytes": 2, "sha256": None}]
    stub.replies["GET /v1/models/ft/files"] = lambda h: h.answer(200, {"data": entries})
    with pytest.raises(RemoteError, match="no checkpoint has"):
        remote.fetch_model("ft", tmp_path / "out")
    assert not list(tmp_path.rglob("*.json"))


def test_damaged_downloads_are_refused(stub: Stub, remote: Remote, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny.build("bert").save_pretrained(source)
    serve_model(stub, source)
    raw = (source / "model.safetensors").read_bytes()
    stub.replies["GET /v1/models/ft/files/model.safetensors"] = lambda h: h.answer(200, raw[:-1] + b"?")
    with pytest.raises(RemoteError, match="checksum is wrong"):
        remote.fetch_model("ft", tmp_path / "out")
    stub.replies["GET /v1/models/ft/files/model.safetensors"] = lambda h: h.answer(200, raw + b"more")
    with pytest.raises(RemoteError, match="sends more"):
        remote.fetch_model("ft", tmp_path / "out")
    (source / "model.safetensors").write_bytes(b"\x80\x04pickle" * 100)
    serve_model(stub, source, checksums=False)
    with pytest.raises(CorruptCheckpoint):
        remote.fetch_model("ft", tmp_path / "out2")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out2").exists()
    assert not list(tmp_path.glob(".out2*")), "whole, and no model: the next try begins anew"


# --- jobs -------------------------------------------------------------------------------------------------------------
def told(number: int, **data: Any) -> str:
    return f"event: metrics\nid: {number}\ndata: {json.dumps({'message': f'step {number}', 'data': data})}\n\n"


def test_following_survives_restarts_and_repeats_nothing(stub: Stub, remote: Remote) -> None:
    parts = iter(
        [
            lambda h: h.events([told(1), ": still here\n\n", told(2)]),
            lambda h: h.cut(),
            lambda h: h.answer(503, {"error": {"message": "restarting"}}),
            lambda h: h.events([]),
            lambda h: h.events([told(3), told(4), "event: done\nid: 4\ndata: {}\n\n", told(5)]),
        ]
    )
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-1/events"] = lambda h: next(parts)(h)  # noqa: PLW0108
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-1"] = lambda h: h.answer(200, {"status": "running"})
    events = [event["message"] for event in remote.follow("ftjob-1")]
    assert events == ["step 1", "step 2", "step 3", "step 4"]
    seen = [h.get("Last-Event-ID") for call, h, _ in stub.calls if "/events" in call]
    assert seen == [None, "2", "2", "2", "2"]


def test_following_ends_without_a_done_event(stub: Stub, remote: Remote) -> None:
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-1/events"] = lambda h: h.events([])
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-1"] = lambda h: h.answer(200, {"status": "succeeded"})
    assert list(remote.follow("ftjob-1")) == []


def test_following_gives_up_on_what_waiting_does_not_mend(stub: Stub, remote: Remote) -> None:
    with pytest.raises(RemoteError, match="404"):
        list(remote.follow("ftjob-1"))
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-1/events"] = lambda h: h.cut()
    with pytest.raises(Unreachable):
        list(remote.follow("ftjob-1", restart_seconds=0.0))


def test_a_restart_late_in_a_long_stream_is_waited_for(
    stub: Stub, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection brings an event a minute for an hour, and breaks off: the server restarts."""

    def broken(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "9999999")
        handler.end_headers()
        handler.wfile.write("".join(told(number) for number in range(60)).encode())
        handler.wfile.flush()
        handler.cut()

    now = [0.0]
    monkeypatch.setattr("milkglass.client.remote.remote.time.monotonic", lambda: now[0])
    parts = iter(
        [
            broken,
            lambda h: h.cut(),
            lambda h: h.events([told(60), "event: done\ndata: {}\n\n"]),
        ]
    )
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-1/events"] = lambda h: next(parts)(h)  # noqa: PLW0108
    count = 0
    for _ in remote.follow("ftjob-1"):
        count += 1
        now[0] += 60
    assert count == 61


def test_a_failed_job_says_why(stub: Stub, remote: Remote) -> None:
    state = {"status": "failed", "error": {"message": "out of memory\x1b[2J"}}
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-1"] = lambda h: h.answer(200, state)
    with pytest.raises(JobFailed, match=r"the job ftjob-1 is failed: out of memory\ufffd\[2J"):
        remote.result("ftjob-1")


@pytest.mark.parametrize("name", ["../models", "a/b", "", "a b", "?x", "a" * 200])
def test_ids_cannot_leave_their_place_in_the_address(stub: Stub, remote: Remote, name: str) -> None:
    for call in (remote.job, remote.model, lambda n: list(remote.follow(n)), lambda n: remote.classify(n, [[1]])):
        with pytest.raises(UsageError):
            call(name)
    assert not stub.calls


# --- inference --------------------------------------------------------------------------------------------------------
def test_classification(stub: Stub, remote: Remote) -> None:
    rows = [
        {"index": 1, "label": "LABEL_0", "probs": [0.9, 0.1]},
        {"index": 0, "label": "LABEL_1", "probs": [0.2, 0.8]},
    ]
    stub.replies["POST /classify"] = lambda h: h.answer(200, {"data": rows})
    stub.faults["POST"] = [lose_answer]
    found = remote.classify("m", [np.array([5, 6], np.int32), [7]], [np.zeros(2, np.int8), [0]])
    assert [one.label for one in found] == [1, 0]
    assert found[0].probabilities == (0.2, 0.8)
    asked = json.loads(stub.calls[-1][2])
    assert asked == {"model": "m", "input": [[5, 6], [7]], "token_type_ids": [[0, 0], [0]]}


@pytest.mark.parametrize(
    "row",
    [
        {"index": 1, "label": "LABEL_0", "probs": [1.0]},
        {"index": [0], "label": "LABEL_0", "probs": [1.0]},
        {"index": False, "label": "LABEL_0", "probs": [1.0]},
        {"index": 0, "label": "ill", "probs": [1.0]},
        {"index": 0, "label": "LABEL_0", "probs": "x"},
        {"index": 0, "label": "LABEL_0", "probs": [None]},
        {"index": 0, "label": "LABEL_0"},
    ],
)
def test_classifications_that_cannot_be(stub: Stub, remote: Remote, row: dict[str, Any]) -> None:
    stub.replies["POST /classify"] = lambda h: h.answer(200, {"data": [row]})
    with pytest.raises(RemoteError):
        remote.classify("m", [[1]])


def chunk(*ids: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': '', 'token_ids': list(ids)}]})}\n\n"


def test_generation_streams(stub: Stub, remote: Remote) -> None:
    lines = [chunk(5), chunk(6, 7), 'data: {"choices": []}\n\n', "data: [DONE]\n\n"]
    stub.replies["POST /v1/completions"] = lambda h: h.events(lines)
    sampling = Sampling(9, 0.5, 0.9, 3, 1, (2,))
    assert list(remote.generate("m", np.array([1, 2], np.int32), sampling)) == [[5], [6, 7]]
    assert json.loads(stub.calls[-1][2]) == {
        "model": "m", "prompt": [1, 2], "stream": True, "return_token_ids": True, "max_tokens": 9, "temperature": 0.5,
        "top_p": 0.9, "top_k": 3, "seed": 1, "stop_token_ids": [2],
    }  # fmt: skip


@pytest.mark.parametrize(
    "lines", [[chunk(5)], [chunk("5")], ["data: x\n\n"], ['data: {"error": {"message": "full"}}\n\n']]
)
def test_answers_that_break_off_are_not_taken_for_whole(stub: Stub, remote: Remote, lines: list[str]) -> None:
    stub.replies["POST /v1/completions"] = lambda h: h.events(lines)
    with pytest.raises(RemoteError):
        list(remote.generate("m", [1]))


def test_whole_completions(stub: Stub, remote: Remote) -> None:
    rows = [{"index": 1, "token_ids": [9]}, {"index": 0, "token_ids": [7, 8]}]
    stub.replies["POST /v1/completions"] = lambda h: h.answer(200, {"choices": rows})
    assert remote.complete("m", [[1], [2]]) == [[7, 8], [9]]
    with pytest.raises(RemoteError, match="2 answers do not fit the 3 questions"):
        remote.complete("m", [[1], [2], [3]])

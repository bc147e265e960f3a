"""`milkglass proxy` and `milkglass ui`: how they are reached, and what they refuse before the key is opened."""

from __future__ import annotations

import http.server
import json
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from milkglass.cli.ui.tls import client_url
from milkglass.client.codec.codec import codec_of
from milkglass.client.key.file import UnlockedKey, write_key
from milkglass.schemes.orthogonal import Orthogonal
from tests import warm
from tests.cli.kit import call, refused
from tests.cli.test_processes import MILKGLASS, environment, self_signed
from tests.engines.kit import event
from tests.proxy.kit import Scrambled
from tests.server.kit import TOKEN, register
from tests.server.real import Server
from tests.serving import in_thread

NOWHERE = ("--key", "none.mgkey", "--server", "http://127.0.0.1:9")


@pytest.mark.parametrize("command", ["proxy", "ui"])
def test_a_network_needs_tls_and_a_key_of_its_own(command: str, tmp_path: Path) -> None:
    secret = tmp_path / "api-key"
    secret.write_text("a long random word\n")
    network = (command, *NOWHERE, "--host", "0.0.0.0")
    for more in ((), ("--api-key-file", secret)):
        result = call(*network, *more)
        refused(result, 2, "without TLS would let anyone on the way read texts, answers and the API key")
        assert "--cert and --tls-key" in result.stderr and "--insecure-http" in result.stderr
    accepted = call(*network, "--api-key-file", secret, "--insecure-http")
    assert accepted.exit_code != 0 and "TLS" not in accepted.stderr  # the next thing that is wrong: no such key


def test_an_open_proxy_is_for_this_machine_alone(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("a long random word\n")
    refused(call("proxy", *NOWHERE, "--open", "--host", "0.0.0.0", "--insecure-http"), 2, "without an API key")
    refused(call("proxy", *NOWHERE, "--open", "--api-key-file", tmp_path / "api-key"), 2, "exclude each other")


@pytest.mark.parametrize("command", ["proxy", "ui"])
def test_certificate_and_key_are_checked_before_the_milkglass_key_is_opened(command: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (certificate, secret), (_, other) = self_signed(tmp_path), self_signed(tmp_path / "other")
    refused(call(command, *NOWHERE, "--cert", tmp_path / "no.pem", "--tls-key", secret), 2, "no file")
    refused(call(command, *NOWHERE, "--cert", certificate), 2, "TLS needs both a certificate and a key")
    refused(call(command, *NOWHERE, "--tls-key", secret), 2, "TLS needs both a certificate and a key")
    refused(call(command, *NOWHERE, "--cert", certificate, "--tls-key", other), 2, "is not the key of")


@contextmanager
def listening(*words: object, forked: bool = True) -> Iterator[tuple[Any, str]]:
    """The process, and the first line that it prints. forked: from an interpreter that is there."""
    # Where the tests run in the background, SIGINT is ignored, and whatever they start inherits that.
    start: Any = warm.Popen if forked else subprocess.Popen
    command = [*([] if forked else ["env", "--default-signal=INT"]), *MILKGLASS, *map(str, words)]
    with start(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(MILKGLASS_TOKEN=TOKEN, PYTHONUNBUFFERED="1"),
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield process, line
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """An engine's address, and the key file of its model."""
    root = tmp_path_factory.mktemp("endpoint")
    model = Scrambled.of(root, scheme=Orthogonal())
    write_key(root / "k.mgkey", model.key, environment()["MILKGLASS_PASSPHRASE"], scrypt_n=2)
    with Server(root / "home", in_thread=True) as server, server.client() as client:
        register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        yield server.url, root / "k.mgkey"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_the_page_ends_when_it_is_told_to(engine: tuple[str, Path], number: signal.Signals) -> None:
    """Whatever its attacks are at. At Ctrl-C the interpreter ends as well, so that it is a new one."""
    url, key = engine
    with listening("ui", "--key", key, "--server", url, "--port", 0, forked=number != signal.SIGINT) as (process, _):
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
        assert (errors.splitlines()[-1] == "interrupted") == (number == signal.SIGINT) and "Traceback" not in errors


@pytest.mark.timeout(600)
def test_the_proxy_draws_an_api_key_and_prints_it(engine: tuple[str, Path]) -> None:
    url, key = engine
    with listening("proxy", "--key", key, "--server", url, "--port", 0) as (process, line):
        assert process.stderr is not None
        announced = next(one for one in process.stderr if one.startswith("next: "))
        found = re.fullmatch(
            r'next: OpenAI\(base_url="(http://127\.0\.0\.1:[0-9]+/v1)", api_key="([\w-]{32})"\)\n', announced
        )
        assert found and found[1] in line and found[2] not in line, (announced, line)
        for given, status in ((found[2], 200), ("any", 401), (None, 401)):
            headers = {} if given is None else {"Authorization": f"Bearer {given}"}
            assert httpx2.get(f"{found[1]}/models", headers=headers, timeout=60).status_code == status
    with listening("proxy", "--key", key, "--server", url, "--port", 0, "--open") as (process, line):
        assert process.stderr is not None
        announced = next(one for one in process.stderr if one.startswith("next: "))
        assert announced.endswith('api_key="any")\n')
        address = re.search(r"http://[0-9.:]+/v1", line)
        assert address and httpx2.get(f"{address[0]}/models", timeout=60).status_code == 200


class Hanging(http.server.BaseHTTPRequestHandler):
    """An engine that begins an answer and never ends it.

    Attributes:
        ids: what it begins with. The key decides which of them have text, and how a tokenizer spells it.
    """

    ids: tuple[int, ...]

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "m", "max_model_len": 100, "owned_by": "vllm"}]}).encode()
        self._begin("application/json", len(body))
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._begin("text/event-stream")
        self.wfile.write(event([*self.ids]))
        self.wfile.flush()
        self.rfile.read(1)

    def _begin(self, kind: str, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.mark.timeout(600)
def test_a_second_interruption_ends_the_answers_without_a_traceback(engine: tuple[str, Path]) -> None:
    _, key = engine
    codec = codec_of(UnlockedKey.open(key, environment()["MILKGLASS_PASSPHRASE"]))
    hanging = type("HangingWithIds", (Hanging,), {"ids": tuple(codec.encode(["the nurse called"]).ids[0].tolist())})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), hanging) as other, in_thread(other):
        other.daemon_threads = True
        url = f"http://127.0.0.1:{other.server_port}"
        words = ("proxy", "--key", key, "--engine", "vllm", "--server", url, "--port", 0, "--open")
        with listening(*words, forked=False) as (process, line):
            address = re.search(r"http://[0-9.:]+/v1", line)
            assert address and process.stderr is not None
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            with httpx2.stream("POST", f"{address[0]}/chat/completions", json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                begun = next(lines)
                process.send_signal(signal.SIGINT)
                noticed = list[str]()
                while not (noticed and noticed[-1].startswith("finishing 1 request")):  # at once: it waits for us
                    line = process.stderr.readline()
                    assert line, (begun, answer.status_code, noticed, list(lines))
                    noticed.append(line)
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=60)
            assert errors == "interrupted\n" and process.returncode == 130


def test_what_listens_everywhere_is_called_by_a_name(tmp_path: Path) -> None:
    certificate, _ = self_signed(tmp_path)  # for 127.0.0.1
    here = socket.gethostname()
    assert client_url("http://127.0.0.1:8422", None) == "http://127.0.0.1:8422"
    assert client_url("http://[::1]:8422", None) == "http://[::1]:8422"
    assert client_url("https://192.0.2.7:8422", certificate) == "https://192.0.2.7:8422"
    for everywhere in ("0.0.0.0", "[::]"):
        assert client_url(f"http://{everywhere}:8422", None) == f"http://{here}:8422"
        assert client_url(f"https://{everywhere}:8422", certificate) == "https://127.0.0.1:8422"


@pytest.mark.timeout(600)
def test_the_proxy_speaks_tls_to_a_network(engine: tuple[str, Path], tmp_path: Path) -> None:
    url, key = engine
    certificate, secret = self_signed(tmp_path)
    (tmp_path / "api-key").write_text("a-long-random-word\n")
    tls = ("--cert", certificate, "--tls-key", secret, "--host", "0.0.0.0", "--api-key-file", tmp_path / "api-key")
    with listening("proxy", "--key", key, "--server", url, "--port", 0, *tls) as (process, line):
        found = re.search(r"listening on https://0\.0\.0\.0:([0-9]+)/v1", line)
        assert found, line
        assert process.stderr is not None
        announced = next(one for one in process.stderr if one.startswith("next: "))
        opened = f'OpenAI(base_url="https://127.0.0.1:{found[1]}/v1", api_key=...)'
        assert announced == f"next: {opened}; the API key is in {tmp_path / 'api-key'}\n"
        context = ssl.create_default_context(cafile=str(certificate))
        headers = {"Authorization": "Bearer a-long-random-word"}
        with httpx2.Client(base_url=f"https://127.0.0.1:{found[1]}", verify=context, timeout=60) as client:
            assert client.get("/v1/models", headers=headers).json()["data"][0]["id"] == "scrambled"
            assert client.get("/v1/models").status_code == 401
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"http://127.0.0.1:{found[1]}/health", timeout=60)


@pytest.mark.timeout(600)
def test_ui_answers_who_has_its_key_and_no_page_of_another_site(engine: tuple[str, Path]) -> None:
    """Its page gets the key for the code that is in the address, once."""
    url, key = engine
    with listening("ui", "--key", key, "--server", url, "--port", 0, "--no-attack") as (_, line):
        base, code = line.removeprefix("milkglass ui: open ").strip().split("/#")
        others: tuple[dict[str, str], ...] = (
            {}, {"Authorization": "Bearer any"}, {"Origin": "https://evil.example"}, {"Host": "evil.example"},
        )  # fmt: skip
        for headers in others:
            for path in ("/v1/models", "/monitor/state"):
                assert httpx2.get(f"{base}{path}", headers=headers, timeout=60).status_code == 401, (path, headers)
            wrong = httpx2.post(f"{base}/monitor/open", json={"code": "x" * len(code)}, headers=headers, timeout=60)
            assert wrong.status_code == 401 and "key" not in wrong.json()
        opened = httpx2.post(f"{base}/monitor/open", json={"code": code}, timeout=60)
        owner = {"Authorization": f"Bearer {opened.json()['key']}"}
        assert httpx2.get(f"{base}/v1/models", headers=owner, timeout=60).status_code == 200
        assert httpx2.post(f"{base}/monitor/open", json={"code": code}, timeout=60).status_code == 401


@pytest.mark.timeout(600)
def test_ui_prints_a_new_address_when_one_is_used(engine: tuple[str, Path], tmp_path: Path) -> None:
    url, key = engine
    (tmp_path / "api-key").write_text("a-long-random-word\n")
    words = ("ui", "--key", key, "--server", url, "--port", 0, "--no-attack", "--api-key-file", tmp_path / "api-key")
    with listening(*words) as (process, line):
        assert process.stdout is not None
        seen = []
        for beginning in ("milkglass ui: open ", "milkglass ui: it is open; for another tab open "):
            assert line.startswith(beginning) and "a-long-random-word" not in line
            base, code = line.removeprefix(beginning).strip().split("/#")
            answer = httpx2.post(f"{base}/monitor/open", json={"code": code}, timeout=60)
            assert answer.status_code == 200 and answer.json()["key"] != "a-long-random-word"
            seen.append(code)
            line = process.stdout.readline()
        assert len({*seen, line.strip().split("/#")[1]}) == 3

"""`proxy --attested POLICY`: OpenAI's own client, the programs as they are, and an engine that keeps its requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
import uvicorn
from openai import OpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from milkglass.attest.passthrough import OWN_ANSWER, PAD_BYTES, QUIET_HEADER, SLOT_BYTES, STATE_HEADER
from milkglass.proxy.attested import AttestedProxy
from milkglass.proxy.guard import attestation_header
from milkglass.server.settings import Limits
from tests.attest.programs import Program, command
from tests.attest.test_channel import Authority
from tests.cli.kit import call
from tests.server.kit import until

TEXT = "my father has a fever since yesterday"
AT_ONCE = 110  # requests, more than the hundred connections that the client library keeps by itself
WORDS = ["It ", "may be ", "the flu", "."]
CALL = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"day": "Monday"}'}}
TOOLS: Any = [{"type": "function", "function": {"name": "book", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES: Any = [{"role": "user", "content": TEXT}]


@dataclass
class Engine:
    """What speaks OpenAI's API on the attested machine: bodies and headers of its requests, in order."""

    asked: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    waiting: int = 0

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append((body, dict(request.headers)))
        if body["model"] != "m":
            error = {"message": "no such model", "type": "NotFoundError", "code": None}
            return JSONResponse({"error": error}, 404, {"X-Engine": "secret"})
        head = {"id": "1", "created": 1, "model": "m"}
        if body.get("stream"):
            return StreamingResponse(self._events(head), media_type="text/event-stream")
        message: dict[str, Any] = {"role": "assistant", "content": "".join(WORDS)}
        if "tools" in body:
            message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice]})

    async def together(self, request: Request) -> Response:
        """Answers once AT_ONCE requests wait."""
        self.waiting += 1
        async with asyncio.timeout(400):
            while self.waiting < AT_ONCE:
                await asyncio.sleep(0.01)
        return JSONResponse({"waited": len(await request.body())})

    async def _events(self, head: dict[str, Any]) -> AsyncIterator[bytes]:
        for word in WORDS:
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            event = {**head, "object": "chat.completion.chunk", "choices": [choice]}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


@dataclass
class Running:
    engine: Engine
    front: Program
    folder: Path
    urls: dict[str, str]
    proxies: list[Program]
    engine_url: str

    def client(self, quiet: str = "") -> OpenAI:
        return OpenAI(base_url=f"{self.urls[quiet]}/v1", api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder, engine = tmp_path_factory.mktemp("plain"), Engine()
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", engine.chat, methods=["POST"]),
            Route("/v1/completions", engine.together, methods=["POST"]),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    engine_url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    authority = Authority(folder)
    certificate, key = authority.issued("server")
    with ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)
        serve = ("serve", "--attested", "--software", "--cert", certificate, "--tls-key", key, "--port", 0)
        front = stack.enter_context(command(folder, "serve", *serve, "--in-front-of", engine_url))
        policy = folder / "policy.toml"
        port = int(front.listening().rpartition(":")[2])
        policy.write_text(f'version = 1\nserver = "https://localhost:{port}"\nkinds = ["software"]\n')
        proxy = ("proxy", "--attested", policy, "--certificate", authority.file, "--open", "--port", 0)
        started = {
            quiet: stack.enter_context(command(folder, f"proxy{quiet}", *proxy, *(("--quiet", quiet) if quiet else ())))
            for quiet in ("", "whole", "slots")
        }
        urls = {quiet: one.listening() for quiet, one in started.items()}
        yield Running(engine, front, folder, urls, [*started.values()], engine_url)


@pytest.mark.parametrize("quiet", ["", "whole", "slots"])
def test_openais_client_chats_streams_calls_tools_and_gets_errors(running: Running, quiet: str) -> None:
    with running.client(quiet) as client:
        whole = client.chat.completions.create(model="m", messages=MESSAGES)
        assert whole.choices[0].message.content == "".join(WORDS)
        parts = [*client.chat.completions.create(model="m", messages=MESSAGES, stream=True)]
        assert [one.choices[0].delta.content for one in parts] == WORDS
        called = client.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS).choices[0].message
        assert called.tool_calls and called.tool_calls[0].to_dict()["function"] == CALL["function"]
        with pytest.raises(openai.NotFoundError, match="no such model"):
            client.chat.completions.create(model="other", messages=MESSAGES)
    body, headers = running.engine.asked[-1]
    assert body == {"model": "other", "messages": MESSAGES}, "the text reaches the engine as it is"
    assert "authorization" not in headers and "openai" not in json.dumps(headers).lower(), headers


@pytest.mark.parametrize(("quiet", "size"), [("whole", PAD_BYTES), ("slots", SLOT_BYTES)])
def test_a_quiet_answer_has_one_size_and_every_answer_says_not_attested(
    running: Running, quiet: str, size: int
) -> None:
    for words in ({}, {"stream": True}):
        body = {"model": "m", "messages": MESSAGES, **words}
        answer = httpx2.post(f"{running.urls[quiet]}/v1/chat/completions", json=body, timeout=60)
        assert answer.headers[STATE_HEADER] == "NOT ATTESTED"
        assert len(answer.content) % (size if words or quiet == "whole" else PAD_BYTES) == 0
    for path in ("/metrics", "/v1/files"):
        refused = httpx2.get(f"{running.urls['']}{path}", timeout=60)
        assert refused.status_code == 404 and refused.headers[STATE_HEADER] == "NOT ATTESTED"


def test_every_line_that_names_an_address_of_the_stand_in_says_not_attested(running: Running) -> None:
    for program in (running.front, *running.proxies):
        lines = [line for line in program.said.splitlines() if "listening on" in line]
        assert lines and all("NOT ATTESTED" in line for line in lines), lines


def test_many_requests_are_with_the_engine_at_once(running: Running) -> None:
    """No hop holds a request back: the engine answers the first when the last has come."""

    async def work() -> list[int]:
        limits = httpx2.Limits(max_connections=AT_ONCE)
        async with httpx2.AsyncClient(timeout=500, limits=limits) as client:
            url, body = f"{running.urls['']}/v1/completions", {"model": "m", "prompt": TEXT}
            answers = await asyncio.gather(*(client.post(url, json=body) for _ in range(AT_ONCE)))
            return [one.status_code for one in answers]

    assert asyncio.run(work()) == [200] * AT_ONCE


def test_where_the_policy_does_not_hold_no_request_leaves(running: Running) -> None:
    """The policy does not take software: each request fails before it is sent, and the answer names the reason."""
    strict = running.folder / "strict.toml"
    strict.write_text((running.folder / "policy.toml").read_text().replace('kinds = ["software"]', "[tdx]"))
    asked = len(running.engine.asked)
    words = ("proxy", "--attested", strict, "--certificate", running.folder / "authority.pem", "--open", "--port", 0)
    with command(running.folder, "strict", *words) as proxy:
        body = {"model": "m", "messages": MESSAGES}
        answer = httpx2.post(f"{proxy.listening()}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 502 and "no section for software" in answer.json()["error"]["message"]
        assert answer.headers[STATE_HEADER] == OWN_ANSWER, "nothing was attested, and the proxy speaks for itself"
        missing = httpx2.get(f"{proxy.listening()}/metrics", timeout=60)
        assert missing.status_code == 404 and missing.headers[STATE_HEADER] == OWN_ANSWER
    assert len(running.engine.asked) == asked and TEXT not in proxy.said and TEXT not in running.front.said


def test_an_option_that_would_have_no_effect_is_refused_at_the_start(running: Running) -> None:
    policy = (running.folder / "policy.toml").read_text()
    for form in ("tinfoil", "aci"):
        (running.folder / f"{form}.toml").write_text(policy.replace("kinds", f'evidence = "{form}"\nkinds'))
        for quiet in ("whole", "slots"):
            found = call("proxy", "--attested", running.folder / f"{form}.toml", "--open", "--quiet", quiet)
            assert found.exit_code == 2 and "--quiet" in found.output and form in found.output
    words = ("proxy", "--attested", running.folder / "policy.toml", "--open")
    for option in (("--server", "https://another.example"), ("--engine", "vllm"), ("--allow-http",),
                   ("--passphrase-file", running.folder / "policy.toml")):  # fmt: skip
        found = call(*words, *option)
        assert found.exit_code == 2 and option[0] in found.output, found.output


def test_a_server_with_a_token_is_used_with_it_alone(running: Running, tmp_path: Path) -> None:
    token, short = tmp_path / "token", tmp_path / "short"
    token.write_text("0123456789abcdef\n")
    short.write_text("0123456789abcde\n")
    authority = Authority(tmp_path)
    certificate, key = authority.issued("server")
    serve = ("serve", "--attested", "--software", "--cert", certificate, "--tls-key", key, "--port", 0)
    found = call(*serve, "--token-file", short)
    assert found.exit_code == 2 and "16 characters" in found.output
    serve = (*serve, "--in-front-of", running.engine_url, "--token-file", token)
    with command(tmp_path, "serve", *serve) as front:
        url = front.listening().replace("127.0.0.1", "localhost")
        (tmp_path / "policy.toml").write_text(f'version = 1\nserver = "{url}"\nkinds = ["software"]\n')
        proxy = (
            "proxy",
            "--attested",
            tmp_path / "policy.toml",
            "--certificate",
            authority.file,
            "--open",
            "--port",
            0,
        )
        with (
            command(tmp_path, "with", *proxy, "--token-file", token) as admitted,
            command(tmp_path, "without", *proxy) as refused,
        ):
            for program, status in ((admitted, 200), (refused, 401)):
                body = {"model": "m", "messages": MESSAGES}
                answer = httpx2.post(f"{program.listening()}/v1/chat/completions", json=body, timeout=60)
                assert answer.status_code == status and answer.json()
        assert "0123456789abcdef" not in front.said + admitted.said


@pytest.mark.parametrize("attested", ["by policy", "NOT ATTESTED"])
def test_the_header_is_of_the_servers_answers_and_errors_are_the_proxys_own(attested: str) -> None:
    header = attestation_header(attested)
    own = attested if attested == "NOT ATTESTED" else OWN_ANSWER
    assert header("/v1/models", 200) == {STATE_HEADER: attested}
    for path, status in (("/v1/models", 401), ("/v1/chat/completions", 502), ("/", 200), ("/health", 200)):
        assert header(path, status) == {STATE_HEADER: own}


@pytest.mark.parametrize("quiet", ["whole", "slots"])
def test_every_request_of_a_quiet_proxy_is_padded(quiet: Any) -> None:
    sent = list[tuple[str, str, int]]()

    class Channel:
        policy = SimpleNamespace(evidence="milkglass", server="https://localhost")

        async def send(self, method: str, path: str, headers: Any, body: bytes) -> httpx2.Response:
            sent.append((method, headers[QUIET_HEADER], len(body)))
            return httpx2.Response(200, stream=httpx2.ByteStream(b"{}"))

    async def work() -> None:
        channel: Any = Channel()
        app = AttestedProxy(channel, None, None, quiet, "by policy", Limits()).app()
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as one:
            await one.get("/v1/models")
            for size in (0, 1, PAD_BYTES, PAD_BYTES + 1):
                await one.post("/v1/embeddings", content=b"x" * size)

    asyncio.run(work())
    assert sent == [("GET", quiet, PAD_BYTES), *(("POST", quiet, n * PAD_BYTES) for n in (1, 1, 1, 2))]


def test_an_answer_of_the_server_keeps_its_header_also_where_it_is_an_error() -> None:
    """The engine's 404 came over the attested channel; the proxy's 401 did not."""

    class Channel:
        policy = SimpleNamespace(evidence="milkglass", server="https://localhost")

        async def send(self, *_: Any) -> httpx2.Response:
            return httpx2.Response(404, stream=httpx2.ByteStream(b'{"error": {}}'))

    async def work() -> None:
        channel: Any = Channel()
        app = AttestedProxy(channel, "the-token", None, None, "by policy", Limits()).app()
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as one:
            for token, status, state in (("the-token", 404, "by policy"), ("wrong", 401, OWN_ANSWER)):
                answer = await one.get("/v1/models", headers={"Authorization": f"Bearer {token}"})
                assert answer.status_code == status and answer.headers.get_list(STATE_HEADER) == [state]

    asyncio.run(work())

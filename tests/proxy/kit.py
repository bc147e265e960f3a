"""A proxy on a loopback port, its engine behind it, and every byte between the two."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.engines.milkglass import MilkglassServer
from milkglass.engines.upstream import Timeouts, Upstream
from milkglass.models.checkpoint import Checkpoint
from milkglass.proxy.app import create_app
from milkglass.proxy.backend import Backends, connect_backend
from milkglass.proxy.run import DEFAULT_LIMITS, Page, ProxyAddress
from milkglass.schemes.permuted import Permuted
from milkglass.schemes.scheme import Scheme
from milkglass.server.process import WebServer, listen
from milkglass.server.settings import Limits
from tests import tiny
from tests.e2e.proxy import Tap
from tests.engines.kit import Script, Wire, event, wire
from tests.server.kit import TOKEN, register, until
from tests.server.real import Server

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 128}]}
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }} <tool_call>{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@dataclass(frozen=True)
class Scrambled:
    """A tiny model, plain and scrambled."""

    plain: Path
    folder: Path
    key: Key
    codec: Codec

    @classmethod
    def of(
        cls, root: Path, name: str = "llama-untied", template: str = TEMPLATE, scheme: Scheme | None = None
    ) -> Scrambled:
        plain = tiny.save(name, root / "plain")
        if template:
            (plain / "chat_template.jinja").write_text(template, "utf-8")
        base = Checkpoint.open(plain)
        key = new_key(base, str(plain), scheme or Permuted(), base.digest())
        scramble(base, key, root / "scrambled")
        return cls(plain, root / "scrambled", key, Codec.open(key, plain))


@dataclass(frozen=True)
class Endpoint:
    """A proxy that runs.

    Attributes:
        url: what an application takes for OpenAI's.
        heard: every byte that crossed between proxy and engine, where a tap is between them.
    """

    url: str
    heard: bytearray

    def client(self, **more: Any) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, **more)


@contextmanager
def proxying(
    codec: Codec,
    upstream: Callable[[], Upstream],
    page: Page | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **more: Any,
) -> Iterator[str]:
    """The proxy's address. page: beside OpenAI's addresses. limits: of connections. more: of `create_app`."""
    address = ProxyAddress(connections=limits)
    listener = listen(address, limits)
    state: dict[str, Any] = {}

    async def main() -> None:
        behind = upstream()
        try:
            backend, _ = await connect_backend(codec, behind, (), None if page is None else page.observer)
        except BaseException:
            await behind.close()
            raise
        async with nullcontext() if page is None else page.running(backend) as routes:
            app = create_app(Backends([backend]), page=routes, limits=limits, **more)
            state["server"] = WebServer(app, address, limits)
            await state["server"].serve(sockets=[listener])

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001  (shown where the test waits)
            state["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    try:
        until(lambda: "error" in state or ("server" in state and state["server"].started))
        if "error" in state:
            raise state["error"]
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        if "server" in state:
            state["server"].should_exit = True
        thread.join(60)
        listener.close()


def written(model: Scrambled, count: int = 1) -> bytes:
    """An event with so many letters. The key is drawn anew, and a fixed id may stand for a token without text."""
    (letter,) = model.codec.tokenizer("a", add_special_tokens=False)["input_ids"]
    return event([int(model.codec.sigma[letter])] * count)


@asynccontextmanager
async def listing(answer: Script) -> AsyncIterator[Wire]:
    """An engine that lists its model, and answers anything else by the script."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.calls[-1][0].startswith("GET"):
            body = json.dumps(MODELS).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
            writer.close()
        else:
            await answer(reader, writer)

    async with wire(script) as server:
        yield server


@contextmanager
def behind_our_server(model: Scrambled, home: Path, **more: Any) -> Iterator[Endpoint]:
    """With Milkglass's own server as the engine."""
    with Server(home, in_thread=True) as server, server.client() as client:
        register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        with Tap(server.url) as tap:

            def upstream() -> Upstream:
                return Upstream(MilkglassServer(), tap.url, TOKEN, timeouts=Timeouts(begin=120.0))

            with proxying(model.codec, upstream, **more) as url:
                yield Endpoint(url, tap.heard)

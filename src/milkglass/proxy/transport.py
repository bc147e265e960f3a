"""Runs the proxy in the application's process, without a port, behind HTTP clients for OpenAI's packages.

    OpenAI(
        http_client=milkglass.http_client("clinic.mgkey", passphrase, "https://gpu.example:8000"),
        base_url=milkglass.NOWHERE, api_key="any",
    )

Whatever address such a client is given, no text of an HTTP request leaves: engines/upstream.py sends the engine ids and
the options of `IdsRequest`, such as the model's name and the temperature. OpenAI's calls over WebSockets
(`responses.connect`, `realtime`) use no HTTP client: they go to `base_url`, in plain text. At NOWHERE no one listens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from starlette.types import ASGIApp, Message, Scope

from milkglass.client.codec.codec import Codec, codec_of
from milkglass.client.key.file import UnlockedKey
from milkglass.engines.catalogue import ENGINES
from milkglass.engines.upstream import Upstream
from milkglass.errors import MilkglassError
from milkglass.progress import Log, no_log
from milkglass.proxy import refusals
from milkglass.proxy.app import create_app
from milkglass.proxy.backend import ServedKey, connect_backends
from milkglass.proxy.observe import UsageCount

DROPPED_HEADERS = frozenset({b"host", b"origin", b"authorization"})  # of the application's request: not passed on
T = TypeVar("T")
NOWHERE = "http://127.0.0.1:9/v1"  # the port "discard", which only root can open


class _InProcessExchange:
    """Passes one request to an ASGI application without a connection, and reads the answer as it arrives."""

    def __init__(self, app: ASGIApp, request: httpx2.Request, body: bytes) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=64)
        self._closed, self._body, self._is_sent, self._is_ended = asyncio.Event(), body, False, False
        self._read_timeout: float | None = (request.extensions.get("timeout") or {}).get("read")
        headers = [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in DROPPED_HEADERS]
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
            "headers": [*headers, (b"host", b"127.0.0.1")], "scheme": "http", "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0], "query_string": request.url.query, "root_path": "",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 0),
        }  # fmt: skip
        self._task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._messages.put)
        finally:
            await self._messages.put(None)

    async def _receive(self) -> Message:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def begin(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Waits for the answer's beginning, and returns status and headers. Raises RemoteProtocolError without one."""
        message = await self._next()
        if message is None:
            raise httpx2.RemoteProtocolError("the proxy gave no answer")
        return int(message["status"]), list(message["headers"])

    async def next_part(self) -> bytes | None:
        """Returns the next part of the body, or None at its end. Raises RemoteProtocolError if it breaks off."""
        if self._is_ended:
            return None
        message = await self._next()
        if message is None:
            raise httpx2.RemoteProtocolError("the answer broke off")
        self._is_ended = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def _next(self) -> Message | None:
        try:
            async with asyncio.timeout(self._read_timeout):
                return await self._messages.get()
        except TimeoutError:
            raise httpx2.ReadTimeout(f"no answer within {self._read_timeout:g} s") from None

    async def close(self) -> None:
        """Ends the exchange, and waits until the application has ended."""
        self._closed.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def http_client(
    key: Path | str, passphrase: str, server: str, token: str | None = None, **options: Any
) -> httpx2.Client:
    """Returns an HTTP client for `OpenAI(http_client=..., base_url=NOWHERE)`: the proxy answers it in this process.

    Args:
        key: the key file, or that of a codec.
        passphrase: opens the key file.
        server: the engine's address.
        token: what the engine asks for as an API key. None: nothing.
        options: engine ("milkglass", "vllm", "sglang" or "llamacpp"), models (names at the engine), model (where the
            original is now), certificate, allow_http, notice; see `Session.open`.

    Raises:
        KeyFileError: the key cannot be opened.
        ModelError: the model cannot be opened. The engine's errors appear with the first request.
    """
    return httpx2.Client(transport=_InProcessTransport(_LocalProxy.open(key, passphrase, server, token, **options)))


def async_http_client(
    key: Path | str, passphrase: str, server: str, token: str | None = None, **options: Any
) -> httpx2.AsyncClient:
    """Returns an HTTP client for `AsyncOpenAI(http_client=...)`. See `http_client`."""
    return httpx2.AsyncClient(
        transport=_AsyncInProcessTransport(_LocalProxy.open(key, passphrase, server, token, **options))
    )


@dataclass
class _LocalProxy:
    """Makes the proxy's application when the first request comes, in the event loop that answers requests."""

    unlocked: UnlockedKey
    codec: Codec
    upstream: Upstream
    models: tuple[str, ...]
    notice: Log
    _app: ASGIApp | None = None
    _resources: AsyncExitStack = field(default_factory=AsyncExitStack)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def open(
        cls,
        key: Path | str,
        passphrase: str,
        server: str,
        token: str | None,
        engine: str = "milkglass",
        models: tuple[str, ...] = (),
        model: str | None = None,
        certificate: Path | None = None,
        allow_http: bool = False,
        notice: Log = no_log,
    ) -> _LocalProxy:
        """Opens the key and the codec. See `http_client` for the arguments and errors."""
        upstream = Upstream(ENGINES[engine], server, token, allow_http, certificate)
        unlocked = UnlockedKey.open(Path(key), passphrase)
        return cls(unlocked, codec_of(unlocked, model), upstream, tuple(models), notice)

    async def app(self) -> ASGIApp:
        """Returns the application. Raises what `connect_backends` raises."""
        async with self._lock:
            if self._app is None:
                counter = UsageCount(self.unlocked, self.notice)
                key = ServedKey(self.unlocked.path.name, self.codec, self.unlocked.key.info, counter)
                backends, warnings = await connect_backends(self.upstream, [key], self.models)
                for line in backends.notices(warnings):
                    self.notice(line)
                await self._resources.enter_async_context(counter.running())
                self._app = create_app(backends)
            return self._app

    async def close(self) -> None:
        """Writes the counts, and closes the connections to the engine."""
        await self._resources.aclose()
        await self.upstream.close()


def _refusal(error: MilkglassError) -> httpx2.Response:
    """Returns the response for an error of the start, such as an engine that cannot be reached."""
    gateway_error = refusals.as_gateway_error(error)
    return httpx2.Response(gateway_error.status, json=refusals.error_document(gateway_error))


async def _begin_exchange(
    proxy: _LocalProxy, request: httpx2.Request, body: bytes
) -> tuple[_InProcessExchange, int, list[tuple[bytes, bytes]]]:
    """Begins an exchange. If that is cancelled, the request ends."""
    exchange = _InProcessExchange(await proxy.app(), request, body)
    try:
        return exchange, *await exchange.begin()
    except BaseException:
        await exchange.close()
        raise


class _AsyncInProcessTransport(httpx2.AsyncBaseTransport):
    """Answers requests in the caller's event loop."""

    def __init__(self, proxy: _LocalProxy) -> None:
        self._proxy = proxy

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        try:
            exchange, status, headers = await _begin_exchange(self._proxy, request, body)
        except MilkglassError as error:
            return _refusal(error)
        return httpx2.Response(status, headers=headers, stream=_AsyncBodyStream(exchange))

    async def aclose(self) -> None:
        await self._proxy.close()


@dataclass(frozen=True)
class _AsyncBodyStream(httpx2.AsyncByteStream):
    """Yields the body of an answer; closing it ends the exchange."""

    exchange: _InProcessExchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (part := await self.exchange.next_part()) is not None:
            yield part

    async def aclose(self) -> None:
        await self.exchange.close()


class _InProcessTransport(httpx2.BaseTransport):
    """Answers requests in an event loop, which runs in a thread of its own until the transport is closed."""

    def __init__(self, proxy: _LocalProxy) -> None:
        self._proxy, self._loop = proxy, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="milkglass-transport", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work in the event loop, and returns its result. Raises what the work raises."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # an interruption, too, ends what was begun
            future.cancel()
            raise

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            exchange, status, headers = self.call(_begin_exchange(self._proxy, request, request.read()))
        except MilkglassError as error:
            return _refusal(error)
        return httpx2.Response(status, headers=headers, stream=_BodyStream(self, exchange))

    def close(self) -> None:
        if self._loop.is_running():
            self.call(self._proxy.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


@dataclass(frozen=True)
class _BodyStream(httpx2.SyncByteStream):
    """Yields the body of an answer; closing it ends the exchange."""

    transport: _InProcessTransport
    exchange: _InProcessExchange

    def __iter__(self) -> Iterator[bytes]:
        while (part := self.transport.call(self.exchange.next_part())) is not None:
            yield part

    def close(self) -> None:
        self.transport.call(self.exchange.close())

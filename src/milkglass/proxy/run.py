"""Runs the proxy as a process: connects, listens, and counts what is sent under the key, until it is asked to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import UnlockedKey
from milkglass.engines.upstream import Upstream
from milkglass.progress import Log, no_log
from milkglass.proxy.app import PageRoutes, create_app
from milkglass.proxy.backend import Backend, Backends, ServedKey, connect_backends
from milkglass.proxy.observe import Observer, Observers, UsageCount
from milkglass.server import logs
from milkglass.server.process import DRAIN_SECONDS, WebServer, allowed_limits, listen, url_of
from milkglass.server.settings import Limits

DEFAULT_LIMITS = Limits(total=2048, per_address=1024)  # one program may send a thousand requests at a time


@dataclass(frozen=True)
class ProxyAddress:
    """Holds where a proxy listens, whom it answers, and within which limits.

    Attributes:
        host: the name or address of the interface to listen on.
        port: 0 takes any free port.
        token: the API key. None: any key is accepted, from this machine only.
        tls_certificate: a PEM file. None: the proxy speaks plain HTTP.
        tls_key: the certificate's key.
        connections: limits of connections and requests.
        attested: the value of STATE_HEADER in an attested server's answers. None: there is no such header.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = field(default=None, repr=False)
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    connections: Limits = DEFAULT_LIMITS
    attested: str | None = None


class Page(Protocol):
    """Serves a page beside OpenAI's addresses."""

    @property
    def observer(self) -> Observer:
        """Returns the observer that receives all ids that are sent and received."""

    def running(self, backend: Backend) -> AbstractAsyncContextManager[PageRoutes]:
        """Returns a context that runs what the page needs, and yields the page's addresses."""


def run(
    keys: Sequence[tuple[UnlockedKey, Codec]],
    upstream: Upstream,
    requested_models: Sequence[str],
    address: ProxyAddress,
    on_ready: Callable[[str, list[str]], None],
    notice: Log,
    page: Page | None = None,
    key_of_model: Mapping[str, UnlockedKey] | None = None,
) -> None:
    """Runs the proxy until SIGINT or SIGTERM.

    Args:
        keys: the keys, each with its codec.
        upstream: sends requests to the engine, and is closed at the end.
        requested_models: the names of the models to serve. Empty: all that the engine serves for these keys.
        address: where the proxy listens.
        on_ready: receives the proxy's URL and the models' names once connections are accepted.
        notice: receives lines for the user.
        page: shows what is sent and received under the only key. None: there is no page.
        key_of_model: the key of each model for which the user named one. None: the user named none.

    Raises:
        UsageError: the address cannot be used. See `connect_backends` for the rest.
    """
    logs.configure(logging.WARNING)
    limits = allowed_limits(address)
    listener = listen(address, limits)
    counters = [UsageCount(unlocked, notice) for unlocked, _ in keys]

    async def run_proxy() -> None:
        observers = [counter if page is None else Observers((counter, page.observer)) for counter in counters]
        served_keys = [
            ServedKey(unlocked.path.name, codec, unlocked.key.info, observer)
            for (unlocked, codec), observer in zip(keys, observers, strict=True)
        ]
        key_by_path = {unlocked.path: key for (unlocked, _), key in zip(keys, served_keys, strict=True)}
        key_by_model = {name: key_by_path[unlocked.path] for name, unlocked in (key_of_model or {}).items()}
        try:
            backends, warnings = await connect_backends(upstream, served_keys, requested_models, key_by_model)
        except BaseException:
            await upstream.close()
            raise
        for warning_text in backends.notices(warnings):
            notice(warning_text)
        names = [model.name for model in backends.models]
        async with AsyncExitStack() as running:
            for counter in counters:
                await running.enter_async_context(counter.running())
            routes = None if page is None else await running.enter_async_context(page.running(backends.backends[0]))
            await serve(backends, listener, address, limits, lambda url: on_ready(url, names), routes, notice)

    try:
        asyncio.run(run_proxy())
    finally:
        listener.close()


async def serve(
    backends: Backends,
    listener: socket.socket,
    address: ProxyAddress,
    limits: Limits,
    on_ready: Callable[[str], None] = lambda url: None,
    page: PageRoutes | None = None,
    notice: Log = no_log,
) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        backends: the models that are served.
        listener: the socket that listens.
        address: where the proxy listens.
        limits: limits of connections and requests.
        on_ready: receives the proxy's URL once connections are accepted.
        page: the addresses of a page. None: there is no page.
        notice: receives lines for the user.
    """
    app, url = create_app(backends, address.token, page, limits, address.attested), url_of(listener, address)
    gc.collect()
    gc.freeze()  # so that the libraries' objects are not collected again and again while answers are running
    loop = asyncio.get_running_loop()

    def announce_stop() -> None:
        if not server.should_exit and (unfinished := len(server.server_state.tasks)):
            requests = "1 request" if unfinished == 1 else f"{unfinished} requests"
            loop.call_soon_threadsafe(
                notice, f"finishing {requests}, {DRAIN_SECONDS} s at most; Ctrl-C again ends them"
            )

    server = WebServer(app, address, limits, announce_stop, on_ready=lambda: on_ready(url))
    await server.serve(sockets=[listener])

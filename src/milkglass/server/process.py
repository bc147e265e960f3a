"""A web server as a process: it listens, limits its connections, and logs.

`serve`, `split serve`, `proxy` and `ui` use it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from milkglass.errors import UsageError
from milkglass.server import logs
from milkglass.server.connections import Acceptor, ServerConnection
from milkglass.server.settings import Limits
from milkglass.system import is_loopback

log = logging.getLogger("milkglass.server")
PASSPHRASE_VARIABLE = "MILKGLASS_PASSPHRASE"  # the client's variable
DRAIN_SECONDS = 5  # seconds that open requests get when the server stops
MAX_OPEN_FILES = 65_536  # the limit of open files that is asked for; with a smaller one there are fewer connections
START_FAILED_EXIT_CODE = 3  # exit code where the application does not start


class ListenSettings(Protocol):
    """Says where and how a server listens. Port 0 is any free one; without a TLS certificate it speaks plain HTTP."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def tls_certificate(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def connections(self) -> Limits: ...


class WebServer(uvicorn.Server):
    """Runs uvicorn's server with `ServerConnection`s, which have limits and deadlines."""

    def __init__(
        self,
        app: Starlette,
        settings: ListenSettings,
        limits: Limits,
        on_stop: Callable[[], None] = lambda: None,
        max_message_bytes: int = 0,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Sets the server up; `run` starts it.

        Args:
            app: the application.
            settings: the certificate is taken from them. The socket is given to `run`.
            limits: limits of connections.
            on_stop: called when SIGINT or SIGTERM arrives, before open requests are ended.
            max_message_bytes: the largest WebSocket message. 0: there are no WebSockets.
            on_ready: called once connections are accepted.
        """
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,  # the guard has its own, without names
                ws="websockets-sansio" if max_message_bytes else "none",
                ws_max_size=max_message_bytes,
                ws_per_message_deflate=False,  # a small message must not become a large one
                server_header=False,
                proxy_headers=False,  # a header must not say from which address a request comes: limits count by it
                timeout_graceful_shutdown=DRAIN_SECONDS,
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
            )
        )
        self.limits, self._on_stop, self._on_ready = limits, on_stop, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application and accepts connections of the one socket in `sockets`."""
        assert sockets is not None and len(sockets) == 1
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(START_FAILED_EXIT_CODE)
        acceptor = Acceptor(sockets[0], self._connection, self.limits, self.config.ssl)
        acceptor.start()
        self.servers = [acceptor]  # type: ignore[list-item]  # of asyncio's servers, uvicorn calls close and wait_closed
        self.started = True
        self._on_ready()

    def _connection(self, on_lost: Callable[[], None]) -> ServerConnection:
        return ServerConnection(self.config, self.server_state, self.lifespan.state, self.limits, on_lost)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shuts down as uvicorn does. After a second Ctrl-C it also ends requests and closes the application."""
        await super().shutdown(sockets)
        if self.force_exit:
            for task in self.server_state.tasks:
                task.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.lifespan.shutdown(), DRAIN_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to shut down, as uvicorn does on SIGINT and SIGTERM, after calling `on_stop`."""
        self._on_stop()
        super().handle_exit(sig, frame)
        del self._captured_signals[1:]  # one is raised again at the end; a second would break off what closes then


def raise_open_files() -> int:
    """Raises this process's limit of open files as far as the system allows, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return target


def prepare() -> None:
    """Prepares this process for a server: no passphrase (else UsageError), no downloads, a log on stderr."""
    if os.environ.get(PASSPHRASE_VARIABLE):  # unsetting it is no help: the kernel shows a process's first environment
        raise UsageError(
            f"{PASSPHRASE_VARIABLE} is set, and the server must not hold a passphrase",
            f"env -u {PASSPHRASE_VARIABLE} milkglass serve ...",
        )
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model that names something on a hub must not make us fetch it
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    logs.configure()


def run(
    app: Starlette,
    settings: ListenSettings,
    command: str,
    on_stop: Callable[[], None] = lambda: None,
    max_message_bytes: int = 0,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGINT or SIGTERM. Raises UsageError if the address cannot be used.

    Args:
        app: the application.
        settings: where and how to listen.
        command: the command in the line that says where the server listens, such as "milkglass serve".
        on_stop: called when SIGINT or SIGTERM arrives.
        max_message_bytes: the largest WebSocket message. 0: there are no WebSockets.
        on_ready: called once connections are accepted, before that line is printed.
    """
    limits = allowed_limits(settings)
    listener = listen(settings, limits)
    if not is_loopback(settings.host) and settings.tls_certificate is None:
        log.warning("listening on %s without TLS: the token can be read on the way", settings.host)
    url = url_of(listener, settings)

    def ready() -> None:
        on_ready()
        print(f"{command}: listening on {url}", flush=True)

    server = WebServer(app, settings, limits, on_stop, max_message_bytes, ready)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        log.info("stopped")
    finally:
        listener.close()


def allowed_limits(settings: ListenSettings) -> Limits:
    """Raises the limit of open files, and returns the limits of connections that it allows."""
    limits = settings.connections.within_open_files(raise_open_files())
    if limits.total < settings.connections.total:
        log.warning("the limit of open files (ulimit -n) allows %d connections at a time", limits.total)
    return limits


def listen(settings: ListenSettings, limits: Limits) -> socket.socket:
    """Returns a socket that listens at the address; no other code of this package opens one.

    Raises UsageError if the system refuses the address.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=limits.backlog)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else "no such address"
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {reason.lower()}", "choose another port; 0 is any"
        ) from error


def url_of(listener: socket.socket, settings: ListenSettings) -> str:
    """Returns the URL of a listening socket, with the port that it really has."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if settings.tls_certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

"""The server: ids in, ids out. It never holds a key, a tokenizer or plain text.

`create_app` makes the web application; `serve` runs it until it is told to stop.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.types import Scope

import milkglass.server.context as contexts
from milkglass.errors import UsageError
from milkglass.loopback import is_loopback
from milkglass.server import answers, routes_files, routes_inference, routes_jobs, routes_models
from milkglass.server.guard import Guard
from milkglass.server.home import Home
from milkglass.server.settings import Settings

log = logging.getLogger("milkglass.server")
PASSPHRASE = "MILKGLASS_PASSPHRASE"  # the client's variable
DRAIN = 5  # seconds that open requests get when the server stops


def create_app(settings: Settings) -> FastAPI:
    """Opens nothing but the token yet: the home is taken when the application starts, and given back when it ends."""
    home = Home(settings.home, settings.spare_disk)
    home.claim()
    token = home.token(settings.token)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        lock = home.lock()
        app.state.context = contexts.build(settings, home)
        yield
        await run_in_threadpool(contexts.close, app.state.context)
        lock.close()

    refusals = {"4XX": {"model": answers.Refusal}, "5XX": {"model": answers.Refusal}}
    app = FastAPI(title="Milkglass", lifespan=lifespan, responses=refusals, docs_url=None, redoc_url=None)  # type: ignore[arg-type]
    for routes in (routes_files, routes_models, routes_jobs, routes_inference):
        app.include_router(routes.router)

    @app.get("/health")
    async def health() -> dict[str, str]:  # async: it answers when all threads are busy
        return {"status": "ok"}

    answers.install(app)
    app.add_middleware(Guard, token=token, limit=lambda scope: body_limit(settings, scope))
    app.state.token = token
    return app


def body_limit(settings: Settings, scope: Scope) -> int:
    path, method = scope["path"], scope["method"]
    chunk = path.startswith("/v1/uploads/") and method == "PUT"
    form = path == "/v1/files" and method == "POST"
    return settings.max_body if chunk or form else settings.max_json


class _Server(uvicorn.Server):
    """Says when it is ready, and tells streams to end as soon as it is asked to stop."""

    def __init__(self, config: uvicorn.Config, ready: str, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._on_stop = ready, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._ready, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_stop()
        super().handle_exit(sig, frame)


def serve(settings: Settings) -> None:
    """Run until SIGINT or SIGTERM. Raises UsageError when the address cannot be had, Conflict when the home cannot."""
    prepare()
    Home(settings.home, settings.spare_disk).lock().close()  # say so before anything else, not in a traceback
    app = create_app(settings)
    run(app, settings, "milkglass serve", lambda: _stop_streams(app))


def prepare() -> None:
    """Before a server of any kind: no passphrase, nothing fetched, a log on stderr. Raises UsageError."""
    if os.environ.get(PASSPHRASE):  # taking it out would not help: the kernel shows what a process was started with
        raise UsageError(
            f"{PASSPHRASE} is set, and the server must not hold a passphrase",
            f"env -u {PASSPHRASE} milkglass serve ...",
        )
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model that names something on a hub must not make us fetch it
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")


def run(app: FastAPI, settings: Settings, command: str, on_stop: Callable[[], None] = lambda: None) -> None:
    """Until SIGINT or SIGTERM. command: who says on stdout where it listens, when it does. Of the settings the address
    and the certificate count. Raises UsageError when the address cannot be had."""
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    if not is_loopback(host) and settings.tls_certificate is None:
        log.warning("listening on %s without TLS: the token can be read on the way", host)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,  # the guard has its own, without names
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=DRAIN,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
    )
    shown = f"[{host}]" if ":" in host else host
    server = _Server(config, f"{command}: listening on {settings.scheme}://{shown}:{port}", on_stop)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        log.info("stopped")
    finally:
        listener.close()


def _stop_streams(app: FastAPI) -> None:
    if hasattr(app.state, "context"):
        app.state.context.stopping.set()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else "no such address"
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {why.lower()}", "choose another port; 0 is any"
        ) from error

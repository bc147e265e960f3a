"""Makes the server's web application (`create_app`) and runs it until it is asked to stop (`serve`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.types import Scope

import milkglass.server.context as contexts
from milkglass.server.http import routes_files, routes_inference, routes_jobs, routes_models
from milkglass.server.http.errors import web_app
from milkglass.server.http.guard import BodyRule, Guard
from milkglass.server.process import prepare, run
from milkglass.server.settings import HomeFolder, ServerSettings


def create_app(settings: ServerSettings) -> FastAPI:
    """Makes the home, reads or makes its token, and returns the application, which locks the home while it runs."""
    home = HomeFolder(settings.home, settings.spare_disk, settings.quota)
    home.claim()
    token = home.token(settings.token)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        lock = home.lock()
        app.state.context = contexts.build_context(settings, home)
        yield
        await run_in_threadpool(contexts.close_context, app.state.context)
        lock.close()

    app = web_app("Milkglass", lifespan)
    for routes in (routes_files, routes_models, routes_jobs, routes_inference):
        app.include_router(routes.router)

    app.add_middleware(
        Guard,
        token=token,
        rule_of=lambda scope: body_rule(settings, scope),
        max_held_bytes=settings.max_held,
        limits=settings.connections,
    )
    app.state.token = token
    return app


def body_rule(settings: ServerSettings, scope: Scope) -> BodyRule:
    """Returns how large the body of a request may be, and whether the application keeps it in memory."""
    path, method = scope["path"], scope["method"]
    is_chunk = path.startswith("/v1/uploads/") and method == "PUT"
    is_form = path == "/v1/files" and method == "POST"
    if is_chunk or is_form:
        return BodyRule(settings.max_body, in_memory=False)  # both go to the disk as they come
    return BodyRule(settings.max_json, in_memory=True)


def serve(settings: ServerSettings, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGINT or SIGTERM. `on_ready` is called once connections are accepted.

    Raises:
        UsageError: the address cannot be used.
        Conflict: another server uses the home.
    """
    prepare()
    HomeFolder(settings.home, settings.spare_disk).lock().close()  # a home in use is reported first, not in a traceback
    app = create_app(settings)
    run(app, settings, "milkglass serve", lambda: _stop_streams(app), on_ready=on_ready)


def _stop_streams(app: FastAPI) -> None:
    if hasattr(app.state, "context"):
        app.state.context.stopping.set()

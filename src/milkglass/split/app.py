"""The split server over HTTP: `GET /v1/split` describes it, `POST /v1/split` answers one frame with logits.

Requests are checked as on the main server (server/http/auth.py): bearer token, body limit, no content in the log. A
frame (hidden_states/frames.py) comes in and numbers go out: no text, no ids, no pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool

from milkglass.errors import Busy
from milkglass.server.connections.process import prepare, run
from milkglass.server.http.auth import Guard
from milkglass.server.http.bodies import BodyRule
from milkglass.server.http.errors import web_app
from milkglass.server.http.strict_json import StrictRoute
from milkglass.server.settings import DataDir, Limits, ServerSettings
from milkglass.split.server import ServerHalf
from milkglass.split.spec import PATH

MAX_WAITING = 16  # frames that have arrived and are not answered
HELD = 4  # limit on the bytes of frames in memory, as a multiple of the longest body


def create_app(half: ServerHalf, token: str) -> FastAPI:
    app, most = web_app("Milkglass split"), half.info.max_body
    app.include_router(_routes(half))
    app.add_middleware(
        Guard,
        token=token,
        rule=lambda scope: BodyRule(most if scope["method"] == "POST" and scope["path"] == PATH else 0),
        held=HELD * most,
        limits=Limits(),
    )
    return app


def _routes(half: ServerHalf) -> APIRouter:
    router = APIRouter(route_class=StrictRoute)
    waiting = 0

    @router.get(PATH)
    async def info() -> dict[str, Any]:
        return half.info.document()

    @router.post(PATH)
    async def answer(request: Request) -> dict[str, Any]:
        nonlocal waiting  # one event loop counts
        frame = await request.body()  # first: a body that arrives slowly must not take a place
        if waiting >= MAX_WAITING:
            raise Busy(f"{waiting} frames wait already, at most {MAX_WAITING} may", "send it again later")
        waiting += 1
        try:
            logits = await run_in_threadpool(half.answer, frame)
        finally:
            waiting -= 1
        return {"object": "split.answer", "logits": np.asarray(logits, np.float64).tolist()}

    return router


def opened(folder: Path) -> ServerHalf:
    """Opens the half to serve, and raises this process's limits for serving. Raises UsageError, CorruptCheckpoint."""
    prepare()
    return ServerHalf.open(folder)


def serve(half: ServerHalf, home: Path, port: int, token: str | None) -> None:
    """Serves on 127.0.0.1 until SIGINT or SIGTERM. Raises UsageError if the address cannot be used.

    Args:
        home: the folder whose file `token` is the bearer token. It is not used if `token` is given.
    """
    settings = ServerSettings(home, port=port, token=token)
    run(create_app(half, DataDir(settings.home, settings.spare_disk).token(token)), settings, "milkglass split serve")

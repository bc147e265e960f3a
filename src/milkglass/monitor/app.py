"""The page's addresses, and what runs while it is there.

The page itself is open and shows nothing: what it shows it asks for with the API key, which stands behind the # of its
address, so that no browser sends it along by itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from milkglass.monitor.attacker import LiveAttacker
from milkglass.monitor.exchanges import ExchangeLog
from milkglass.monitor.view import MonitorView
from milkglass.proxy.backend import Backend

WAIT = 20.0  # seconds that a question for news is kept open
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NONCE = "NONCE"  # in the page


@dataclass(frozen=True)
class MonitorPage:
    """What `proxy.run.run` takes as a page.

    Attributes:
        key: the key's file.
        attacker: None where nothing is attacked.
        observer: what crossed.
    """

    key: Path
    attacker: LiveAttacker | None
    observer: ExchangeLog = field(default_factory=ExchangeLog)

    @asynccontextmanager
    async def running(self, backend: Backend) -> AsyncGenerator[APIRouter, None]:
        work = None if self.attacker is None else asyncio.create_task(self.attacker.work(self.observer))
        try:
            yield routes(MonitorView(backend, self.key, self.observer, self.attacker))
        finally:
            if work is not None:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)


def routes(view: MonitorView) -> APIRouter:
    router = APIRouter()
    page = files("milkglass.monitor").joinpath("page.html").read_text("utf-8")

    @router.get("/")
    async def show() -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {
            "Content-Security-Policy": POLICY.format(nonce=nonce),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return Response(page.replace(NONCE, nonce), media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/monitor/state")
    async def state(since: int = 0) -> JSONResponse:
        """The document as soon as it is newer than `since`; the same again after `WAIT` seconds."""
        await view.log.after(since, WAIT)
        return JSONResponse(view.document(since), headers={"Cache-Control": "no-store"})

    return router

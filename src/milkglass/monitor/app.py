"""The page's addresses, and the work that runs while the page is open.

The page itself needs no key and has no data. It requests data with a key of its own, which it gets in exchange for the
code behind the # of its address. Browsers do not send that part to servers.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from milkglass.errors import Unauthorized, UsageError
from milkglass.monitor.attacker import LiveAttacker
from milkglass.monitor.exchanges import ExchangeLog
from milkglass.monitor.view import MonitorView
from milkglass.progress import Log, no_log
from milkglass.proxy import refusals
from milkglass.proxy.app import PageRoutes
from milkglass.proxy.backend import Backend
from milkglass.proxy.guard import OPENING_PATH

NEWS_SECONDS = 20.0  # seconds that a request for news is kept open
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NONCE = "NONCE"  # in the page
CODE_BYTES = 24  # of randomness


def _draw_code() -> str:
    return secrets.token_urlsafe(CODE_BYTES)


@dataclass
class OneTimeCode:
    """Lets a browser into the page: with a code of one use, which it exchanges for a key of its own.

    A browser stores addresses and a tab's storage in its profile. These open nothing later: the code is used up, and
    the page's key ends with the command. The API key never reaches the browser.

    Attributes:
        code: opens the page next, once.
        key: the page's key, until the command ends.
        report_code: receives each new code after the last one was used.
    """

    code: str = field(default_factory=_draw_code, repr=False)
    key: str = field(default_factory=_draw_code, repr=False)
    report_code: Log = field(default=no_log, repr=False)

    def exchange(self, code: str) -> str:
        """Returns the page's key. Raises Unauthorized for a code that is wrong, or was used."""
        if not hmac.compare_digest(code.encode("utf-8", "surrogatepass"), self.code.encode()):
            hint = "open the address that milkglass ui printed last"
            raise Unauthorized("the code of this address is wrong, or was used", hint)
        self.code = _draw_code()
        self.report_code(self.code)
        return self.key


@dataclass(frozen=True)
class MonitorPage:
    """The page, as `proxy.run.run` takes it.

    Attributes:
        attacker: attacks while the page is open. None: nothing is attacked.
        opening: lets a browser in.
    """

    key: Path
    attacker: LiveAttacker | None
    broken: str = ""
    opening: OneTimeCode = field(default_factory=OneTimeCode)
    observer: ExchangeLog = field(default_factory=ExchangeLog)

    @asynccontextmanager
    async def running(self, backend: Backend) -> AsyncGenerator[PageRoutes, None]:
        work = None if self.attacker is None else asyncio.create_task(self.attacker.work(self.observer))
        try:
            view = MonitorView(backend, self.key, self.observer, self.attacker, self.broken)
            yield PageRoutes(routes(view, self.opening), self.opening.key)
        finally:
            if work is not None:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)


class CodeBody(BaseModel):
    """The body of the request that lets a browser in, with the part behind the # of the page's address."""

    model_config = ConfigDict(extra="forbid", strict=True)
    code: str = Field(max_length=100)


def routes(view: MonitorView, opening: OneTimeCode) -> APIRouter:
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

    @router.post(OPENING_PATH)
    async def let_in(request: Request) -> JSONResponse:
        try:
            code = CodeBody.model_validate_json(await request.body()).code
        except ValidationError:
            raise UsageError("the body is not a JSON object with a code", "open the address in a browser") from None
        try:
            key = opening.exchange(code)
        except Unauthorized as error:
            return refusals.respond(error)  # this proxy's own refusal, not the engine's
        return JSONResponse({"key": key}, headers={"Cache-Control": "no-store"})

    @router.get("/monitor/state")
    async def state(since: int = 0) -> Response:
        """Returns the document once it is newer than `since`, or the same again after `NEWS_SECONDS` seconds."""
        await view.log.wait_for_change(since, NEWS_SECONDS)
        document = await view.document(since)
        return Response(document, media_type="application/json", headers={"Cache-Control": "no-store"})

    return router

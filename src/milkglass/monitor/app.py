"""Serves the monitor's page beside a proxy, and runs the page's attacks while the proxy listens.

The page itself needs no key and has no data. It gets data with a key of its own, in exchange for the code in the
fragment of its URL (behind the #). Browsers do not send the fragment to servers.
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
from milkglass.proxy.guard import CODE_EXCHANGE_PATH

MAX_WAIT_SECONDS = 20.0  # the longest time that a request for the state waits for a change
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NONCE_MARK = "NONCE"  # the placeholder in page.html for the nonce of each answer
PAGE_SECRET_BYTES = 24  # random bytes of a code or key


def _draw_secret() -> str:
    """Returns a random code or key, which can stand in an address."""
    return secrets.token_urlsafe(PAGE_SECRET_BYTES)


@dataclass
class PageAccess:
    """Admits browsers to the page: a code that can be used once is exchanged for the page's key.

    A browser stores URLs and a tab's storage in its profile. Neither opens the page later: the code is used up,
    and the key is valid only until the command ends. The API key never reaches the browser.

    Attributes:
        one_time_code: the code that is valid.
        page_key: the page's key.
        report_code: receives each new code, which replaces one that was used.
    """

    one_time_code: str = field(default_factory=_draw_secret, repr=False)
    page_key: str = field(default_factory=_draw_secret, repr=False)
    report_code: Log = field(default=no_log, repr=False)

    def exchange(self, code: str) -> str:
        """Returns the page's key, and replaces the code. Raises Unauthorized for any other code."""
        if not hmac.compare_digest(code.encode("utf-8", "surrogatepass"), self.one_time_code.encode()):
            hint = "open the address that milkglass ui printed last"
            raise Unauthorized("the code of this address is wrong, or was used", hint)
        self.one_time_code = _draw_secret()
        self.report_code(self.one_time_code)
        return self.page_key


@dataclass(frozen=True)
class MonitorPage:
    """Serves a page beside a proxy, and runs the attacks that it shows (`proxy.run.Page`).

    Attributes:
        key_file: the key's file, beside which its usage is recorded.
        attacker: attacks the model and what is sent. None: nothing is attacked.
        broken_reason: why the key's scheme counts as broken; empty if it does not.
        access: admits browsers.
        observer: receives what is sent and received.
    """

    key_file: Path
    attacker: LiveAttacker | None
    broken_reason: str = ""
    access: PageAccess = field(default_factory=PageAccess)
    observer: ExchangeLog = field(default_factory=ExchangeLog)

    @asynccontextmanager
    async def running(self, backend: Backend) -> AsyncGenerator[PageRoutes, None]:
        """Yields the page's routes and its key, and attacks until the context is closed."""
        attack_task = None if self.attacker is None else asyncio.create_task(self.attacker.run(self.observer))
        try:
            view = MonitorView(backend, self.key_file, self.observer, self.attacker, self.broken_reason)
            yield PageRoutes(make_routes(view, self.access), self.access.page_key)
        finally:
            if attack_task is not None:
                attack_task.cancel()
                await asyncio.gather(attack_task, return_exceptions=True)


class CodeBody(BaseModel):
    """Describes the body of the request that admits a browser.

    Attributes:
        code: the fragment of the page's URL.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    code: str = Field(max_length=100)


def make_routes(view: MonitorView, access: PageAccess) -> APIRouter:
    """Returns the routes of the page, of the exchange of a code, and of the page's data."""
    router = APIRouter()
    html = files("milkglass.monitor").joinpath("page.html").read_text("utf-8")

    @router.get("/")
    async def show_page() -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {
            "Content-Security-Policy": CONTENT_SECURITY_POLICY.format(nonce=nonce),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return Response(html.replace(NONCE_MARK, nonce), media_type="text/html; charset=utf-8", headers=headers)

    @router.post(CODE_EXCHANGE_PATH)
    async def exchange_code(request: Request) -> JSONResponse:
        try:
            code = CodeBody.model_validate_json(await request.body()).code
        except ValidationError:
            raise UsageError("the body is not a JSON object with a code", "open the address in a browser") from None
        try:
            key = access.exchange(code)
        except Unauthorized as error:
            return refusals.error_response(error)  # the proxy's own refusal, which must not look like the engine's
        return JSONResponse({"key": key}, headers={"Cache-Control": "no-store"})

    @router.get("/monitor/state")
    async def show_state(since: int = 0) -> Response:
        """Returns the page's data once they are newer than version `since`, or after MAX_WAIT_SECONDS in any case."""
        await view.log.wait_for_change(since, MAX_WAIT_SECONDS)
        document = await view.document(since)
        return Response(document, media_type="application/json", headers={"Cache-Control": "no-store"})

    return router

"""The web application: OpenAI's addresses, on this machine. Nothing but `Backend` reaches the engine.

A page in a browser must not use it: requests with an `Origin`, or for a `Host` that is not this machine, are refused
unless a token is required.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from milkglass.engines.turns import REQUEST
from milkglass.errors import MilkglassError, TooLarge, Unauthorized, UsageError
from milkglass.proxy import refusals
from milkglass.proxy.backends import Backends
from milkglass.proxy.calls.bodies import ChatBody, CompletionBody, EmbeddingBody, ResponseBody
from milkglass.proxy.calls.chat import ChatAnswer
from milkglass.proxy.calls.completions import CompletionAnswer
from milkglass.proxy.calls.embeddings import embedded
from milkglass.proxy.calls.responses import ResponseAnswer
from milkglass.server.connections.logs import place_of
from milkglass.server.http import errors
from milkglass.server.http.streaming import GONE, EventStream, disconnect, event, first
from milkglass.server.http.strict_json import StrictRoute
from milkglass.system import is_loopback

log = logging.getLogger("milkglass.proxy")
B = TypeVar("B", bound=BaseModel)
MAX_BODY = 64 << 20  # bytes of a request
LONG = 64 << 10  # bytes of a request that is encoded in a thread
READER = 600.0  # seconds that a part of an answer waits to be taken: its connection to the engine waits with it
OPENING = "/monitor/open"  # of a page, which gives its key here for a code
OPEN = frozenset({"/", "/health", OPENING})
HOST = re.compile(r":[0-9]*\Z")  # the port, of a Host header


class Answering(Protocol):
    """An answer that was checked, and not yet begun."""

    async def whole(self) -> dict[str, Any]: ...
    def events(self) -> AsyncGenerator[dict[str, Any], None]: ...


@dataclass(frozen=True)
class PageRoutes:
    """A page beside OpenAI's addresses.

    Attributes:
        router: its addresses. "/" and `OPENING` are open, and must show nothing private to anyone without a code.
        token: that the page itself gives, which does as well as the API key.
    """

    router: APIRouter
    token: str = field(repr=False)


def create_app(backends: Backends, token: str | None = None, page: PageRoutes | None = None) -> FastAPI:
    """token: that applications must give as their API key; None: any is taken, from this machine alone."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await backends.close()

    app = FastAPI(title="Milkglass proxy", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.backends = backends
    app.include_router(router)
    if page is not None:
        app.include_router(page.router)
    refusals.install(app)
    app.add_middleware(LocalGuard, token=token, further=None if page is None else page.token)
    return app


class LocalGuard:
    """Lets in this machine's own programs, or anyone with the token; never a page of another site."""

    def __init__(self, app: ASGIApp, token: str | None, further: str | None = None) -> None:
        """token: None: none is needed. further: another one that does as well."""
        known = [] if token is None else [token, *([] if further is None else [further])]
        self._app, self._expected = app, [f"Bearer {one}".encode() for one in known]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        REQUEST.set(object())  # the answers to one request wait for each other
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            begun = True
            try:
                async with asyncio.timeout(READER):
                    await send(message)
            except TimeoutError:
                raise _Unread from None

        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                raise errors.Refused(_too_large())
            return message

        refusal = self._refusal(scope["path"], dict(scope["headers"]))
        try:
            await (self._app if refusal is None else refusals.respond(refusal))(scope, counted, answer)
        except _Unread:
            log.warning("an answer was not read for %g s, and was ended", READER)
        except Exception as error:  # noqa: BLE001  (its message may quote a text)
            log.error("internal error: %s", place_of(error))
            if not begun:
                await errors.internal()(scope, receive, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> MilkglassError | None:
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size[:20]) > MAX_BODY:
            return _too_large()
        if self._expected:
            given = headers.get(b"authorization", b"")
            right = path in OPEN or any(hmac.compare_digest(given, one) for one in self._expected)
            return (
                None
                if right
                else Unauthorized(
                    "the API key is wrong",
                    "it is in the proxy's --api-key-file, or was printed where `milkglass ui` started",
                )
            )
        host = HOST.sub("", headers.get(b"host", b"").decode("latin-1")).strip("[]")
        if is_loopback(host) and b"origin" not in headers:
            return None
        hint = "programs of this machine may ask; for others start the proxy with --api-key-file"
        return Unauthorized("this request comes from a web page, or is for another host", hint)


class _Unread(Exception):
    """Whoever asked takes nothing of the answer."""


def _too_large() -> TooLarge:
    return TooLarge(f"a request has at most {MAX_BODY} bytes", "send less at once")


router = APIRouter(route_class=StrictRoute)


async def _body(request: Request, kind: type[B]) -> B:
    try:
        return kind.model_validate(await request.json())
    except ValidationError as error:
        raise UsageError(*refusals.of_fields(error, kind)) from None


async def _answered(request: Request, make: Callable[[], Answering], stream: bool | None, end: bool = True) -> Response:
    """make: refuses or encodes, in a thread where a long prompt would hold up other answers."""
    long = len(await request.body()) > LONG
    answer = await asyncio.to_thread(make) if long else make()
    if stream:
        return EventStream(_stream(answer, end), lambda: None)
    found = await first(answer.whole(), disconnect(request))
    return GONE if found is None else JSONResponse(found)


async def _stream(answer: Answering, end: bool) -> AsyncGenerator[str, None]:
    """A fault is an event with `error`, which official clients raise."""
    number = 0
    try:
        async with aclosing(answer.events()) as events:  # type: ignore[type-var]
            async for one in events:
                number += 1
                yield event(json.dumps(one, ensure_ascii=False, separators=(",", ":")), None if end else one["type"])
    except Exception as error:  # noqa: BLE001  (its message may quote a text)
        if not isinstance(error, MilkglassError):
            log.error("internal error: %s", place_of(error))
        info = refusals.of_any(error)
        about = info["error"]
        numbered = {"type": "error", "sequence_number": number, "message": about["message"], "code": about["code"]}
        yield event(info) if end else event({**numbered, "param": None, **info}, "error")
    if end:
        yield event("[DONE]")


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [_model(one.name) for one in _backends(request).models]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> JSONResponse:
    return JSONResponse(_model(_backends(request).of(name).model(name).name))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "milkglass"}


def _backends(request: Request) -> Backends:
    backends: Backends = request.app.state.backends
    return backends


@router.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    body = await _body(request, ChatBody)
    return await _answered(request, lambda: ChatAnswer(_backends(request).of(body.model), body), body.stream)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    body = await _body(request, CompletionBody)
    return await _answered(request, lambda: CompletionAnswer(_backends(request).of(body.model), body), body.stream)


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    body = await _body(request, ResponseBody)
    return await _answered(
        request, lambda: ResponseAnswer(_backends(request).of(body.model), body), body.stream, end=False
    )


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    body = await _body(request, EmbeddingBody)
    found = await first(embedded(_backends(request).of(body.model), body), disconnect(request))
    return GONE if found is None else JSONResponse(found)

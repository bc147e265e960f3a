"""The web application with OpenAI's addresses, on this machine.

guard.py decides who may use it. Ids leave by engines/upstream.py, which `Reply` and `Backend` call.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from milkglass.attest.passthrough import HeaderMiddleware
from milkglass.errors import MilkglassError
from milkglass.proxy import refusals
from milkglass.proxy.backend import Backends
from milkglass.proxy.bodies import ChatBody, CompletionBody, EmbeddingBody, ResponseBody
from milkglass.proxy.completions import ChatExchange, CompletionExchange, embed
from milkglass.proxy.guard import LocalGuard, attestation_header
from milkglass.proxy.responses import ResponseExchange
from milkglass.server.http.routing import (
    CLIENT_GONE,
    EventStream,
    StrictRoute,
    result_unless_gone,
    sse_event,
    wait_for_disconnect,
)
from milkglass.server.logs import place_of
from milkglass.server.settings import Limits

log = logging.getLogger("milkglass.proxy")
B = TypeVar("B", bound=BaseModel)


class ApiExchange(Protocol):
    """Answers a request that is checked and encoded. Its methods ask the engine."""

    async def response(self) -> dict[str, Any]:
        """Returns the whole answer."""

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the events of a streamed answer."""


@dataclass(frozen=True)
class PageRoutes:
    """Holds the routes of a page beside OpenAI's addresses.

    The addresses "/" and guard.CODE_EXCHANGE_PATH need no key, and must show nothing private to anyone without a code.

    Attributes:
        token: is accepted in place of the API key.
    """

    router: APIRouter
    token: str = field(repr=False)


def create_app(
    backends: Backends, token: str | None = None, page: PageRoutes | None = None, limits: Limits | None = None,
    attested: str | None = None,
) -> FastAPI:  # fmt: skip
    """Returns the application.

    Args:
        backends: make the requests; they are closed when the application ends.
        token: the API key. None: any is accepted, from this machine only.
        page: further routes. None: there are none.
        limits: how long a body may take. None: the defaults.
        attested: what STATE_HEADER says of answers by an attested server. None: there is no such header.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await backends.close()

    app = FastAPI(title="Milkglass proxy", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.backends = backends
    app.include_router(router)
    if page is not None:
        app.include_router(page.router)
    refusals.install_handlers(app)
    page_token = None if page is None else page.token
    app.add_middleware(LocalGuard, token=token, second_token=page_token, limits=limits or Limits())
    if attested is not None:
        app.add_middleware(HeaderMiddleware, headers=attestation_header(attested, ("/v1/models",)))
    return app


router = APIRouter(route_class=StrictRoute)


async def _read_body(request: Request, body_type: type[B]) -> B:
    """Reads the body of a request. Raises UsageError if it is not valid."""
    try:
        return body_type.model_validate(await request.json())
    except ValidationError as error:
        raise refusals.invalid_fields_error(error, body_type) from None


async def _respond(
    request: Request, encode: Callable[[], ApiExchange], is_streamed: bool | None, has_done_event: bool = True
) -> Response:
    """Answers a request.

    Args:
        request: the request, whose body was read.
        encode: checks and encodes the request, in a thread, so that a long prompt or a slow template delays no other
            answer.
        is_streamed: whether the answer comes as server-sent events.
        has_done_event: whether a stream ends with "[DONE]", and its events have no type of their own.
    """
    exchange = await asyncio.to_thread(encode)
    if not is_streamed:
        document = await result_unless_gone(exchange.response(), wait_for_disconnect(request))
        return CLIENT_GONE if document is None else JSONResponse(document)
    events = exchange.events()
    async with AsyncExitStack() as cleanup:
        cleanup.push_async_callback(events.aclose)
        # status and headers are sent once the engine has answered: a refusal must not look like a success
        first_event = await result_unless_gone(anext(events), wait_for_disconnect(request))
        if first_event is None:
            return CLIENT_GONE
        return EventStream(_stream(first_event, events, has_done_event), cleanup.pop_all())


async def _stream(
    first_event: dict[str, Any], events: AsyncGenerator[dict[str, Any], None], has_done_event: bool
) -> AsyncGenerator[str, None]:
    """Yields the events of an answer as text. An error is an event with `error`, which official clients raise."""
    sequence_number = 1
    try:
        async with aclosing(events):
            yield _event(first_event, has_done_event)
            async for document in events:
                sequence_number += 1
                yield _event(document, has_done_event)
    except Exception as error:  # noqa: BLE001  (its message may quote a text)
        if not isinstance(error, MilkglassError):
            log.error("internal error: %s", place_of(error))
        error_body = refusals.any_error_document(error)
        typed_event = {name: error_body["error"][name] for name in ("message", "code")}
        typed_event |= {"type": "error", "sequence_number": sequence_number, "param": None}
        yield sse_event(error_body) if has_done_event else sse_event({**typed_event, **error_body}, "error")
    if has_done_event:
        yield sse_event("[DONE]")


_write_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _event(document: dict[str, Any], has_done_event: bool) -> str:
    text = _write_json(document)
    return sse_event(text, None if has_done_event else document["type"])


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [_model_object(model.name) for model in _backends(request).models]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> JSONResponse:
    return JSONResponse(_model_object(_backends(request).of(name).model(name).name))


def _model_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "milkglass"}


def _backends(request: Request) -> Backends:
    return request.app.state.backends


@router.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    body = await _read_body(request, ChatBody)
    return await _respond(request, lambda: ChatExchange(_backends(request).of(body.model), body), body.stream)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    body = await _read_body(request, CompletionBody)
    return await _respond(request, lambda: CompletionExchange(_backends(request).of(body.model), body), body.stream)


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    body = await _read_body(request, ResponseBody)
    return await _respond(
        request, lambda: ResponseExchange(_backends(request).of(body.model), body), body.stream, has_done_event=False
    )


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    body = await _read_body(request, EmbeddingBody)
    document = await result_unless_gone(embed(_backends(request).of(body.model), body), wait_for_disconnect(request))
    return CLIENT_GONE if document is None else JSONResponse(document)

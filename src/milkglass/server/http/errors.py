"""One format of all errors, OpenAI's with a hint of ours: `{"error": {"message", "type", "code", "hint"}}`.

No answer repeats the request. A validation library's messages quote what was sent; these name the place and the rule
instead, and the refused value only if the caller of `validation_message` says so.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from milkglass.errors import MilkglassError
from milkglass.server.settings import error_for_caller

INTERNAL_MESSAGE = "the server made a mistake; nothing of your request is repeated here"
MAX_ERRORS_SHOWN = 3  # validation errors that are named in one answer
HTTP_ERROR_MESSAGES = {
    400: "the request could not be read",
    401: "the bearer token is missing or wrong",
    404: "there is nothing at this address",
    405: "this address does not take that method",
    413: "the request body is too large",
}
HTTP_ERROR_HINTS = {
    400: "send a JSON object, or the form that the documentation shows",
    401: "send `Authorization: Bearer TOKEN`, a proxy by --token-file; it is in the server's home or --token-file",
    404: "see /openapi.json for the addresses",
    405: "see /openapi.json for the methods",
    413: "send fewer or shorter texts at once; large files in chunks, through /v1/uploads",
}


class ErrorBody(BaseModel):
    """Describes an error, for OpenAPI."""

    message: str
    type: str
    code: str
    hint: str


class Refusal(BaseModel):
    """Describes the body of every error, for OpenAPI."""

    error: ErrorBody


class RefusedRequest(HTTPException):
    """Carries a MilkglassError in an exception that the web framework lets through."""

    def __init__(self, error: MilkglassError) -> None:
        super().__init__(error.status)
        self.error = error


def error_json(status: int, message: str, code: str, hint: str = "", **extra: Any) -> dict[str, Any]:
    """Returns the body of an error. `extra` are further fields of the error."""
    type_by_status = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    error_type = type_by_status.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": error_type, "code": code, "hint": hint, **extra}}


def error_response(error: MilkglassError) -> JSONResponse:
    """Returns the answer for an error. A 503 says when to ask again."""
    headers = {"Retry-After": "2"} if error.status == 503 else None
    return JSONResponse(error_body(error), error.status, headers)


def error_body(error: MilkglassError) -> dict[str, Any]:
    """Returns the body of an error. The code is the kind's name, such as wrong_base_model for WrongBaseModel."""
    code = "".join("_" + c.lower() if c.isupper() else c for c in type(error).__name__).lstrip("_")
    return error_json(error.status, error.message, code, error.hint, **error.extra)


def internal_error_response() -> JSONResponse:
    """Returns the answer for a fault of the server, which says nothing of the request."""
    return JSONResponse(
        error_json(500, INTERNAL_MESSAGE, "internal_error", "its log names the place; please report it"), 500
    )


def validation_message(
    error: RequestValidationError | ValidationError, value_text: Callable[[Mapping[str, Any]], str] = lambda fault: ""
) -> str:
    """Returns what is wrong, and where.

    Args:
        value_text: returns the words for a refused value, which stand before its rule. By default no value is
            repeated.
    """
    errors = error.errors()
    faults = [
        f"{_fault_location(fault)}: {value_text(fault)}{_broken_rule(fault)}" for fault in errors[:MAX_ERRORS_SHOWN]
    ]
    hidden_count = len(errors) - MAX_ERRORS_SHOWN
    return "; ".join(faults) + (f"; and {hidden_count} more" if hidden_count > 0 else "")


def _fault_location(fault: Mapping[str, Any]) -> str:
    """Returns the place of a fault in the body, without keys that the caller made up, which may be private."""
    parts = list(fault["loc"])
    if fault["type"] == "extra_forbidden":
        parts.pop()
    return ".".join(str(part) for part in parts if isinstance(part, int) or part.isidentifier()) or "body"


def _broken_rule(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        return "has a field that is not known here"
    if fault["type"] == "json_invalid":
        return "is not valid JSON"
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "is not a JSON object"  # pydantic's message names our class
    text = str(fault["msg"])
    return text[:1].lower() + text[1:]


def web_app(title: str, lifespan: Any = None) -> FastAPI:
    """Returns an application whose errors all have this format, and which answers /health."""
    refusals: dict[int | str, dict[str, Any]] = {"4XX": {"model": Refusal}, "5XX": {"model": Refusal}}
    app = FastAPI(title=title, lifespan=lifespan, responses=refusals, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:  # async: it answers when all threads are busy
        return {"status": "ok"}

    async def on_invalid(request: Request, error: Any) -> JSONResponse:
        hint = "see /openapi.json for what is expected"
        return JSONResponse(error_json(400, validation_message(error), "invalid_request", hint), 400)

    async def on_http(request: Request, error: Any) -> JSONResponse:
        if isinstance(error, RefusedRequest):
            return error_response(error.error)
        status = error.status_code
        message = HTTP_ERROR_MESSAGES.get(status, "the request was refused")
        return JSONResponse(
            error_json(status, message, f"http_{status}", HTTP_ERROR_HINTS.get(status, "")), status, error.headers
        )

    async def on_known(request: Request, error: Exception) -> JSONResponse:
        known_error = error_for_caller(error)
        if known_error is None:
            raise error
        return error_response(known_error)

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    for error_class in (MilkglassError, OSError, sqlite3.Error):
        app.add_exception_handler(error_class, on_known)
    return app

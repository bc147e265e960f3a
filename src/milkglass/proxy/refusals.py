"""Answers applications with errors. Official clients show only `message`, so it includes the next step.

Errors go to the owner's own program on this machine and may name a field; they never go into a log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from milkglass.errors import MilkglassError, RejectedByServer, RemoteError, UsageError
from milkglass.server.http import errors

BUSY_STATUSES = frozenset({429, 503})
CALLS_TEXT = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings (POST) and /v1/models (GET)"
HINTS = {
    400: "send a JSON object",
    404: f"it has {CALLS_TEXT}; an application's base URL ends with /v1",
    405: f"it has {CALLS_TEXT}",
    413: "send less at once",
}


def install_handlers(app: FastAPI) -> None:
    """Makes an app answer with the errors of this module."""

    async def answer_known_error(request: Request, error: Any) -> JSONResponse:
        return error_response(as_gateway_error(error))

    async def answer_http_error(request: Request, error: Any) -> JSONResponse:
        if isinstance(error, errors.RefusedRequest):
            return error_response(as_gateway_error(error.error))
        status = error.status_code
        message, hint = errors.HTTP_ERROR_MESSAGES.get(status, "the request was refused"), HINTS.get(status, "")
        return JSONResponse(
            _join_hint(errors.error_json(status, message, f"http_{status}", hint)), status, error.headers
        )

    app.add_exception_handler(MilkglassError, answer_known_error)
    app.add_exception_handler(HTTPException, answer_http_error)


def error_response(error: MilkglassError) -> JSONResponse:
    """Returns the HTTP answer for an error; for a busy engine with the time after which to ask again."""
    return JSONResponse(
        error_document(error), error.status, {"Retry-After": "2"} if error.status in BUSY_STATUSES else None
    )


def error_document(error: MilkglassError) -> dict[str, Any]:
    """Returns the body of the answer for an error."""
    return _join_hint(errors.error_body(error))


def any_error_document(error: Exception) -> dict[str, Any]:
    """Returns the body for an error that occurs after an answer began. Only a MilkglassError is quoted."""
    if isinstance(error, MilkglassError):
        return error_document(as_gateway_error(error))
    return _join_hint(
        errors.error_json(500, errors.INTERNAL_MESSAGE, "internal_error", "its log names the place; please report it")
    )


def as_gateway_error(error: MilkglassError) -> MilkglassError:
    """Returns the error, after setting its status for the application.

    An engine's failure is not the application's: 502. A busy engine keeps its status, and a request that the engine
    finds at fault gets 400, which no client repeats.
    """
    if isinstance(error, RemoteError) and error.status not in BUSY_STATUSES:
        error.status = 400 if isinstance(error, RejectedByServer) else 502
    return error


# Finds parts of a hint that are for whoever starts the proxy: an application has no command line
COMMAND_LINE_PATTERN = re.compile(r"--[a-z]|`milkglass |\bin Python\b")
MAX_NUMBER = 10**12  # the largest number that a message names
DEFAULT_HINT = "the person who runs this proxy can mend it"


def _join_hint(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of an error, after joining the part of its hint that is for applications to its message."""
    error = document["error"]
    hints = [hint for hint in error["hint"].split("; ") if not COMMAND_LINE_PATTERN.search(hint)]
    error["hint"] = "; ".join(hints) or (DEFAULT_HINT if error["hint"] else "")
    error["message"] = "; ".join(part for part in (error["message"], error["hint"]) if part)
    return document


def invalid_fields_error(error: ValidationError, body_type: type[BaseModel]) -> UsageError:
    """Returns the error for a request with invalid fields. `param` of the error is the first invalid field.

    Args:
        error: the faults that pydantic found.
        body_type: the model of the request's body.
    """
    unknown_fields = [
        ".".join(map(str, fault["loc"])) for fault in error.errors() if fault["type"] == "extra_forbidden"
    ]
    if unknown_fields:
        field_names = ", ".join(name for name in body_type.model_fields)
        name = unknown_fields[0][:60]
        return UsageError(
            f"`{name}` is not offered, and nothing of it was sent", f"this call takes {field_names}", param=name
        )
    has_private_fault = any(fault["type"] == "not_private" for fault in error.errors())
    manual_hint = "; see docs/cli.md, section 'Applications that speak OpenAI's API'" if has_private_fault else ""
    steps = [str(step) for step in error.errors()[0]["loc"]]  # pydantic's own names of kinds are left out
    param = ".".join(step for step in steps if step.isidentifier() or step.isdigit())[:60] or None
    return UsageError(
        errors.validation_message(error, value_text=_refused_number), f"nothing was sent{manual_hint}", param=param
    )


def _refused_number(fault: Mapping[str, Any]) -> str:
    """Returns the refused number of an option in words.

    Returns "" for other values, which may be text, and for numbers in lists, which may be ids of text.
    """
    refused = fault["input"]
    is_number = len(fault["loc"]) == 1 and isinstance(refused, int | float) and not isinstance(refused, bool)
    return f"is {refused:.10g}, " if is_number and abs(refused) < MAX_NUMBER else ""

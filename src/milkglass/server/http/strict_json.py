"""Reads requests' JSON strictly: no NaN, no infinities, no lone surrogates, limited nesting."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import pydantic_core
from fastapi import Path, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect

from milkglass.errors import UsageError
from milkglass.server.http.errors import Refused

PLAIN = r"^[A-Za-z0-9](\.?[A-Za-z0-9_-])*$"  # no slash, no leading dot, no two dots in a row

Name = Annotated[str, Field(pattern=PLAIN, min_length=1, max_length=128)]
PathName = Annotated[str, Path(pattern=PLAIN, min_length=1, max_length=128)]

MAX_FIELDS = 64


def few_fields(value: Any) -> Any:
    """Refuses an object with very many fields, before each unknown field becomes an error."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", f"has more than {MAX_FIELDS} fields")
    return value


class RequestBody(BaseModel):
    """A request body. Unknown fields are refused, because ignoring one would be a silent fallback."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        return few_fields(value)


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError:
            hint = "no NaN or Infinity, 200 levels of nesting at most, UTF-8"
            raise Refused(UsageError("the body is not valid JSON", hint)) from None


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(_StrictRequest(request.scope, request.receive))
            except ClientDisconnect:
                return Response(status_code=499)  # no one is there to read it

        return handle

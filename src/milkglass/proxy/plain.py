"""OpenAI's API on this machine in front of an attested server: text goes there, and nowhere else, as it is.

What leaves goes through an attested channel, which sends nothing to a key that its policy does not allow. Only listed
paths are handed on. With `quiet` bodies are padded, and answers come whole or in slots of one size.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from milkglass.attest import passthrough
from milkglass.attest.channel import AttestedChannel
from milkglass.attest.passthrough import ANSWERED_HEADERS, FORWARDED_HEADERS, QUIET_HEADER, Quiet
from milkglass.proxy.guard import LocalGuard
from milkglass.server.settings import Limits


class PlainProxy:
    """The application.

    Attributes:
        channel: to the attested server.
        token: what applications give as their API key. None: anything.
        server_token: what the server asks for, in place of the application's key; "" for none.
        quiet: how answers come.
        attested: what each answer's header says of the server.
    """

    def __init__(
        self, channel: AttestedChannel, token: str | None, server_token: str | None, quiet: Quiet | None,
        attested: str, limits: Limits,
    ) -> None:  # fmt: skip
        self.channel, self.token, self.server_token = channel, token, server_token
        self.quiet, self.attested, self.limits = quiet, attested, limits

    def app(self) -> Any:
        """Returns the application behind its guard."""

        @asynccontextmanager
        async def running(_: Starlette) -> AsyncIterator[None]:
            yield
            await self.channel.close()

        endpoint = passthrough.answering(self.forward, {})
        routes = [Route(path, endpoint, methods=[method]) for path, method in passthrough.PATHS.items()]
        app = Starlette(routes=routes, lifespan=running)
        app.add_middleware(LocalGuard, token=self.token, other_token=None, limits=self.limits, attested=self.attested)
        return app

    async def forward(self, request: Request) -> Response:
        """Sends a request through the channel, and returns the answer as it comes."""
        body = await passthrough.body_of(request)
        headers = passthrough.kept(request.headers, FORWARDED_HEADERS)
        headers.pop("authorization", None)
        if self.server_token:
            headers["authorization"] = f"Bearer {self.server_token}"
        if self.quiet is not None and body:
            headers[QUIET_HEADER] = self.quiet
            body = passthrough.padded(body)
        answer = await self.channel.send(request.method, request.url.path, headers, body)
        answered = passthrough.kept(answer.headers, ANSWERED_HEADERS)
        return StreamingResponse(passthrough.closing(answer.aiter_raw(), answer), answer.status_code, answered)

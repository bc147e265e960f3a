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
from starlette.responses import Response
from starlette.routing import Route

from milkglass.attest import passthrough
from milkglass.attest.channel import AttestedChannel
from milkglass.attest.passthrough import ANSWERED_HEADERS, FORWARDED_HEADERS, QUIET_HEADER, STATE_HEADER, QuietMode
from milkglass.client.remote.connection import require_token
from milkglass.errors import UsageError
from milkglass.proxy.guard import LocalGuard, attestation_header
from milkglass.server.http.routing import CLIENT_GONE, result_unless_gone, wait_for_disconnect
from milkglass.server.settings import Limits


class PlainProxy:
    """The application.

    Attributes:
        channel: to the attested server.
        token: what applications give as their API key. None: anything.
        server_token: what the server asks for, in place of the application's key; "" for none.
        quiet: how answers come.
        attested: what the header of the server's answers says.

    Raises:
        UsageError: the server's token cannot be part of a header, or quiet answers are asked of a server that is not
            ours, and knows nothing of them.
    """

    def __init__(
        self, channel: AttestedChannel, token: str | None, server_token: str | None, quiet: QuietMode | None,
        attested: str, limits: Limits,
    ) -> None:  # fmt: skip
        if quiet is not None and channel.policy.evidence != "milkglass":
            raise UsageError(
                f"--quiet has no effect: the policy is for evidence of {channel.policy.evidence}, whose servers do not "
                "make their answers quiet", "leave it out, or use a server of `milkglass serve --attested`",
            )  # fmt: skip
        require_token(server_token)
        self.channel, self.token, self.server_token = channel, token, server_token
        self.quiet, self.attested, self.limits = quiet, attested, limits

    def app(self) -> Any:
        """Returns the application behind its guard."""

        @asynccontextmanager
        async def running(_: Starlette) -> AsyncIterator[None]:
            yield
            await self.channel.close()

        routes = [Route(path, self.forward, methods=[method]) for path, method in passthrough.PATHS.items()]
        app = passthrough.web_app(routes, running)
        app.add_middleware(LocalGuard, token=self.token, other_token=None, limits=self.limits)
        app.add_middleware(passthrough.HeaderMiddleware, headers=attestation_header(self.attested))
        return app

    async def forward(self, request: Request) -> Response:
        """Sends a request through the channel, and returns the answer as it comes."""
        body = await request.body()
        if len(body) > passthrough.MAX_BODY:
            raise UsageError(f"the body has more than {passthrough.MAX_BODY:,} bytes", "send less at a time")
        headers = passthrough.select_headers(request.headers.raw, FORWARDED_HEADERS)
        headers.pop("authorization", None)
        if self.server_token:
            headers["authorization"] = f"Bearer {self.server_token}"
        if self.quiet is not None:
            headers[QUIET_HEADER] = self.quiet
            body = passthrough.padded(body)
        sending = self.channel.send(request.method, request.url.path, headers, body)
        if (answer := await result_unless_gone(sending, wait_for_disconnect(request))) is None:
            return CLIENT_GONE
        answered = passthrough.select_headers(answer.headers.raw, ANSWERED_HEADERS)
        answered[STATE_HEADER] = self.attested
        return passthrough.ForwardedResponse(answer, answered)

"""Serves OpenAI's API on this machine, and forwards text unchanged to an attested server, and nowhere else.

Requests go through an attested channel, which sends nothing to a key that its policy does not allow. Only listed
paths are forwarded. In quiet mode bodies are padded, and answers come whole or in slots of one size.
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
from milkglass.attest.passthrough import QUIET_HEADER, REQUEST_HEADERS, RESPONSE_HEADERS, STATE_HEADER, QuietMode
from milkglass.client.remote.connection import require_token
from milkglass.errors import UsageError
from milkglass.proxy.guard import LocalGuard, attestation_header
from milkglass.server.http.routing import CLIENT_GONE, result_unless_gone, wait_for_disconnect
from milkglass.server.settings import Limits


class AttestedProxy:
    """Serves OpenAI's API in front of an attested server.

    Attributes:
        channel: the channel to the server, which is closed with the application.
        token: the API key that applications must give. None: any key is accepted.
        server_token: the bearer token for the server, in place of the application's key; "" for none.
        quiet: how the sizes and times of answers are hidden. None: they are not hidden.
        attestation_state: the value of STATE_HEADER in the server's answers.
        limits: limits of connections and requests.

    Raises:
        UsageError: the server's token cannot be part of a header, or quiet answers are wanted from a server that is
            not Milkglass's, which does not know them.
    """

    def __init__(
        self, channel: AttestedChannel, token: str | None, server_token: str | None, quiet: QuietMode | None,
        attestation_state: str, limits: Limits,
    ) -> None:  # fmt: skip
        if quiet is not None and channel.policy.evidence != "milkglass":
            raise UsageError(
                f"--quiet has no effect: the policy is for evidence of {channel.policy.evidence}, whose servers do not "
                "make their answers quiet", "leave it out, or use a server of `milkglass serve --attested`",
            )  # fmt: skip
        require_token(server_token)
        self.channel, self.token, self.server_token = channel, token, server_token
        self.quiet, self.attestation_state, self.limits = quiet, attestation_state, limits

    def app(self) -> Any:
        """Returns the application behind its guard."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await self.channel.close()

        routes = [Route(path, self.forward, methods=[method]) for path, method in passthrough.METHOD_BY_PATH.items()]
        app = passthrough.web_app(routes, lifespan)
        app.add_middleware(LocalGuard, token=self.token, second_token=None, limits=self.limits)
        app.add_middleware(passthrough.HeaderMiddleware, headers=attestation_header(self.attestation_state))
        return app

    async def forward(self, request: Request) -> Response:
        """Sends a request through the channel, and returns the answer as it comes."""
        body = await request.body()
        if len(body) > passthrough.MAX_BODY_BYTES:
            raise UsageError(f"the body has more than {passthrough.MAX_BODY_BYTES:,} bytes", "send less at a time")
        headers = passthrough.select_headers(request.headers.raw, REQUEST_HEADERS)
        headers.pop("authorization", None)
        if self.server_token:
            headers["authorization"] = f"Bearer {self.server_token}"
        if self.quiet is not None:
            headers[QUIET_HEADER] = self.quiet
            body = passthrough.pad_json(body)
        request_sent = self.channel.send(request.method, request.url.path, headers, body)
        if (answer := await result_unless_gone(request_sent, wait_for_disconnect(request))) is None:
            return CLIENT_GONE
        answer_headers = passthrough.select_headers(answer.headers.raw, RESPONSE_HEADERS)
        answer_headers[STATE_HEADER] = self.attestation_state
        return passthrough.ForwardedResponse(answer, answer_headers)

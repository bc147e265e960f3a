"""Serves a decoder without its embedding layer.

It answers `GET /v1/split`, releases the embedding table to enclaves (gate.py), and has a WebSocket at
`/v1/split/stream`. The first message is JSON (`spec.OpenRequest`). Then vectors and ids alternate (`frames.py`). JSON
from the server is an error, which ends the session, as the end of the connection does. There is no text, no tokenizer
and no pickle, and nothing that is received or sent is logged or written.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pydantic
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.responses import StreamingResponse
from starlette.types import Scope

from milkglass.errors import BadUpload, MilkglassError, TooSlow
from milkglass.server.http import errors
from milkglass.server.http.guard import BodyRule, Guard
from milkglass.server.logs import place_of
from milkglass.server.process import run
from milkglass.server.settings import Limits, ServerSettings
from milkglass.split.decoder import frames
from milkglass.split.decoder.frames import DTYPES
from milkglass.split.decoder.gate import CHALLENGE_PATH, MAX_BODY_BYTES, RELEASE_PATH, ReleaseRequest, TableGate
from milkglass.split.decoder.server import SessionTable, SplitSession
from milkglass.split.spec import SPLIT_PATH, STREAM_PATH, DecoderInfo, OpenRequest

log = logging.getLogger("milkglass.server")
IDLE_SECONDS = 60.0  # how long a client may take to send its next message, or to read one
MAX_OPEN_BYTES = 4096  # bytes of the first message
SPARE_BYTES = 64 << 10  # bytes by which a message may be too long and still be refused with a reason
POLICY_VIOLATION_CODE, INTERNAL_ERROR_CODE = 1008, 1011  # close codes of WebSockets (RFC 6455, section 7.4.1)


def max_message_bytes(info: DecoderInfo) -> int:
    """Returns how many bytes of a message are received at most: SPARE_BYTES more than the longest that is accepted."""
    return info.max_length * info.width * DTYPES["float32"].itemsize + SPARE_BYTES


def create_app(
    sessions: SessionTable, gate: TableGate, bearer_token: str, idle_seconds: float = IDLE_SECONDS
) -> FastAPI:
    """Returns the application behind its guard.

    Args:
        sessions: opens and closes the sessions.
        gate: releases the embedding table to enclaves.
        bearer_token: the token that requests need.
        idle_seconds: the seconds that a client may take to send its next message, or to read one.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sessions.engine.start()
        yield
        await asyncio.to_thread(sessions.engine.close)

    release_numbers = itertools.count(1)
    app = errors.web_app("Milkglass split", lifespan)

    @app.get(SPLIT_PATH)
    async def info() -> dict[str, Any]:
        return sessions.info.document()

    @app.post(CHALLENGE_PATH)
    async def challenge() -> dict[str, str]:
        return {"nonce": gate.challenge()}

    @app.post(RELEASE_PATH)
    async def release(body: ReleaseRequest) -> StreamingResponse:
        pieces = await asyncio.to_thread(gate.release, body)
        log.warning(
            "the table is released to an enclave: release %d since the start, each has its burst", next(release_numbers)
        )
        return StreamingResponse(pieces, media_type="application/octet-stream")

    @app.websocket(STREAM_PATH)
    async def stream(socket: WebSocket) -> None:
        if not _is_authorized(socket, bearer_token):
            await socket.close(POLICY_VIOLATION_CODE)  # before the socket is accepted, so that the client gets 403
            return
        await socket.accept()
        await StreamConnection(socket, sessions, idle_seconds).run()

    def rule(scope: Scope) -> BodyRule:
        return BodyRule(MAX_BODY_BYTES if scope["path"] in (CHALLENGE_PATH, RELEASE_PATH) else 0)

    app.add_middleware(Guard, token=bearer_token, rule_of=rule, max_held_bytes=16 * MAX_BODY_BYTES, limits=Limits())
    return app


def _is_authorized(socket: WebSocket, bearer_token: str) -> bool:
    """Returns whether a WebSocket's request has the token."""
    authorization = socket.headers.get("authorization", "")
    return hmac.compare_digest(authorization.encode(), f"Bearer {bearer_token}".encode())


class StreamConnection:
    """Serves one session over one connection."""

    def __init__(self, socket: WebSocket, sessions: SessionTable, idle_seconds: float) -> None:
        """Takes an accepted WebSocket; `run` serves it. See `create_app` for `idle_seconds`."""
        self._socket, self._sessions, self._idle_seconds = socket, sessions, idle_seconds

    async def run(self) -> None:
        """Serves until the answer is complete, the client leaves, or a message is refused."""
        session: SplitSession | None = None
        try:
            session = self._sessions.open(await self._receive_open())
            while not session.is_over:
                message = (await self._receive()).get("bytes")
                if message is None:
                    raise BadUpload("a message of text came where vectors are due", "send binary messages")
                token = await session.answer(message)
                await self._await_sent(self._socket.send_bytes(frames.encode_token(token)))
            await self._await_sent(self._socket.close())
        except WebSocketDisconnect:
            pass
        except MilkglassError as error:
            await self._refuse(error)
        except Exception as error:  # noqa: BLE001  (no detail of it may reach the client)
            log.error("internal error: %s", place_of(error))
        finally:
            if session is not None:
                self._sessions.close(session)

    async def _receive_open(self) -> OpenRequest:
        """Returns the client's first message. Raises BadUpload."""
        message = await self._receive()
        text = message.get("text")
        if text is None or len(text) > MAX_OPEN_BYTES:
            raise BadUpload("the first message is not a short JSON object", "see /v1/split/stream in docs/formats.md")
        try:
            return OpenRequest.model_validate_json(text)
        except pydantic.ValidationError as error:
            fault = errors.validation_message(error)
            raise BadUpload(fault, "see /v1/split/stream in docs/formats.md") from None

    async def _await_sent(self, message: Awaitable[None]) -> None:
        """Waits until a message is sent. Raises WebSocketDisconnect, or TooSlow if the client does not read.

        A message waits while earlier ones are not read. These include pongs, which a client can request without limit.
        """
        try:
            await asyncio.wait_for(message, self._idle_seconds)
        except TimeoutError:
            raise TooSlow(f"nothing was read for {self._idle_seconds:.0f} s", "read each answer") from None

    async def _receive(self) -> Any:
        """Returns the client's next message. Raises WebSocketDisconnect, TooSlow."""
        try:
            message = await asyncio.wait_for(self._socket.receive(), self._idle_seconds)
        except TimeoutError:
            raise TooSlow(f"no message came for {self._idle_seconds:.0f} s", "begin anew") from None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        return message

    async def _refuse(self, error: MilkglassError) -> None:
        """Sends an error and closes the connection, unless the client is gone or does not read."""
        try:
            await self._await_sent(self._socket.send_text(json.dumps(errors.error_body(error))))
            await self._await_sent(
                self._socket.close(INTERNAL_ERROR_CODE if error.status >= 500 else POLICY_VIOLATION_CODE)
            )
        except (WebSocketDisconnect, RuntimeError, TooSlow):  # the client is gone, or does not read
            return


def serve(sessions: SessionTable, gate: TableGate, home: Path, port: int, bearer_token: str) -> None:
    """Serves on 127.0.0.1 until SIGINT or SIGTERM. Raises UsageError if the address cannot be used."""
    settings = ServerSettings(home, port=port, token=bearer_token)
    app = create_app(sessions, gate, bearer_token)
    run(app, settings, "milkglass split serve", max_message_bytes=max_message_bytes(sessions.info))

"""Sessions of a split decoder: one prompt and its answer, for the life of their connection.

All runs in the event loop, except `_on_token` and `_on_error`, which the engine's thread calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from milkglass.errors import BadUpload, Busy, MilkglassError, TooLong
from milkglass.split.decoder import frames
from milkglass.split.decoder.frames import NextToken
from milkglass.split.decoder.generator import SplitGenerator, SplitSequence
from milkglass.split.spec import DecoderInfo, OpenRequest


class SplitSession:
    """One prompt and its answer.

    Attributes:
        over: whether the answer is complete.
    """

    def __init__(self, request: OpenRequest, info: DecoderInfo, engine: SplitGenerator, ends: frozenset[int]) -> None:
        self.request, self.over = request, False
        self._info, self._engine, self._ends = info, engine, ends
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[NextToken] = self._loop.create_future()
        self._sequence: SplitSequence | None = None

    async def answer(self, message: bytes) -> NextToken:
        """Hands vectors to the engine, and returns the token that follows.

        Raises BadUpload, TooLong, Busy, or the engine's error.
        """
        info, first = self._info, self._sequence is None
        vectors = frames.decode_vectors(message, info.width, self.request.dtype, info.max_length if first else 1)
        self._next = self._loop.create_future()
        if self._sequence is None:
            self._begin(vectors)
        else:
            self._engine.deliver(self._sequence, vectors)
        token = await self._next
        self.over = token.reason is not None
        return token

    def _begin(self, prompt: torch.Tensor) -> None:
        if len(prompt) + self.request.max_tokens > self._info.max_length:
            raise TooLong(
                f"{len(prompt)} tokens and {self.request.max_tokens} of an answer exceed {self._info.max_length}",
                "shorten the prompt, or lower max_tokens",
            )
        self._sequence = SplitSequence(prompt, self.request.sampling(self._ends), self._on_token, self._on_error)
        self._engine.submit([self._sequence])

    def cancel(self) -> None:
        """Frees the session's row. Later output of the engine is dropped."""
        self._next.cancel()
        if self._sequence is not None:
            self._engine.cancel(self._sequence)

    def _on_token(self, token: int, reason: str | None) -> None:
        self._to_loop(lambda: self._next.set_result(NextToken(token, reason)))

    def _on_error(self, error: MilkglassError) -> None:
        self._to_loop(lambda: self._next.set_exception(error))

    def _to_loop(self, settle: Callable[[], None]) -> None:
        def unless_done() -> None:
            if not self._next.done():
                settle()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(unless_done)


@dataclass
class SessionTable:
    """The open sessions.

    Attributes:
        info: what the server takes.
        engine: runs the rows.
        ends: the ids that end an answer.
    """

    info: DecoderInfo
    engine: SplitGenerator
    ends: frozenset[int]
    _open: set[SplitSession] = field(default_factory=set, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: OpenRequest) -> SplitSession:
        """Opens a session. Raises Busy if all are taken, and BadUpload if too many tokens are asked for."""
        if request.max_tokens > self.info.max_new_tokens:
            raise BadUpload(f"max_tokens is {request.max_tokens}", f"at most {self.info.max_new_tokens} are made here")
        if len(self._open) >= self.info.sessions:
            raise Busy(f"{len(self._open)} sessions are open, as many as there may be", "try again in a moment")
        session = SplitSession(request, self.info, self.engine, self.ends)
        self._open.add(session)
        return session

    def close(self, session: SplitSession) -> None:
        self._open.discard(session)
        session.cancel()

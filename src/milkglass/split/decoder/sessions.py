"""Sessions of a split decoder: one prompt and its answer, which survive the loss of a connection for a while.

Frames of both sides are counted, and the two sides take turns: a frame of vectors, then a frame of ids. So at most one
frame of each side can be lost with a connection; the server keeps its last one, the client keeps its own.

All of this runs in the event loop; only `_on_token`, `_on_ids` and `_on_error` are called in the engine's thread.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from milkglass.errors import BadUpload, Busy, Conflict, MilkglassError, NotFound, TooLong
from milkglass.split.decoder import frames
from milkglass.split.decoder.beams import BeamSequence
from milkglass.split.decoder.frames import IdsFrame
from milkglass.split.decoder.generator import SplitGenerator, SplitSequence
from milkglass.split.decoder.spec import DecoderInfo, OpenRequest

ORDER = "send each frame once, in order, and wait for its answer"


class SplitSession:
    """One prompt and its answer.

    Attributes:
        name: the secret by which its client finds it again.
        request: what was asked of it.
        owner: the connection that serves it, the latest that named it; None while there is none.
        expected: the number of the next frame of vectors.
        last: the newest frame of ids; None before the first.
    """

    def __init__(self, request: OpenRequest, info: DecoderInfo, engine: SplitGenerator, ends: frozenset[int]) -> None:
        self.name, self.request = secrets.token_urlsafe(24), request
        self.owner: object | None = None
        self.expected = 0
        self.last: IdsFrame | None = None
        self._info, self._engine, self._ends = info, engine, ends
        self._loop = asyncio.get_running_loop()
        self._answered = asyncio.Event()
        self._error: MilkglassError | None = None
        self._sequence: SplitSequence | BeamSequence | None = None
        self._awaited = False  # whether a frame of vectors has no answer yet
        self.timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        return self._error is not None or (self.last is not None and self.last.ended)

    def accept(self, frame: bytes, owner: object) -> None:
        """Hand the next frame of vectors to the engine. Raises BadUpload, Conflict, TooLong, Busy."""
        if owner is not self.owner:
            raise Conflict("another connection serves this session now", "keep to the newest connection")
        info, first, rows = self._info, self.expected == 0, self.request.beams
        most = info.max_length if first else rows
        number, vectors = frames.decode_vectors(frame, info.width, self.request.dtype, most)
        if number != self.expected or self._awaited or self.over:
            due = "none" if self._awaited or self.over else self.expected
            raise Conflict(f"frame {number} came where {due} is due", ORDER)
        if first:
            self._begin(vectors)
        elif len(vectors) != rows:
            raise BadUpload(f"the frame holds {len(vectors)} vectors, {rows} are due", "send one for each id")
        elif self._sequence is not None:
            self._engine.deliver(self._sequence, vectors)
        self.expected += 1
        self._awaited = True
        self._answered.clear()

    def _begin(self, prompt: torch.Tensor) -> None:
        if len(prompt) + self.request.max_tokens > self._info.max_length:
            raise TooLong(
                f"{len(prompt)} tokens and {self.request.max_tokens} of an answer exceed {self._info.max_length}",
                "shorten the prompt, or lower max_tokens",
            )
        request, ends = self.request, self._ends
        if request.beams > 1:
            self._sequence = BeamSequence(prompt, request.search(ends), self._on_ids, self._on_error)
        else:
            self._sequence = SplitSequence(prompt, request.sampling(ends), self._on_token, self._on_error)
        self._engine.submit([self._sequence])

    async def answer(self) -> IdsFrame:
        """The frame of ids that the last frame of vectors gets. Raises what the engine gave instead."""
        await self._answered.wait()
        if self._error is not None:
            raise self._error
        assert self.last is not None
        return self.last

    def cancel(self) -> None:
        """Free its rows. A request that still waits for an answer gets an error."""
        if self._sequence is not None:
            self._engine.cancel(self._sequence)
        if not self.over:
            self._failed(NotFound("the session was closed before its answer was whole", "begin anew"))

    def _on_token(self, token: int, reason: str | None) -> None:
        self._on_ids((token,), reason)

    def _on_ids(self, ids: tuple[int, ...], reason: str | None) -> None:
        self._to_loop(lambda: self._arrived(ids, reason))

    def _on_error(self, error: MilkglassError) -> None:
        self._to_loop(lambda: self._failed(error))

    def _to_loop(self, call: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def _arrived(self, ids: tuple[int, ...], reason: str | None) -> None:
        self.last = IdsFrame(self.expected - 1, ids, reason)
        self._awaited = False
        self._answered.set()

    def _failed(self, error: MilkglassError) -> None:
        self._error = error
        self._answered.set()


@dataclass
class SessionTable:
    """The sessions that are open. Those without a connection are forgotten after `info.resume` seconds.

    Attributes:
        info: what the server takes.
        engine: what runs the rows.
        ends: the ids that end an answer.
    """

    info: DecoderInfo
    engine: SplitGenerator
    ends: frozenset[int]
    _open: dict[str, SplitSession] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: OpenRequest, owner: object) -> SplitSession:
        """A new session, or the one that the request names: the connection that had it loses it, since a connection
        may be long gone before it is known here. Raises Busy, NotFound, BadUpload, Conflict."""
        session = self._new(request) if request.resume is None else self._resumed(request)
        session.owner = owner
        return session

    def _new(self, request: OpenRequest) -> SplitSession:
        if request.max_tokens > self.info.max_new_tokens:
            raise BadUpload(f"max_tokens is {request.max_tokens}", f"at most {self.info.max_new_tokens} are made here")
        if request.beams > self.info.max_beams:
            raise BadUpload(f"beams is {request.beams}", f"at most {self.info.max_beams} are offered here")
        rows = sum(one.request.beams for one in self._open.values())
        if rows + request.beams > self.info.sessions:
            raise Busy(
                f"{len(self._open)} sessions are open with {rows} rows, and {request.beams} more exceed "
                f"{self.info.sessions}",
                "try again in a moment",
            )
        session = SplitSession(request, self.info, self.engine, self.ends)
        self._open[session.name] = session
        return session

    def _resumed(self, request: OpenRequest) -> SplitSession:
        session = self._open.get(str(request.resume))
        if session is None:
            raise NotFound("there is no such session: it has ended or expired", "begin anew")
        if not session.expected - 1 <= request.received <= session.expected:
            raise Conflict(f"{request.received} frames received, {session.expected} were asked for", ORDER)
        if session.timer is not None:
            session.timer.cancel()
        return session

    def detach(self, session: SplitSession, owner: object) -> None:
        """A connection is gone: wait for its client unless everything was said."""
        if session.owner is not owner:
            return
        session.owner = None
        if session.over or session.expected == 0 or session.name not in self._open:
            self.close(session)
        else:
            loop = asyncio.get_running_loop()
            session.timer = loop.call_later(self.info.resume, lambda: self.close(session))

    def close(self, session: SplitSession) -> None:
        self._open.pop(session.name, None)
        session.cancel()

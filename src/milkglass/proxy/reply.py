"""One answer in progress: scrambled ids from the engine, text to the application, in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Literal

from milkglass.client.codec.codec import Codec
from milkglass.client.codec.spelling import MAX_CHECKED_TEMPERATURE, SpellingCheck
from milkglass.client.codec.streaming import StreamDecoder
from milkglass.engines.engine import IdsChunk, IdsRequest
from milkglass.engines.upstream import Upstream
from milkglass.errors import CodecError, MisspeltAnswer, RemoteError, ToolUseFailed
from milkglass.proxy.answer_memory import AnswerMemory
from milkglass.proxy.observe import Received
from milkglass.proxy.text.calls import ToolCall, ToolFormat, Tools
from milkglass.proxy.text.sections import NO_TOOLS, Kind, Part, Sections, StopStrings
from milkglass.proxy.text.tokens import NamedLogprob, TokenNames

Logprobs = tuple[NamedLogprob, list[NamedLogprob]]  # the token that was drawn, and the likeliest ones


@dataclass(frozen=True)
class Piece:
    """A part of an answer that became certain, with the log-probabilities of the tokens since the last piece."""

    kind: Kind
    text: str = ""
    calls: Sequence[ToolCall] = ()
    logprobs: Sequence[Logprobs] = ()


@dataclass(frozen=True)
class Question:
    """A request to the engine, with what is needed to read its answer.

    Attributes:
        stops: strings that end the text.
        format: how the model writes calls, if tools were given.
        demanded: whether it must call one.
        kind: the kind of the text that comes first.
        begun: the beginning of the answer, which the engine continues.
        single: whether at most one call is accepted.
    """

    model: str
    request: IdsRequest
    stops: Sequence[str] = ()
    format: ToolFormat | None = None
    tools: Tools = field(default_factory=lambda: NO_TOOLS)
    demanded: bool = False
    may_reason: bool = False
    kind: Literal["content", "reasoning"] = "content"
    begun: str = ""
    single: bool = False


@dataclass
class Reply:
    """One answer. Iterate `pieces` once; closing it ends the request.

    Attributes:
        index: its number among the answers to one question.
        tokens: tokens that the engine made, without those that ended the answer.
        finish: "stop", "length" or "tool_calls", at the end.
    """

    codec: Codec = field(repr=False)
    upstream: Upstream = field(repr=False)
    question: Question = field(repr=False)
    received: Received = field(repr=False)
    index: int = 0
    memory: AnswerMemory = field(default_factory=AnswerMemory, repr=False)
    tokens: int = 0
    finish: str = "stop"
    _called: bool = False
    _ids: list[int] = field(default_factory=list, repr=False)
    _spelling: SpellingCheck = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._spelling = SpellingCheck(
            self.codec, self.memory.last, self.question.request.temperature > MAX_CHECKED_TEMPERATURE
        )

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields the answer.

        Raises RemoteError if the engine fails, ToolUseFailed if a demanded call is missing, and MisspeltAnswer.
        """
        texts, calls = {"content": "", "reasoning": ""}, list[str]()
        try:
            async with aclosing(self._checked_pieces()) as pieces:
                async for piece in pieces:
                    if piece.kind != "call":
                        texts[piece.kind] += piece.text
                    calls += [call.id for call in piece.calls]
                    yield piece
        except MisspeltAnswer:
            self.memory.misspelt_count += 1
            raise
        finally:
            with suppress(CodecError):
                self._spelling.close()
            # what an application shows of an answer that broke off may come back as well
            self.memory.remember(self.question.model, [*texts.values()], calls, self._ids)

    async def _checked_pieces(self) -> AsyncGenerator[Piece, None]:
        question = self.question
        decoder = self.codec.stream(question.format.special_tokens if question.format else ())
        stops = StopStrings(question.stops)
        sections = Sections(question.format, question.tools, question.may_reason, question.kind)
        names, pending = TokenNames(self.codec), list[Logprobs]()
        for piece in self._read(sections.push(question.begun)):
            yield piece
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                text = stops.push(self._text(decoder, chunk))
                if chunk.finish and not stops.is_stopped:
                    text += stops.push(decoder.flush())
                    text += "" if stops.is_stopped else stops.flush()
                pending += map(names.at_place, chunk.logprobs)
                for piece in self._read(sections.push(text), pending):
                    yield piece
                if stops.is_stopped:
                    break
                self.finish = chunk.finish or self.finish
        self._spelling.flush()
        for piece in self._read(sections.flush(), pending):
            yield piece
        if pending:
            yield Piece(sections.kind, logprobs=tuple(pending))
        if self.finish == "stop" and question.demanded and not self._called:
            raise ToolUseFailed(
                "tool_choice demands a call, and the model's answer is none of the tools of this request",
                "ask again, describe the tools in more words, or let tool_choice be auto",
            )
        self.finish = "tool_calls" if self._called and self.finish == "stop" else self.finish

    async def _chunks(self) -> AsyncGenerator[IdsChunk, None]:
        async with aclosing(self.upstream.generate(self.question.model, self.question.request)) as chunks:
            async for chunk in chunks:
                self._require(chunk)
                self.tokens += len(chunk.ids)
                self._ids += chunk.ids
                self.received(chunk.ids)
                self._spelling.push(chunk.ids)
                if chunk.finish:
                    self._spelling.flush()
                yield chunk

    def _require(self, chunk: IdsChunk) -> None:
        """Raises RemoteError for an id that the model does not have."""
        size = len(self.codec.inverse)
        if any(token >= size for token in chunk.ids) or any(
            token.id >= size for row in chunk.logprobs for token in row
        ):
            raise RemoteError("the engine answered an id that the model does not have", "is it the key's model?")
        if chunk.logprobs and [row[0].id for row in chunk.logprobs] != list(chunk.ids):
            raise RemoteError("the engine's log-probabilities are of other tokens than its answer", "don't trust it")

    @staticmethod
    def _text(decoder: StreamDecoder, chunk: IdsChunk) -> str:
        try:
            return decoder.push(chunk.ids) if chunk.ids else ""
        except CodecError as error:
            raise RemoteError(
                f"the engine's answer cannot be read: {error.message}", "is it the key's model?"
            ) from None

    def _read(self, parts: Iterable[Part], pending: list[Logprobs] | None = None) -> Iterator[Piece]:
        for part in parts:
            calls = part.calls
            self._spelling.add_escapes(part.escape_count)
            if calls and self.question.single:
                calls = [] if self._called else calls[:1]
            self._called = self._called or bool(part.calls)
            if part.text or calls:
                yield Piece(part.kind, part.text, calls, tuple(pending or ()))
                if pending:
                    pending.clear()


# --- several answers at once ------------------------------------------------------------------------------------------
async def gathered(replies: Sequence[Reply]) -> list[list[Piece]]:
    """Returns all pieces of each reply. The first that fails ends the others."""

    async def pieces(reply: Reply) -> list[Piece]:
        async with aclosing(reply.pieces()) as iterator:
            return [piece async for piece in iterator]

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pieces(reply)) for reply in replies]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def merged(replies: Sequence[Reply]) -> AsyncGenerator[tuple[Reply, Piece | None], None]:
    """Yields (reply, piece), with None for the piece when the reply has ended.

    It raises the error of the first reply that fails. Closing the iterator ends all requests.
    """
    if len(replies) == 1:  # no queue between the engine and the application
        async with aclosing(replies[0].pieces()) as pieces:
            async for piece in pieces:
                yield replies[0], piece
        yield replies[0], None
        return
    queue: asyncio.Queue[tuple[Reply, Piece | None | Exception]] = asyncio.Queue(maxsize=64)

    async def read(reply: Reply) -> None:
        try:
            async with aclosing(reply.pieces()) as pieces:
                async for piece in pieces:
                    await queue.put((reply, piece))
            await queue.put((reply, None))
        except Exception as error:  # noqa: BLE001  (raised where the answers are read)
            await queue.put((reply, error))

    tasks = [asyncio.create_task(read(reply)) for reply in replies]
    unfinished = len(replies)
    try:
        while unfinished:
            reply, outcome = await queue.get()
            if isinstance(outcome, Exception):
                raise outcome
            unfinished -= outcome is None
            yield reply, outcome
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

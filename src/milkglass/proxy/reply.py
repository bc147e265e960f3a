"""Turns one answer of the engine, which arrives in scrambled ids, into pieces of text for the application."""

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
from milkglass.proxy.observe import ReceiveIds
from milkglass.proxy.text.calls import RequiredArguments, ToolCall, ToolFormat
from milkglass.proxy.text.sections import NO_TOOLS, AnswerSplitter, Part, PartKind, StopStringFilter
from milkglass.proxy.text.tokens import NamedLogprob, TokenNames

TokenLogprobs = tuple[NamedLogprob, list[NamedLogprob]]  # the token that was drawn, and the likeliest ones


@dataclass(frozen=True)
class Piece:
    """Holds a part of an answer that no later token can change.

    Attributes:
        kind: what the part is.
        text: the part's text; "" for calls.
        calls: tool calls, if the part consists of calls.
        logprobs: the log-probabilities of the tokens since the last piece, if they were requested.
    """

    kind: PartKind
    text: str = ""
    calls: Sequence[ToolCall] = ()
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """Describes a request to the engine, and what is needed to read its answer.

    Attributes:
        model: the model's name at the engine.
        ids_request: the scrambled prompt, and how the answer is drawn.
        stop_strings: strings that end the text.
        tool_format: how the model writes calls, if tools were given.
        required_arguments: by each tool's name, the arguments that it requires.
        requires_tool_call: whether the answer must call a tool.
        may_reason: whether the template marks reasoning.
        first_kind: the kind of the text that comes first.
        answer_prefix: the beginning of the answer, which the engine continues.
        at_most_one_call: whether at most one call is accepted.
    """

    model: str
    ids_request: IdsRequest
    stop_strings: Sequence[str] = ()
    tool_format: ToolFormat | None = None
    required_arguments: RequiredArguments = field(default_factory=lambda: NO_TOOLS)
    requires_tool_call: bool = False
    may_reason: bool = False
    first_kind: Literal["content", "reasoning"] = "content"
    answer_prefix: str = ""
    at_most_one_call: bool = False


@dataclass
class Reply:
    """Asks the engine for one answer, and reads it. Iterate `pieces` once; closing that iterator ends the request.

    Attributes:
        codec: the key's codec.
        upstream: sends the request.
        request: what is asked for.
        receive_ids: is called with the ids of each chunk.
        index: the answer's index among the answers to one request of the application.
        memory: stores earlier answers, and this one when it ends.
        token_count: tokens that the engine made, without those that ended the answer.
        finish_reason: "stop", "length" or "tool_calls", at the end.
    """

    codec: Codec = field(repr=False)
    upstream: Upstream = field(repr=False)
    request: GenerationRequest = field(repr=False)
    receive_ids: ReceiveIds = field(repr=False)
    index: int = 0
    memory: AnswerMemory = field(default_factory=AnswerMemory, repr=False)
    token_count: int = 0
    finish_reason: str = "stop"
    _has_called_tool: bool = False
    _ids: list[int] = field(default_factory=list, repr=False)
    _spelling: SpellingCheck = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._spelling = SpellingCheck(
            self.codec, self.memory.spelling_history, self.request.ids_request.temperature > MAX_CHECKED_TEMPERATURE
        )

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields the answer.

        Raises:
            RemoteError: the engine fails.
            ToolUseFailed: a call that was demanded is missing.
            MisspeltAnswer: the answer's tokens are not those of its text.
        """
        texts, call_ids = {"content": "", "reasoning": ""}, list[str]()
        try:
            async with aclosing(self._checked_pieces()) as pieces:
                async for piece in pieces:
                    if piece.kind != "call":
                        texts[piece.kind] += piece.text
                    call_ids += [call.id for call in piece.calls]
                    yield piece
        except MisspeltAnswer:
            self.memory.misspelt_count += 1
            raise
        finally:
            with suppress(CodecError):
                self._spelling.close()
            # an application may send back an answer that broke off, too
            self.memory.remember(self.request.model, [*texts.values()], call_ids, self._ids)

    async def _checked_pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of the engine's chunks up to a stop string, then checks the whole answer."""
        request = self.request
        decoder = self.codec.stream_decoder(request.tool_format.special_tokens if request.tool_format else ())
        stops = StopStringFilter(request.stop_strings)
        sections = AnswerSplitter(
            request.tool_format, request.required_arguments, request.may_reason, request.first_kind
        )
        names, pending = TokenNames(self.codec), list[TokenLogprobs]()
        for piece in self._pieces_of(sections.push(request.answer_prefix)):
            yield piece
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                text = stops.push(self._decode(decoder, chunk))
                if chunk.finish and not stops.is_stopped:
                    text += stops.push(decoder.flush())
                    text += "" if stops.is_stopped else stops.flush()
                pending += map(names.drawn_and_best, chunk.logprobs)
                for piece in self._pieces_of(sections.push(text), pending):
                    yield piece
                if stops.is_stopped:
                    break
                self.finish_reason = chunk.finish or self.finish_reason
        self._spelling.flush()
        for piece in self._pieces_of(sections.flush(), pending):
            yield piece
        if pending:
            yield Piece(sections.kind, logprobs=tuple(pending))
        if self.finish_reason == "stop" and request.requires_tool_call and not self._has_called_tool:
            raise ToolUseFailed(
                "tool_choice demands a call, and the model's answer calls no tool of this request",
                "ask again, describe the tools in more words, or let tool_choice be auto",
            )
        if self._has_called_tool and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    async def _chunks(self) -> AsyncGenerator[IdsChunk, None]:
        """Asks the engine, and yields its chunks, checked and counted."""
        async with aclosing(self.upstream.generate(self.request.model, self.request.ids_request)) as chunks:
            async for chunk in chunks:
                self._require_known_ids(chunk)
                self.token_count += len(chunk.ids)
                self._ids += chunk.ids
                self.receive_ids(chunk.ids)
                self._spelling.push(chunk.ids)
                if chunk.finish:
                    self._spelling.flush()
                yield chunk

    def _require_known_ids(self, chunk: IdsChunk) -> None:
        """Raises RemoteError for an id that the model does not have, or for log-probabilities of other tokens."""
        size = len(self.codec.inverse)
        if any(token >= size for token in chunk.ids) or any(
            token.id >= size for row in chunk.logprobs for token in row
        ):
            raise RemoteError("the engine answered with an id that the model does not have", "is it the key's model?")
        if chunk.logprobs and [row[0].id for row in chunk.logprobs] != list(chunk.ids):
            raise RemoteError("the engine's log-probabilities are of other tokens than its answer", "don't trust it")

    @staticmethod
    def _decode(decoder: StreamDecoder, chunk: IdsChunk) -> str:
        try:
            return decoder.push(chunk.ids) if chunk.ids else ""
        except CodecError as error:
            raise RemoteError(
                f"the engine's answer cannot be read: {error.message}", "is it the key's model?"
            ) from None

    def _pieces_of(self, parts: Iterable[Part], pending: list[TokenLogprobs] | None = None) -> Iterator[Piece]:
        """Yields the pieces of parts of the text; the first of them takes the pending log-probabilities."""
        for part in parts:
            calls = part.calls
            self._spelling.add_escapes(part.escape_count)
            if calls and self.request.at_most_one_call:
                calls = [] if self._has_called_tool else calls[:1]
            self._has_called_tool = self._has_called_tool or bool(part.calls)
            if part.text or calls:
                yield Piece(part.kind, part.text, calls, tuple(pending or ()))
                if pending:
                    pending.clear()


# --- several answers at once ------------------------------------------------------------------------------------------
async def gather_pieces(replies: Sequence[Reply]) -> list[list[Piece]]:
    """Returns all pieces of each reply. If one fails, the others are cancelled, and its error is raised."""

    async def collect_pieces(reply: Reply) -> list[Piece]:
        async with aclosing(reply.pieces()) as iterator:
            return [piece async for piece in iterator]

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect_pieces(reply)) for reply in replies]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def merge_pieces(replies: Sequence[Reply]) -> AsyncGenerator[tuple[Reply, Piece | None], None]:
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

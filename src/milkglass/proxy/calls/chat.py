"""`POST /v1/chat/completions`, in OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from milkglass.proxy.backend import Backend
from milkglass.proxy.calls.bodies import ChatBody
from milkglass.proxy.reply import Logprobs, Piece, Reply, gathered, merged
from milkglass.proxy.text.calls import demanded_tool
from milkglass.rows.messages import templated, tools_of
from milkglass.server.storage.store import new_id


class ChatAnswer:
    """The answers of one request. It is made before anything is sent, and raises CodecError or UsageError.

    Attributes:
        replies: see reply.py; empty before it begins, in the event loop.
    """

    def __init__(self, backend: Backend, body: ChatBody) -> None:
        tools = [] if body.tool_choice == "none" else tools_of(body.tools)
        names = frozenset(one["function"]["name"] for one in tools)
        question = backend.chat(
            body.model, templated(body.messages), tools, demanded_tool(body.tool_choice, names),
            asked=body.of_template(), most=body.most, stops=body.stops, logit_bias=body.logit_bias,
            single=body.parallel_tool_calls is False,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None, **body.drawing(),
        )  # fmt: skip
        self._body, self._head = body, {"id": new_id("chatcmpl"), "created": int(time.time()), "model": question.model}
        self._prompt = len(question.request.prompt)
        self._begin: Callable[[], list[Reply]] = lambda: backend.replies(question, body.n or 1)
        self.replies: list[Reply] = []

    async def whole(self) -> dict[str, Any]:
        self.replies = self._begin()
        found = await gathered(self.replies)
        answers = [_message(reply, pieces) for reply, pieces in zip(self.replies, found, strict=True)]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": answers,
            "usage": usage(self._prompt, self.replies),
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a streamed answer."""
        head: dict[str, Any] = {**self._head, "object": "chat.completion.chunk"}
        self.replies = self._begin()
        calls = [0] * len(self.replies)
        for one in self.replies:
            yield {**head, "choices": [_chunk(one.index, {"role": "assistant", "content": ""})]}
        async with aclosing(merged(self.replies)) as pieces:
            async for reply, piece in pieces:
                if piece is None:
                    yield {**head, "choices": [_chunk(reply.index, {}, finish=reply.finish)]}
                    continue
                delta = _delta(piece, calls[reply.index])
                calls[reply.index] += len(piece.calls)
                yield {**head, "choices": [_chunk(reply.index, delta, logprobs_of(piece.logprobs))]}
        if self._body.with_usage:
            yield {**head, "choices": [], "usage": usage(self._prompt, self.replies)}


def usage(prompt: int, replies: Sequence[Reply]) -> dict[str, int]:
    made = sum(reply.tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def listed(found: Sequence[Logprobs]) -> list[dict[str, Any]]:
    return [{**taken.document(), "top_logprobs": [one.document() for one in top]} for taken, top in found]


def logprobs_of(found: Sequence[Logprobs]) -> dict[str, Any] | None:
    return {"content": listed(found), "refusal": None} if found else None


def text_of(pieces: Sequence[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def _message(reply: Reply, pieces: Sequence[Piece]) -> dict[str, Any]:
    calls = [call.document() for piece in pieces for call in piece.calls]
    content, reasoning = text_of(pieces, "content"), text_of(pieces, "reasoning")
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    found = [one for piece in pieces for one in piece.logprobs]
    return {
        "index": reply.index, "message": message, "logprobs": logprobs_of(found), "finish_reason": reply.finish
    }  # fmt: skip


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _delta(piece: Piece, called: int) -> dict[str, Any]:
    if piece.calls:
        return {"tool_calls": [{"index": called + n, **one.document()} for n, one in enumerate(piece.calls)]}
    return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}

"""Answers requests to /v1/chat/completions, /v1/completions and /v1/embeddings, in OpenAI's format."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

import numpy as np

from milkglass.errors import UsageError
from milkglass.proxy.backend import Backend
from milkglass.proxy.bodies import ChatBody, CompletionBody, EmbeddingBody
from milkglass.proxy.reply import Piece, Reply, TokenLogprobs, gather_pieces, merge_pieces
from milkglass.proxy.text.calls import demanded_tool
from milkglass.rows.messages import normalize_messages, tools_of
from milkglass.server.random_ids import new_id

MAX_CHOICES = 128  # the most answers of one request, all prompts together
MAX_EMBEDDING_INPUTS = 2048  # the most texts of one request for embeddings, as OpenAI has it


class ChatExchange:
    """Answers one request to /v1/chat/completions.

    Constructing it encodes the request, and raises CodecError or UsageError before anything is sent. `replies` is empty
    until `response` or `events` asks the engine.
    """

    def __init__(self, backend: Backend, body: ChatBody) -> None:
        tools = [] if body.tool_choice == "none" else tools_of(body.tools)
        names = frozenset(tool["function"]["name"] for tool in tools)
        request = backend.chat_request(
            body.model, normalize_messages(body.messages), tools, demanded_tool(body.tool_choice, names),
            template_fields=body.template_fields(), max_tokens=body.max_answer_tokens, stops=body.stops,
            logit_bias=body.logit_bias, at_most_one_call=body.parallel_tool_calls is False,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None, **body.sampling(),
        )  # fmt: skip
        self._body, self._head = body, {"id": new_id("chatcmpl"), "created": int(time.time()), "model": request.model}
        self._prompt_tokens = len(request.ids_request.prompt)
        self._start_replies: Callable[[], list[Reply]] = lambda: backend.replies(request, body.n or 1)
        self.replies: list[Reply] = []

    async def response(self) -> dict[str, Any]:
        """Returns the whole answer. Raises what `Reply.pieces` raises."""
        self.replies = self._start_replies()
        pieces_by_reply = await gather_pieces(self.replies)
        answers = [_chat_choice(reply, pieces) for reply, pieces in zip(self.replies, pieces_by_reply, strict=True)]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": answers,
            "usage": usage_document(self._prompt_tokens, self.replies),
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a streamed answer. Raises what `merge_pieces` raises."""
        head: dict[str, Any] = {**self._head, "object": "chat.completion.chunk"}
        self.replies = self._start_replies()
        call_counts, has_begun = [0] * len(self.replies), False
        async with aclosing(merge_pieces(self.replies)) as pieces:
            async for reply, piece in pieces:
                if not has_begun:
                    for choice in self.replies:
                        yield {**head, "choices": [_chunk_choice(choice.index, {"role": "assistant", "content": ""})]}
                    has_begun = True
                if piece is None:
                    yield {**head, "choices": [_chunk_choice(reply.index, {}, finish=reply.finish_reason)]}
                    continue
                delta = _delta(piece, call_counts[reply.index])
                call_counts[reply.index] += len(piece.calls)
                yield {**head, "choices": [_chunk_choice(reply.index, delta, logprobs_of(piece.logprobs))]}
        if self._body.includes_usage:
            yield {**head, "choices": [], "usage": usage_document(self._prompt_tokens, self.replies)}


def usage_document(prompt_tokens: int, replies: Sequence[Reply]) -> dict[str, int]:
    """Returns the numbers of tokens of a request in OpenAI's format."""
    completion_tokens = sum(reply.token_count for reply in replies)
    total_tokens = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total_tokens}


def logprob_documents(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Returns the log-probabilities of tokens in OpenAI's format for chats, each with the likeliest tokens."""
    return [{**drawn.document(), "top_logprobs": [best.document() for best in top]} for drawn, top in logprobs]


def logprobs_of(logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    """Returns the field `logprobs` of a choice of a chat; None if none were requested."""
    return {"content": logprob_documents(logprobs), "refusal": None} if logprobs else None


def text_of(pieces: Sequence[Piece], kind: str) -> str:
    """Returns the text of the pieces of one kind, joined."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def _chat_choice(reply: Reply, pieces: Sequence[Piece]) -> dict[str, Any]:
    calls = [call.document() for piece in pieces for call in piece.calls]
    content, reasoning = text_of(pieces, "content"), text_of(pieces, "reasoning")
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    return {
        "index": reply.index, "message": message, "logprobs": logprobs_of(logprobs),
        "finish_reason": reply.finish_reason,
    }  # fmt: skip


def _chunk_choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _delta(piece: Piece, call_count: int) -> dict[str, Any]:
    if piece.calls:
        return {"tool_calls": [{"index": call_count + n, **call.document()} for n, call in enumerate(piece.calls)]}
    return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}


def prompt_list(prompt: Any, max_prompts: int) -> list[str | list[int]]:
    """Returns the prompts of a field, which may be a text, texts, ids, or lists of ids.

    Raises UsageError for more than `max_prompts`.
    """
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(prompts) > max_prompts:
        raise UsageError(f"{len(prompts)} inputs are more than the {max_prompts} of one request", "send several")
    return list(prompts)


class CompletionExchange:
    """Answers one request to /v1/completions, grouped by prompt.

    Constructing it encodes the prompts, and raises CodecError or UsageError before anything is sent. `replies` is empty
    until `response` or `events` asks the engine.
    """

    def __init__(self, backend: Backend, body: CompletionBody) -> None:
        requests = [
            backend.completion_request(
                body.model, prompt, max_tokens=body.max_tokens, stops=body.stops, logit_bias=body.logit_bias,
                logprobs=body.logprobs, **body.sampling(),
            )
            for prompt in prompt_list(body.prompt, MAX_CHOICES // (body.n or 1))
        ]  # fmt: skip
        self._body, self._prompt_tokens = body, sum(len(request.ids_request.prompt) for request in requests)
        self._head: dict[str, Any] = {
            "id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": requests[0].model
        }  # fmt: skip
        self._backend, self._requests, self.replies = backend, requests, list[Reply]()

    def _start_replies(self) -> list[Reply]:
        count = self._body.n or 1
        return [
            reply
            for index, request in enumerate(self._requests)
            for reply in self._backend.replies(request, count, first_index=index * count)
        ]

    async def response(self) -> dict[str, Any]:
        """Returns the whole answer. Raises what `Reply.pieces` raises."""
        self.replies = self._start_replies()
        pieces_by_reply = await gather_pieces(self.replies)
        answers = []
        for reply, pieces in zip(self.replies, pieces_by_reply, strict=True):
            logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
            text = "".join(piece.text for piece in pieces)
            answers.append(_completion_choice(reply, text, logprobs, reply.finish_reason))
        return {**self._head, "choices": answers, "usage": usage_document(self._prompt_tokens, self.replies)}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a streamed answer. Raises what `merge_pieces` raises."""
        self.replies = self._start_replies()
        offsets = [0] * len(self.replies)
        async with aclosing(merge_pieces(self.replies)) as pieces:
            async for reply, piece in pieces:
                text, logprobs = ("", ()) if piece is None else (piece.text, piece.logprobs)
                finish = reply.finish_reason if piece is None else None
                choice = _completion_choice(reply, text, logprobs, finish, offsets[reply.index])
                yield {**self._head, "choices": [choice]}
                offsets[reply.index] += sum(len(drawn.token) for drawn, _ in logprobs)
        if self._body.includes_usage:
            yield {**self._head, "choices": [], "usage": usage_document(self._prompt_tokens, self.replies)}


def _completion_choice(
    reply: Reply, text: str, logprobs: Sequence[TokenLogprobs], finish: str | None, offset: int = 0
) -> dict[str, Any]:
    return {"index": reply.index, "text": text, "logprobs": _token_logprobs(logprobs, offset), "finish_reason": finish}


def _token_logprobs(logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any] | None:
    """Returns log-probabilities in OpenAI's format. `offset` is the number of characters of the tokens before."""
    if not logprobs:
        return None
    return {
        "tokens": [drawn.token for drawn, _ in logprobs],
        "token_logprobs": [drawn.logprob for drawn, _ in logprobs],
        "top_logprobs": [{token.token: token.logprob for token in (drawn, *top)} for drawn, top in logprobs],
        "text_offset": [*accumulate((len(drawn.token) for drawn, _ in logprobs[:-1]), initial=offset)],
    }


async def embed(backend: Backend, body: EmbeddingBody) -> dict[str, Any]:
    """Returns the embeddings of texts, as the body of an answer in OpenAI's format.

    Raises:
        CodecError, UsageError: a text cannot be encoded, or ids were given; nothing was sent.
        UnsupportedModel: the engine or the model makes no embeddings.
    """
    texts = prompt_list(body.input, MAX_EMBEDDING_INPUTS)
    if any(not isinstance(text, str) for text in texts):
        raise UsageError(
            "embeddings are made of texts: ids, as some clients send them, are another tokenizer's",
            "send texts; in LangChain with check_embedding_ctx_length=False",
        )
    rows = await asyncio.to_thread(backend.texts_to_embed, body.model, [str(text) for text in texts])
    vectors = await backend.embeddings(body.model, rows)
    token_count = sum(map(len, rows))
    return {
        "object": "list",
        "model": backend.model(body.model).name,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encode_vector(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": token_count, "total_tokens": token_count},
    }


def _encode_vector(vector: list[float], encoding: str) -> list[float] | str:
    return vector if encoding == "float" else base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()

"""OpenAI's /v1/chat/completions, /v1/completions and /v1/embeddings, in its format."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from milkglass.errors import UsageError
from milkglass.proxy.backend import Backend
from milkglass.proxy.bodies import ChatBody, CompletionBody, EmbeddingBody
from milkglass.proxy.reply import Logprobs, Piece, Reply, gathered, merged
from milkglass.proxy.text.calls import demanded_tool
from milkglass.rows.messages import normalize_messages, tools_of
from milkglass.server.random_ids import new_id

MOST_PROMPTS = 128  # answers of one request, all prompts together
MOST_INPUTS = 2048  # of one request, as OpenAI's


class ChatExchange:
    """The answers of one request. It is made before anything is sent, and raises CodecError or UsageError.

    `replies` is empty before it begins, in the event loop.
    """

    def __init__(self, backend: Backend, body: ChatBody) -> None:
        tools = [] if body.tool_choice == "none" else tools_of(body.tools)
        names = frozenset(tool["function"]["name"] for tool in tools)
        question = backend.chat(
            body.model, normalize_messages(body.messages), tools, demanded_tool(body.tool_choice, names),
            requested_options=body.of_template(), most=body.most, stops=body.stops, logit_bias=body.logit_bias,
            single=body.parallel_tool_calls is False,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None, **body.drawing(),
        )  # fmt: skip
        self._body, self._head = body, {"id": new_id("chatcmpl"), "created": int(time.time()), "model": question.model}
        self._prompt = len(question.request.prompt)
        self._begin: Callable[[], list[Reply]] = lambda: backend.replies(question, body.n or 1)
        self.replies: list[Reply] = []

    async def response(self) -> dict[str, Any]:
        self.replies = self._begin()
        pieces_of = await gathered(self.replies)
        answers = [_message(reply, pieces) for reply, pieces in zip(self.replies, pieces_of, strict=True)]
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
        for reply in self.replies:
            yield {**head, "choices": [_chunk(reply.index, {"role": "assistant", "content": ""})]}
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
    completion_tokens = sum(reply.tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": prompt + completion_tokens}


def logprob_documents(logprobs: Sequence[Logprobs]) -> list[dict[str, Any]]:
    return [{**drawn.document(), "top_logprobs": [best.document() for best in top]} for drawn, top in logprobs]


def logprobs_of(logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
    return {"content": logprob_documents(logprobs), "refusal": None} if logprobs else None


def text_of(pieces: Sequence[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def _message(reply: Reply, pieces: Sequence[Piece]) -> dict[str, Any]:
    calls = [call.document() for piece in pieces for call in piece.calls]
    content, reasoning = text_of(pieces, "content"), text_of(pieces, "reasoning")
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    return {
        "index": reply.index, "message": message, "logprobs": logprobs_of(logprobs), "finish_reason": reply.finish
    }  # fmt: skip


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _delta(piece: Piece, call_count: int) -> dict[str, Any]:
    if piece.calls:
        return {"tool_calls": [{"index": call_count + n, **call.document()} for n, call in enumerate(piece.calls)]}
    return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}


def prompts_of(prompt: Any, most: int = MOST_PROMPTS) -> list[str | list[int]]:
    """Returns the prompts in a text, texts, ids, or lists of ids. Raises UsageError for more than `most`."""
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(prompts) > most:
        raise UsageError(f"{len(prompts)} inputs are more than the {most} of one request", "send several")
    return list(prompts)


class CompletionExchange:
    """The answers of one request, those to one prompt side by side. See `ChatExchange`."""

    def __init__(self, backend: Backend, body: CompletionBody) -> None:
        questions = [
            backend.completion(
                body.model, prompt, most=body.max_tokens, stops=body.stops, logit_bias=body.logit_bias,
                logprobs=body.logprobs, **body.drawing(),
            )
            for prompt in prompts_of(body.prompt, MOST_PROMPTS // (body.n or 1))
        ]  # fmt: skip
        self._body, self._prompt = body, sum(len(question.request.prompt) for question in questions)
        self._head: dict[str, Any] = {
            "id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": questions[0].model
        }  # fmt: skip
        self._backend, self._questions, self.replies = backend, questions, list[Reply]()

    def _begin(self) -> list[Reply]:
        replies = [
            reply for question in self._questions for reply in self._backend.replies(question, self._body.n or 1)
        ]
        return [replace(reply, index=index) for index, reply in enumerate(replies)]

    async def response(self) -> dict[str, Any]:
        self.replies = self._begin()
        pieces_of = await gathered(self.replies)
        answers = []
        for reply, pieces in zip(self.replies, pieces_of, strict=True):
            logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
            answers.append(_choice(reply, "".join(piece.text for piece in pieces), logprobs, reply.finish))
        return {**self._head, "choices": answers, "usage": usage(self._prompt, self.replies)}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a streamed answer."""
        self.replies = self._begin()
        offsets = [0] * len(self.replies)
        async with aclosing(merged(self.replies)) as pieces:
            async for reply, piece in pieces:
                text, logprobs = ("", ()) if piece is None else (piece.text, piece.logprobs)
                finish = reply.finish if piece is None else None
                yield {**self._head, "choices": [_choice(reply, text, logprobs, finish, offsets[reply.index])]}
                offsets[reply.index] += sum(len(drawn.token) for drawn, _ in logprobs)
        if self._body.with_usage:
            yield {**self._head, "choices": [], "usage": usage(self._prompt, self.replies)}


def _choice(
    reply: Reply, text: str, logprobs: Sequence[Logprobs], finish: str | None, offset: int = 0
) -> dict[str, Any]:
    return {"index": reply.index, "text": text, "logprobs": _token_logprobs(logprobs, offset), "finish_reason": finish}


def _token_logprobs(logprobs: Sequence[Logprobs], offset: int) -> dict[str, Any] | None:
    """Returns log-probabilities in OpenAI's format. `offset` is the number of letters of the tokens before."""
    if not logprobs:
        return None
    return {
        "tokens": [drawn.token for drawn, _ in logprobs],
        "token_logprobs": [drawn.logprob for drawn, _ in logprobs],
        "top_logprobs": [{token.token: token.logprob for token in (drawn, *top)} for drawn, top in logprobs],
        "text_offset": [*accumulate((len(drawn.token) for drawn, _ in logprobs[:-1]), initial=offset)],
    }


async def embed(backend: Backend, body: EmbeddingBody) -> dict[str, Any]:
    """Embeds texts. Raises CodecError or UsageError before anything is sent, UnsupportedModel if the engine cannot."""
    texts = prompts_of(body.input, MOST_INPUTS)
    if any(not isinstance(text, str) for text in texts):
        raise UsageError(
            "embeddings are made of texts: ids, as some clients send them, are another tokenizer's",
            "send texts; in LangChain with check_embedding_ctx_length=False",
        )
    rows = backend.encoded([str(text) for text in texts])
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

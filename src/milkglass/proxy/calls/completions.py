"""`POST /v1/completions`, in OpenAI's format: a text to continue."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate
from typing import Any

from milkglass.errors import UsageError
from milkglass.proxy.backend import Backend
from milkglass.proxy.calls.bodies import CompletionBody
from milkglass.proxy.calls.chat import usage
from milkglass.proxy.reply import Logprobs, Reply, gathered, merged
from milkglass.server.storage.store import new_id

MOST_PROMPTS = 128  # answers of one request, all prompts together


def prompts_of(given: Any, most: int = MOST_PROMPTS) -> list[str | list[int]]:
    """Returns the prompts in a text, texts, ids, or lists of ids. Raises UsageError for more than `most`."""
    many = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if len(many) > most:
        raise UsageError(f"{len(many)} inputs are more than the {most} of one request", "send several")
    return list(many)


class CompletionAnswer:
    """The answers of one request. It is made before anything is sent, and raises CodecError or UsageError.

    Attributes:
        replies: for all prompts; replies to one prompt are side by side.
    """

    def __init__(self, backend: Backend, body: CompletionBody) -> None:
        questions = [
            backend.completion(
                body.model, prompt, most=body.max_tokens, stops=body.stops, logit_bias=body.logit_bias,
                logprobs=body.logprobs, **body.drawing(),
            )
            for prompt in prompts_of(body.prompt, MOST_PROMPTS // (body.n or 1))
        ]  # fmt: skip
        self._body, self._prompt = body, sum(len(one.request.prompt) for one in questions)
        self._head: dict[str, Any] = {
            "id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": questions[0].model
        }  # fmt: skip
        self._backend, self._questions, self.replies = backend, questions, list[Reply]()

    def _begin(self) -> list[Reply]:
        every = [reply for one in self._questions for reply in self._backend.replies(one, self._body.n or 1)]
        return [replace(reply, index=index) for index, reply in enumerate(every)]

    async def whole(self) -> dict[str, Any]:
        self.replies = self._begin()
        found = await gathered(self.replies)
        answers = []
        for reply, pieces in zip(self.replies, found, strict=True):
            logprobs = [one for piece in pieces for one in piece.logprobs]
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
                offsets[reply.index] += sum(len(taken.token) for taken, _ in logprobs)
        if self._body.with_usage:
            yield {**self._head, "choices": [], "usage": usage(self._prompt, self.replies)}


def _choice(
    reply: Reply, text: str, logprobs: Sequence[Logprobs], finish: str | None, offset: int = 0
) -> dict[str, Any]:
    return {"index": reply.index, "text": text, "logprobs": _logprobs(logprobs, offset), "finish_reason": finish}


def _logprobs(found: Sequence[Logprobs], offset: int) -> dict[str, Any] | None:
    """Returns log-probabilities in OpenAI's format. `offset` is the number of letters of the tokens before."""
    if not found:
        return None
    return {
        "tokens": [taken.token for taken, _ in found],
        "token_logprobs": [taken.logprob for taken, _ in found],
        "top_logprobs": [{one.token: one.logprob for one in (taken, *top)} for taken, top in found],
        "text_offset": [*accumulate((len(taken.token) for taken, _ in found[:-1]), initial=offset)],
    }

"""/v1/completions and /v1/embeddings (OpenAI's format, ids in and out) and /classify (vLLM's)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from milkglass.errors import MilkglassError
from milkglass.models.checkpoint import end_ids
from milkglass.server.context import SharedContext
from milkglass.server.http.errors import error_body
from milkglass.server.http.requests import (
    ClassificationRequest,
    CompletionRequest,
    EmbeddingRequest,
    as_rows,
    require_biased_ids_in_vocabulary,
    require_max_tokens,
    require_prompts,
    token_types,
)
from milkglass.server.http.routing import (
    CLIENT_GONE,
    EventStream,
    StrictRoute,
    result_unless_gone,
    sse_event,
    wait_for_disconnect,
)
from milkglass.server.inference.classifier import Classifier, ClassifierRow
from milkglass.server.inference.generator import Sequence
from milkglass.server.inference.model_cache import Task
from milkglass.server.random_ids import new_id

router = APIRouter(route_class=StrictRoute)


# --- completions ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Token:
    prompt_index: int
    id: int
    reason: str | None
    logprobs: list[tuple[int, float]]


@dataclass(eq=False)
class PromptRun:
    """Runs one request's prompts through an engine.

    Attributes:
        body: the request.
        prompts: the ids of each prompt.
        on_finished: called once, when all prompts have ended.
        answer_id: the id of the answer and of its stream's events.
        created: when the request came, in seconds since 1970.
        sequences: one for each prompt, made by `prepare`.
        answers: ids of each prompt's answer so far.
        logprobs: log-probabilities for each token of each answer, if they were requested.
    """

    body: CompletionRequest
    prompts: list[list[int]]
    on_finished: Callable[[], None] = lambda: None
    answer_id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=lambda: int(time.time()))
    sequences: list[Sequence] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def prepare(self, end_ids: frozenset[int]) -> None:
        """Makes a sequence of each prompt, whose tokens come to this event loop. `end_ids` end an answer."""
        loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[_Token | MilkglassError]()
        self._running = len(self.prompts)

        def put(arrival: _Token | MilkglassError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._on_arrival, arrival)

        def on_token(index: int, token: int, reason: str | None) -> None:
            put(_Token(index, token, reason, self.sequences[index].logprobs))

        self.answers = [[] for _ in self.prompts]
        self.logprobs: list[list[list[tuple[int, float]]]] = [[] for _ in self.prompts]
        for index, prompt in enumerate(self.prompts):
            sampling = self.body.sampling(end_ids, index)
            self.sequences.append(Sequence(prompt, sampling, partial(on_token, index), put))

    def _on_arrival(self, arrival: _Token | MilkglassError) -> None:
        self._queue.put_nowait(arrival)
        self._running -= isinstance(arrival, MilkglassError) or arrival.reason is not None
        if not self._running:
            self.on_finished()

    async def tokens(self) -> AsyncIterator[_Token]:
        """Yields tokens until every prompt has ended. Raises the engine's error."""
        unfinished = len(self.sequences)
        while unfinished:
            arrival = await self._queue.get()
            if isinstance(arrival, MilkglassError):
                raise arrival
            unfinished -= arrival.reason is not None
            self.answers[arrival.prompt_index].append(arrival.id)
            if arrival.logprobs:
                self.logprobs[arrival.prompt_index].append(arrival.logprobs)
            yield arrival

    def cancel(self) -> None:
        """Asks the engine to stop all sequences."""
        for sequence in self.sequences:
            sequence.is_cancelled = True

    def usage(self) -> dict[str, int]:
        """Returns the counts of tokens read and written, as OpenAI names them."""
        return _usage(self.prompts, [sequence.answer_ids for sequence in self.sequences])

    def answer(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Returns the body of an answer, or of an event of a stream."""
        head = {"id": self.answer_id, "object": "text_completion", "created": self.created, "model": self.body.model}
        return {**head, "choices": choices, **fields}


def _usage(prompts: Iterable[list[int]], answers: Iterable[list[int]] = ()) -> dict[str, int]:
    read, written = sum(map(len, prompts)), sum(map(len, answers))
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _choice(
    index: int, ids: list[int], reason: str | None, logprobs: Iterable[list[tuple[int, float]]]
) -> dict[str, Any]:
    """Returns a choice. As in vLLM, the id that stopped it is the last of `token_ids`, and `stop_reason` names it."""
    stop_id = ids[-1] if reason == "stop" else None
    return {
        "index": index, "text": "", "token_ids": ids, "logprobs": _logprobs(logprobs), "finish_reason": reason,
        "stop_reason": stop_id,
    }  # fmt: skip


def _logprobs(logprobs: Iterable[list[tuple[int, float]]]) -> dict[str, Any] | None:
    """Returns log-probabilities in OpenAI's format for chats, with ids in place of texts."""
    content = []
    for drawn_pair, *likeliest in logprobs:
        top = [{"token_id": token, "logprob": value} for token, value in likeliest]
        content.append({"token_id": drawn_pair[0], "logprob": drawn_pair[1], "top_logprobs": top})
    return {"content": content} if content else None


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, shared: SharedContext) -> Response:
    """Generates from prompts of ids. With `stream`, ids come as server-sent events."""
    model = await run_in_threadpool(shared.store.models.get, body.model)
    run = PromptRun(body, body.prompts())
    require_max_tokens(body.max_tokens, shared.settings)
    require_prompts(run.prompts, model, shared.settings, answer_tokens=body.max_tokens)
    require_biased_ids_in_vocabulary(body.logit_bias, model)
    entry = shared.model_cache.acquire(model, "generate")
    release = ExitStack()  # which is done once, by the first that closes it
    release.callback(shared.model_cache.release, entry)
    run.on_finished = release.close  # a reader who has stopped reading must not keep the model

    def close() -> None:
        run.cancel()
        release.close()
        if run.answers:
            shared.recording.record_answers(model, run.prompts, run.answers)

    async with AsyncExitStack() as closing:
        closing.callback(close)
        engine = await asyncio.wrap_future(entry.engine)
        run.prepare(await run_in_threadpool(end_ids, shared.registry.folder(model.id)))
        engine.submit(run.sequences)
        if body.stream:
            return EventStream(_stream(run), closing.pop_all())  # the stream's business now
        return await result_unless_gone(_complete_answer(run), wait_for_disconnect(request)) or CLIENT_GONE


async def _complete_answer(run: PromptRun) -> Response:
    reasons: list[str | None] = [None for _ in run.prompts]
    async for token in run.tokens():
        reasons[token.prompt_index] = token.reason
    choices = [_choice(index, ids, reasons[index], run.logprobs[index]) for index, ids in enumerate(run.answers)]
    return JSONResponse(run.answer(choices, usage=run.usage()))


async def _stream(run: PromptRun) -> AsyncGenerator[str, None]:
    try:
        async for token in run.tokens():
            logprobs = [token.logprobs] if token.logprobs else []
            yield sse_event(run.answer([_choice(token.prompt_index, [token.id], token.reason, logprobs)]))
        if run.body.stream_options and run.body.stream_options.include_usage:
            yield sse_event(run.answer([], usage=run.usage()))
    except MilkglassError as error:
        yield sse_event(error_body(error))
    yield sse_event("[DONE]")


# --- classification and embedding -------------------------------------------------------------------------------------
@router.post("/classify")
async def classify(body: ClassificationRequest, request: Request, shared: SharedContext) -> Response:
    """Returns the probability of each class, or a regression's number, for each row of ids."""
    return await _answer_rows(body, "classify", request, shared)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request, shared: SharedContext) -> Response:
    """Returns a vector of unit length for each row of ids."""
    return await _answer_rows(body, "embed", request, shared)


async def _answer_rows(
    body: ClassificationRequest | EmbeddingRequest, task: Task, request: Request, shared: SharedContext
) -> Response:
    model = await run_in_threadpool(shared.store.models.get, body.model)
    inputs = as_rows(body.input)
    require_prompts(inputs, model, shared.settings)
    token_types_by_row = (
        token_types(body, inputs, model) if isinstance(body, ClassificationRequest) else [None] * len(inputs)
    )
    entry = shared.model_cache.acquire(model, task)
    rows: list[ClassifierRow] = []
    try:
        engine = await asyncio.wrap_future(entry.engine)
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in inputs]
        for ids, row_types, future in zip(inputs, token_types_by_row, futures, strict=True):
            on_result, on_error = (
                _from_thread(loop, future, method) for method in (future.set_result, future.set_exception)
            )
            rows.append(ClassifierRow(ids, row_types, on_result, on_error))
        engine.submit(rows)
        answers = await result_unless_gone(asyncio.gather(*futures), wait_for_disconnect(request))
    finally:
        for row in rows:
            row.is_cancelled = True
        shared.model_cache.release(entry)
    if answers is None:
        return CLIENT_GONE
    shared.recording.record_inputs(model, inputs)
    if task == "embed":
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(answers)]
        return JSONResponse(_list_json("embd", model.id, inputs, data))
    is_regression = isinstance(engine, Classifier) and engine.is_regression
    return JSONResponse(_list_json("classify", model.id, inputs, _classification_json(answers, is_regression)))


def _from_thread(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[list[float]], method: Callable[[Any], None]
) -> Callable[[Any], None]:
    """Returns `method` for another thread. It does nothing if the future is done or the loop is closed."""

    def call(value: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if future.done() else method(value))

    return call


def _classification_json(answers: list[list[float]], is_regression: bool) -> list[dict[str, Any]]:
    """Returns one object for each row in vLLM's format; a regression has `score` in place of `label` and `probs`."""
    if is_regression:
        return [{"index": index, "score": score, "num_classes": 1} for index, (score, *_) in enumerate(answers)]
    return [
        {"index": index, "label": f"LABEL_{probs.index(max(probs))}", "probs": probs, "num_classes": len(probs)}
        for index, probs in enumerate(answers)
    ]


def _list_json(id_prefix: str, model: str, inputs: list[list[int]], data: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": new_id(id_prefix),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": _usage(inputs),
    }

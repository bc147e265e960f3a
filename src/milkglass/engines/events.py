"""Reads what engines' events have in common: errors, ids, ends, log-probabilities.

Reading is strict: whatever has another form raises RemoteError. vLLM's `/inference/v1/generate` and Milkglass's own
`/v1/completions` write events of one format:

    {"choices": [{"token_ids": [..], "finish_reason": null, "stop_reason": null,
                  "logprobs": {"content": [{"token_id", "logprob", "top_logprobs": [{"token_id", "logprob"}]}]}}]}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_args

from milkglass.client.remote.responses import is_number, is_whole, records_of
from milkglass.engines.engine import Call, Finish, IdLogprob, IdsChunk, IdsEngine, IdsRequest, Reader
from milkglass.errors import RejectedByServer, RemoteError, Unauthorized

ENGINE_HINT = "is it an engine of the kind that was named?"
ID_LIMIT = 1 << 31  # ids are below this
MAX_EMPTY_EVENTS = 1000  # events of an answer without an id, in all: engines report how far a prompt was read
ERROR_NAME = re.compile("[A-Za-z_]{1,40}")  # an engine's name of an error: without digits it names no id
STATUS_HINTS = {
    400: "the engine takes no such prompt or option: is the prompt too long, are the ids this model's?",
    401: "give the engine's key as the token; that of Milkglass's own server is in its home folder",
    403: "give the engine's key as the token; vLLM also answers 403 unless it is started with --tokens-only",
    404: "is a model of this name served there, by an engine of the kind that was named?",
    413: "the prompt is too long for this engine",
    429: "the engine is busy: try again",
    503: "the engine is busy, or still loading the model: try again",
}


def _parse_logprobs(choice: Mapping[str, Any], count: int, max_count: int) -> list[list[IdLogprob]]:
    """Returns the log-probabilities of `count` tokens of a choice, each with the `max_count` likeliest.

    Raises:
        RemoteError: they are missing, or there is not an entry for each token.
    """
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not count and not content:
        return []
    if not isinstance(content, list) or len(content) != count or not all(isinstance(entry, dict) for entry in content):
        raise RemoteError("the engine's log-probabilities do not fit its tokens", ENGINE_HINT)
    return drawn_and_best_logprobs(content, "token_id", max_count)


def require_no_error(event: Mapping[str, Any]) -> None:
    """Raises RemoteError for an event that reports an error. Engines refuse some requests in the middle."""
    error = event.get("error")
    if error is None:
        return
    code, error_name = (error.get("code"), error.get("type")) if isinstance(error, Mapping) else (None, None)
    if is_whole(code) and 400 <= code < 600:
        raise refusal(code, error_name)
    raise RemoteError("the engine stopped in the middle of an answer", "try again; the engine's log says more")


def refusal(status: int, error_name: Any) -> RemoteError:
    """Returns the error for an HTTP status of an engine. The engine's message is not used, because it may repeat ids.

    Args:
        status: the HTTP status, which becomes the error's `status`.
        error_name: the engine's name of the error, used if it is a plain word.
    """
    name = f" ({error_name})" if isinstance(error_name, str) and ERROR_NAME.fullmatch(error_name) else ""
    hint = STATUS_HINTS.get(status, "the engine's log says more")
    if 300 <= status < 400:
        hint = "redirects are not followed: give the address that it redirects to"
    error_types = {
        401: Unauthorized,
        403: Unauthorized,
        400: RejectedByServer,
        413: RejectedByServer,
        422: RejectedByServer,
    }
    error = error_types.get(status, RemoteError)(f"the engine answered {status}{name}", hint)
    error.status = status
    return error


def parse_ids(ids: Any) -> list[int]:
    """Returns token ids. Raises RemoteError for anything else than a list of ids below ID_LIMIT."""
    if not isinstance(ids, list) or not all(is_whole(token) and 0 <= token < ID_LIMIT for token in ids):
        raise RemoteError("the engine's answer has no token ids, or some that cannot be", ENGINE_HINT)
    return ids


def parse_finish(reason: Any) -> Finish | None:
    """Returns why an answer ended; None if it goes on. Raises RemoteError for any other reason."""
    if reason is None or reason in get_args(Finish):
        return reason
    raise RemoteError("the engine broke the answer off", "try again; the engine's log says why")


def drawn_and_best_logprobs(
    content: Sequence[Mapping[str, Any]], id_field: str, max_count: int
) -> list[list[IdLogprob]]:
    """Returns for each entry the token that was drawn, then the `max_count` likeliest.

    Args:
        content: entries with an id, its "logprob", and the likeliest ones as "top_logprobs".
        id_field: the field of the id.
        max_count: how many of the likeliest tokens are returned.
    """

    def entry_logprob(entry: Mapping[str, Any]) -> IdLogprob:
        return parse_logprob(entry.get(id_field), entry.get("logprob"))

    return [
        best_first(
            entry_logprob(entry),
            [entry_logprob(alternative) for alternative in records_of(entry, "top_logprobs")],
            max_count,
        )
        for entry in content
    ]


def parse_logprob(token: Any, number: Any) -> IdLogprob:
    """Returns the log-probability `number` of a token id. Raises RemoteError unless both are valid numbers."""
    if not is_whole(token) or not 0 <= token < ID_LIMIT or not is_number(number):
        raise RemoteError("the engine's log-probabilities are not numbers of tokens", ENGINE_HINT)
    return IdLogprob(token, float(number))


def best_first(drawn_logprob: IdLogprob, best: Sequence[IdLogprob], count: int) -> list[IdLogprob]:
    """Returns the token that was drawn, then the `count` likeliest of `best`, the likeliest first."""
    return [drawn_logprob, *sorted(best, key=lambda token: -token.logprob)[:count]]


class EmbeddingEngine(IdsEngine):
    """Embeds rows of ids by OpenAI's `/v1/embeddings`."""

    def embedding(self, model: str, rows: Sequence[Sequence[int]]) -> Call:
        return Call("/v1/embeddings", {"model": model, "input": [list(row) for row in rows]})

    def vectors(self, answer: Mapping[str, Any]) -> list[list[float]]:
        vectors = [row.get("embedding") for row in sorted(records_of(answer), key=_index_in_answer)]
        if not all(isinstance(vector, list) and vector and all(map(is_number, vector)) for vector in vectors):
            raise RemoteError("the engine's vectors are not numbers", "does it serve an embedding model?")
        return [[float(number) for number in vector] for vector in vectors if vector is not None]


class ChoiceEngine(EmbeddingEngine):
    """Reads events of the format that vLLM and Milkglass share (see the module).

    Attributes:
        options: the sampling options that these engines honour.
    """

    # By name: a new option is refused until `completion` sends it
    options: ClassVar[frozenset[str]] = frozenset({
        "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
        "logprobs",
    })  # fmt: skip

    def reader(self, request: IdsRequest) -> Reader:
        """Returns a reader that drops the id that ended the answer, which is the last of `token_ids`."""

        def read(event: Mapping[str, Any]) -> IdsChunk:
            require_no_error(event)
            choices = records_of(event, "choices")
            if not choices:  # the event that counts tokens
                return IdsChunk()
            if len(choices) > 1:
                raise RemoteError("the engine sent more than the one answer that was asked for", ENGINE_HINT)
            ids = parse_ids(choices[0].get("token_ids"))
            finish = parse_finish(choices[0].get("finish_reason"))
            logprobs = _parse_logprobs(choices[0], len(ids), request.logprobs) if request.logprobs is not None else []
            count = len(ids) - (finish == "stop" and bool(ids))
            return IdsChunk(ids[:count], logprobs[:count], finish)

        return read


def _index_in_answer(row: Mapping[str, Any]) -> int:
    """Returns the `index` of an entry of an answer, or -1 if it has none."""
    index = row.get("index")
    return index if is_whole(index) else -1


class AnswerBounds:
    """Checks the bounds of one streamed answer: `max_tokens` ids, one end, and few events without ids.

    Attributes:
        ended: whether the engine has ended the answer and said why.
    """

    def __init__(self, request: IdsRequest) -> None:
        self._max_tokens = self._tokens_left = request.max_tokens
        self._empty_left, self._logprobs, self.ended = MAX_EMPTY_EVENTS, request.logprobs is not None, False

    def check(self, chunk: IdsChunk) -> IdsChunk:
        """Counts a chunk and returns it. Raises RemoteError if it exceeds the bounds."""
        self._tokens_left -= len(chunk.ids)
        if self._tokens_left < 0 or (self.ended and (chunk.ids or chunk.finish)):
            raise RemoteError(
                f"the engine sent more than the {self._max_tokens} tokens of one answer", "don't trust it"
            )
        if self._logprobs and len(chunk.logprobs) != len(chunk.ids):
            raise RemoteError("the engine sent tokens without their log-probabilities", "ask for none, or try again")
        self._empty_left -= not chunk.ids
        if self._empty_left < 0:
            raise RemoteError(f"the answer has more than {MAX_EMPTY_EVENTS} events without a token", "don't trust it")
        self.ended = self.ended or chunk.finish is not None
        return chunk

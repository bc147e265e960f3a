"""Uses a stock engine that takes vectors as a prompt: vLLM's OpenAI-compatible server with `--enable-prompt-embeds`.

`POST /v1/completions` gets the prompt's vectors as `prompt_embeds`: base64 of a (t, d) tensor written by `torch.save`.
The engine has the embedding layer too and embeds the ids that it makes, so only the prompt's vectors are sent, once.
**The server can read the ids of the answer, hence its text**, as with `milkglass split serve`.

The engine releases no table and does not say which one it has. The enclave is built with a split server of the same
model. Nothing checks that both have the same model. Written for vLLM 0.33.0 (`entrypoints/openai/completion`,
`renderers/embed_utils.py`). Nothing is unpickled here.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.client.remote.connection import Connection, RetryPolicy, server_events
from milkglass.client.remote.responses import is_whole, records_of
from milkglass.client.remote.strict_json import parse_object
from milkglass.errors import RemoteError, TooLong, Unauthorized, Unreachable, UsageError
from milkglass.split.spec import MAX_COUNT, DecoderInfo

if TYPE_CHECKING:
    import torch

    from milkglass.split.decoder.client import SplitSampling, VectorOf

MODELS_PATH, COMPLETIONS_PATH = "/v1/models", "/v1/completions"
ENGINE_FLAG = "--enable-prompt-embeds"
HINT = f"is vLLM's server there, started with {ENGINE_FLAG}?"
FINISH_REASONS = ("stop", "length")  # the values of finish_reason that are accepted
MAX_EMPTY_EVENTS = 1000  # the most events of an answer that have no id


@dataclass(frozen=True)
class PromptEmbedsEngine:
    """Talks to a stock engine.

    Attributes:
        url: the engine's address.
        model: the engine's name for the model.
        bearer_token: the engine's API key. None: none is sent.
        allow_http: whether the token may cross a network unencrypted.
        authority: a PEM file with the engine's certificate or its authority. None: the system's authorities.
        retry: how often and when an undelivered request is retried.
        stop_token_ids: ids that end an answer, besides the ids of the engine's own `generation_config.json`.
    """

    url: str
    model: str
    bearer_token: str | None = field(default=None, repr=False)
    allow_http: bool = False
    authority: Path | None = None
    retry: RetryPolicy = RetryPolicy()
    stop_token_ids: tuple[int, ...] = ()

    def info(self, table_info: Mapping[str, Any]) -> DecoderInfo:
        """Asks the engine for the model's limits, given an open enclave's `table_info`. Raises RemoteError."""
        with self.connection() as connection:
            entries = records_of(connection.json("GET", MODELS_PATH))
        names = [str(entry.get("id")) for entry in entries]
        if self.model not in names:
            listed = ", ".join(names[:5]) or "none"
            raise RemoteError(f"the engine serves no model {self.model!r}", f"it serves {listed}")
        max_model_length = entries[names.index(self.model)].get("max_model_len")
        if not is_whole(max_model_length) or not 2 <= max_model_length <= MAX_COUNT:
            raise RemoteError("the engine's answer has no usable max_model_len", HINT)
        return DecoderInfo(
            self.model, int(table_info["width"]), int(table_info["rows"]), max_model_length, max_model_length - 1, 1,
            str(table_info["table"]), str(table_info["dtype"]),
        )  # fmt: skip

    def stream(self, info: DecoderInfo, sampling: SplitSampling, dtype: str) -> PromptEmbedsStream:
        """Returns a stream for one prompt. Its vectors can have any floating type: `dtype` is ignored."""
        return PromptEmbedsStream(self, info, sampling)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yields a connection. Its RemoteErrors have a hint for this engine."""
        with closing(
            Connection(self.url, self.bearer_token, self.allow_http, self.authority, retry=self.retry)
        ) as connection:
            try:
                yield connection
            except RemoteError as error:
                raise with_engine_hint(error) from error


class PromptEmbedsStream:
    """Sends one prompt and reads its answer. `ids` can be called once.

    Attributes:
        sent_bytes: bytes of the prompt's vectors as they were sent, in base64.
        received_bytes: bytes of the events' data.
    """

    def __init__(self, engine: PromptEmbedsEngine, info: DecoderInfo, sampling: SplitSampling) -> None:
        self._engine, self._info, self._sampling = engine, info, sampling
        self._ids_left = sampling.max_tokens
        self._finish_reason: str | None = None  # why the answer ended
        self.sent_bytes = self.received_bytes = 0

    def ids(self, prompt: torch.Tensor, vector_of: VectorOf) -> Iterator[int]:
        """Yields the ids of the answer to a prompt (t, d). `vector_of` is not called: the engine embeds its own ids.

        Raises:
            TooLong: the prompt is too long; nothing was sent.
            UsageError: the vectors do not fit the model, or are not finite; nothing was sent.
            RemoteError: the engine refuses, or its answer is not as agreed.
            Unreachable: the engine is not there, or the answer broke off.
        """
        body, empty_count = self._body(prompt), 0
        with self._engine.connection() as connection, connection.stream("POST", COMPLETIONS_PATH, body) as stream:
            for _, _, data in server_events(stream):
                self.received_bytes += len(data.encode())
                if data.strip() == "[DONE]":
                    self._require_finish_reason()
                    return
                new_ids = self._ids_of(parse_object(data, "an event of the answer"))
                yield from new_ids
                empty_count += not new_ids
                if empty_count > MAX_EMPTY_EVENTS:
                    raise RemoteError(f"the answer has more than {MAX_EMPTY_EVENTS} events without an id", "try again")
        raise Unreachable("the answer broke off before its end", "try again")

    def _body(self, prompt: torch.Tensor) -> dict[str, Any]:
        """Returns the body of the request for an answer to a prompt (t, d). Raises TooLong, UsageError."""
        sampling, info = self._sampling, self._info
        if len(prompt) + sampling.max_tokens > info.max_length:
            raise TooLong(
                f"{len(prompt)} tokens and {sampling.max_tokens} of an answer exceed {info.max_length}",
                "shorten the prompt, or lower max_tokens",
            )
        packed = pack_vectors(prompt, info.width)
        self.sent_bytes = len(packed)
        seed = {} if sampling.seed is None else {"seed": sampling.seed}
        stop = {"stop_token_ids": list(self._engine.stop_token_ids)} if self._engine.stop_token_ids else {}
        return {
            "model": self._engine.model, "prompt_embeds": packed, "return_token_ids": True,
            "stream": True, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": 0.0, "repetition_penalty": 1.0,  # otherwise generation_config.json decides
            **seed, **stop,
        }  # fmt: skip

    def _ids_of(self, answer: Mapping[str, Any]) -> list[int]:
        """Returns the ids of an event, and records why the answer ended. Raises RemoteError."""
        error = answer.get("error")
        if isinstance(error, dict):
            raise RemoteError(f"the engine stopped: {error.get('message') or 'no reason given'}", "try again")
        choices = records_of(answer, "choices")
        if not choices:  # the event that counts tokens
            return []
        choice, vocabulary = choices[0], self._info.vocabulary
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        if ids is None:
            raise RemoteError("the engine's answer has no token_ids", "it needs a version that knows return_token_ids")
        if not isinstance(ids, list) or not all(is_whole(token_id) and 0 <= token_id < vocabulary for token_id in ids):
            raise RemoteError(f"the engine's ids are not numbers below {vocabulary}", "is it of the enclave's model?")
        if len(choices) > 1 or len(ids) > self._ids_left or (ids and self._finish_reason is not None):
            raise RemoteError(
                f"the engine sent more than the {self._sampling.max_tokens} ids of one answer",
                "don't trust this server",
            )
        if reason is not None and reason not in FINISH_REASONS:
            raise RemoteError(f"the engine ended the answer with {reason!r}, not with stop or length", "try again")
        self._ids_left, self._finish_reason = self._ids_left - len(ids), reason or self._finish_reason
        return ids

    def _require_finish_reason(self) -> None:
        """Raises RemoteError if the engine did not say why the answer ended."""
        if self._finish_reason is None:
            raise RemoteError("the engine's answer has no finish_reason", HINT)


def pack_vectors(vectors: torch.Tensor, width: int) -> str:
    """Encodes vectors (t, width) for `prompt_embeds`, as base64 of a file of `torch.save`. Raises UsageError."""
    import torch

    if vectors.dim() != 2 or vectors.shape[1] != width or not len(vectors) or not vectors.is_floating_point():
        raise UsageError(f"vectors of shape {tuple(vectors.shape)} and {vectors.dtype}", f"give (t, {width}), floating")
    if not torch.isfinite(vectors).all():
        raise UsageError("the vectors hold a number that is not finite", "give rows of the model's own table")
    file = io.BytesIO()
    # Without a clone, the whole storage of a view would be saved
    torch.save(vectors.detach().cpu().clone(memory_format=torch.contiguous_format), file)
    return base64.b64encode(file.getvalue()).decode()


def with_engine_hint(error: RemoteError) -> RemoteError:
    """Returns the error with a hint for this engine, which the hints for Milkglass's servers do not fit."""
    if isinstance(error, Unauthorized):
        hint = "give the engine's --api-key as the token"
    elif "enable-prompt-embeds" in error.message:
        hint = f"start the engine with {ENGINE_FLAG}"
    else:
        hint = HINT if not error.hint or "milkglass" in error.hint else error.hint
    error_of_engine = type(error)(error.message, hint)
    error_of_engine.status = error.status
    return error_of_engine

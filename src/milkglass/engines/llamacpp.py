"""Translates requests to llama.cpp's server, started as `llama-server -m FILE.gguf --alias NAME`.

The file must be one that `milkglass export` wrote.

`POST /completion` takes ids and streams one event for each token, including the token that ends the answer; only the
next event says that the answer ended. A token that may have ended the answer is therefore held until the next event:
one of `stop_ids`, or one without text, which in an exported file is an end id.

The server stops at strings, not at ids. In an exported file every token has its own name (`opaque_name`), which no text
of other names contains, so that the name of an id stops there and nowhere else. A file with a real vocabulary is
refused, since the server sends no event for a token that is not a whole character.

Presence and frequency penalties count the prompt as well here, so they are not offered. Written for llama.cpp 0.6.0
(`tools/server`); tests/engines/test_real.py runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from milkglass.client.remote.responses import MODEL_SHAPE, is_count, records_of
from milkglass.engines.engine import (
    Call,
    Finish,
    IdLogprob,
    IdsChunk,
    IdsEngine,
    IdsRequest,
    Reader,
    ServedModel,
    name_of,
    opaque_name,
)
from milkglass.engines.events import ENGINE_HINT, drawn_and_best_logprobs, parse_finish, parse_ids, require_no_error
from milkglass.errors import RemoteError

SEED_COUNT = (1 << 32) - 1  # number of seeds: the largest 32-bit number asks the server for a random one
FINISH_OF_STOP_TYPE = {"eos": "stop", "word": "stop", "limit": "length"}
EXPORT_HINT = "serve a file that `milkglass export` wrote"


@dataclass(frozen=True)
class LlamaCpp(IdsEngine):
    """Translates requests for generation.

    Embeddings are not offered, since llama.cpp averages parts of a row where a batch has two (docs/log.md).
    """

    name: ClassVar[str] = "llamacpp"
    options: ClassVar[frozenset[str]] = frozenset(
        {"top_k", "min_p", "seed", "repetition_penalty", "logit_bias", "logprobs"}
    )

    def completion(self, model: str, request: IdsRequest) -> Call:
        """Returns the call. The model's name is not sent, since the server has one model."""
        body: dict[str, Any] = {
            "prompt": list(request.prompt), "n_predict": request.max_tokens, "temperature": request.temperature,
            "top_p": request.top_p, "top_k": request.top_k, "min_p": request.min_p,
            "repeat_penalty": request.repetition_penalty, "repeat_last_n": len(request.prompt) + request.max_tokens,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "typical_p": 1.0, "mirostat": 0, "dynatemp_range": 0.0,
            "dry_multiplier": 0.0, "xtc_probability": 0.0, "ignore_eos": False, "stream": True, "return_tokens": True,
            "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],  # in vLLM's order
            "stop": [opaque_name(token) for token in request.stop_ids],
            "response_fields": ["stop", "stop_type", "tokens", "tokens_predicted"],  # else the end repeats the prompt
        }  # fmt: skip
        if request.seed is not None:
            body["seed"] = request.seed % SEED_COUNT
        if request.logit_bias:
            body["logit_bias"] = [[token, bias] for token, bias in request.logit_bias.items()]
        if request.logprobs is not None:
            body["n_probs"] = max(1, request.logprobs)
        return Call("/completion", body)

    def reader(self, request: IdsRequest) -> Reader:
        return _LlamaCppReader(request).read

    def served_models(self, answer: Mapping[str, Any]) -> list[ServedModel]:
        return [_served_model(record) for record in MODEL_SHAPE.records_of(answer)]


def _served_model(record: Mapping[str, Any]) -> ServedModel:
    """Returns a served model. Its name is the file's unless `--alias` gives one."""
    meta = record.get("meta")
    length = meta.get("n_ctx") if isinstance(meta, Mapping) else None
    return ServedModel(name_of(record), length if is_count(length) else None, None, "decoder", record.get("owned_by"))


class _LlamaCppReader:
    """Reads the events of one answer, and holds the token that may have ended it until the next event."""

    def __init__(self, request: IdsRequest) -> None:
        self._request, self._stop_ids, self._tokens_seen = request, frozenset(request.stop_ids), 0
        self._pending: list[tuple[int, list[IdLogprob]]] = []  # the token that may have ended the answer, if any

    def read(self, event: Mapping[str, Any]) -> IdsChunk:
        require_no_error(event)
        is_end = event.get("stop") is True
        tokens = [] if is_end else self._read_tokens(event)
        if event.get("tokens_predicted") != self._tokens_seen:
            raise RemoteError("the engine left tokens out of its answer", EXPORT_HINT)
        if is_end:
            return self._last_chunk(event)
        certain, self._pending = self._pending + tokens, []
        if tokens and (event.get("content") == "" or tokens[-1][0] in self._stop_ids):
            self._pending = [certain.pop()]
        return self._chunk(certain)

    def _read_tokens(self, event: Mapping[str, Any]) -> list[tuple[int, list[IdLogprob]]]:
        ids = parse_ids(event.get("tokens"))
        if event.get("content") not in ("", "".join(map(opaque_name, ids))):
            raise RemoteError("the engine's model has another vocabulary than opaque names", EXPORT_HINT)
        self._tokens_seen += len(ids)
        return list(zip(ids, self._logprobs(event, ids), strict=True))

    def _last_chunk(self, event: Mapping[str, Any]) -> IdsChunk:
        """Returns the last chunk: the held token is part of the answer unless it ended it. Raises RemoteError."""
        finish = parse_finish(FINISH_OF_STOP_TYPE.get(str(event.get("stop_type")), "unknown"))
        if finish == "stop" and not self._pending:
            raise RemoteError("the engine's answer ended at no token", EXPORT_HINT)
        return self._chunk([] if finish == "stop" else self._pending, finish)

    def _chunk(self, tokens: list[tuple[int, list[IdLogprob]]], finish: Finish | None = None) -> IdsChunk:
        logprobs = [row for _, row in tokens] if self._request.logprobs is not None else []
        return IdsChunk([token for token, _ in tokens], logprobs, finish)

    def _logprobs(self, event: Mapping[str, Any], ids: list[int]) -> list[list[IdLogprob]]:
        if self._request.logprobs is None:
            return [[] for _ in ids]
        entries = records_of(event, "completion_probabilities")
        if [entry.get("id") for entry in entries] != ids:
            raise RemoteError("the engine's log-probabilities do not fit its tokens", ENGINE_HINT)
        return drawn_and_best_logprobs(entries, "id", self._request.logprobs)

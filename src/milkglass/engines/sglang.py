"""SGLang's server: `python -m sglang.launch_server --model-path FOLDER --skip-tokenizer-init`.

An event of `POST /generate` has all ids so far, or with `--incremental-streaming-output` only the new ones, which sends
less: n ids take n^2 / 2 otherwise. `completion_tokens` distinguishes the two. Repetition penalties count the answer
alone there and seeds need another mode, so neither is offered. Written for SGLang 0.5.23
(`srt/managers/tokenizer_manager.py`) and not run, since it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from milkglass.client.remote.responses import is_count
from milkglass.engines.engine import Call, IdLogprob, IdsChunk, IdsRequest, Reader
from milkglass.engines.events import (
    ENGINE_HINT,
    EmbeddingEngine,
    best_first,
    parse_finish,
    parse_ids,
    parse_logprob,
    require_no_error,
)
from milkglass.errors import RemoteError


@dataclass(frozen=True)
class SGLang(EmbeddingEngine):
    """Generates; with an embedding model (`--is-embedding`) embeds."""

    name: ClassVar[str] = "sglang"
    options: ClassVar[frozenset[str]] = frozenset(
        {"top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"}
    )

    def completion(self, model: str, request: IdsRequest) -> Call:
        """Returns the call. The model's name is not sent: the server has one model, and names choose only adapters."""
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p,
            "top_k": request.top_k or -1, "min_p": request.min_p, "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty, "repetition_penalty": 1.0,
            "stop_token_ids": list(request.stop_ids), "ignore_eos": False, "min_new_tokens": 0,
        }  # fmt: skip
        if request.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
        body: dict[str, Any] = {"input_ids": list(request.prompt), "sampling_params": sampling, "stream": True}
        if request.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": request.logprobs, "logprob_start_len": -1}
        return Call("/generate", body)

    def reader(self, request: IdsRequest) -> Reader:
        return _SGLangReader(request).read


class _SGLangReader:
    """Reads the events of one answer, each with the new ids or with all ids so far."""

    def __init__(self, request: IdsRequest) -> None:
        self._request, self._received_count = request, 0

    def read(self, event: Mapping[str, Any]) -> IdsChunk:
        require_no_error(event)
        ids, meta = parse_ids(event.get("output_ids") or []), event.get("meta_info")
        if not isinstance(meta, Mapping) or not is_count(meta.get("completion_tokens")):
            raise RemoteError("the engine's answer has no completion_tokens", ENGINE_HINT)
        total = meta["completion_tokens"]
        new_count = total - self._received_count
        if new_count < 0 or len(ids) not in (new_count, total):
            raise RemoteError("the engine's ids do not fit its count of tokens", ENGINE_HINT)
        self._received_count = total
        reason = meta.get("finish_reason")
        finish = parse_finish(reason.get("type") if isinstance(reason, Mapping) else reason)
        logprobs = self._logprobs(meta, new_count, total) if self._request.logprobs is not None else []
        id_count = new_count
        if finish == "stop" and new_count and isinstance(reason, Mapping) and reason.get("matched") == ids[-1]:
            id_count -= 1
        return IdsChunk(ids[len(ids) - new_count :][:id_count], logprobs[:id_count], finish)

    def _logprobs(self, meta: Mapping[str, Any], new_count: int, total: int) -> list[list[IdLogprob]]:
        """Returns the log-probabilities of the last `new_count` of `total` tokens.

        Both lists of `meta` are of the new tokens or of all. An entry is [log-probability, id, text].
        """
        drawn, best = meta.get("output_token_logprobs"), meta.get("output_top_logprobs")
        count = self._request.logprobs or 0
        if count and (not isinstance(best, list) or len(best) not in (new_count, total)):
            raise RemoteError("the engine's log-probabilities do not fit its tokens", ENGINE_HINT)
        if not isinstance(drawn, list) or len(drawn) not in (new_count, total):
            raise RemoteError("the engine's log-probabilities do not fit its tokens", ENGINE_HINT)
        rows = best[len(best) - new_count :] if count and isinstance(best, list) else [[]] * new_count
        return [
            best_first(
                _entry(entry), [_entry(alternative) for alternative in row] if isinstance(row, list) else [], count
            )
            for entry, row in zip(drawn[len(drawn) - new_count :], rows, strict=True)
        ]


def _entry(entry: Any) -> IdLogprob:
    if not isinstance(entry, list) or len(entry) < 2:
        raise RemoteError("the engine's log-probabilities are not numbers of tokens", ENGINE_HINT)
    return parse_logprob(entry[1], entry[0])

"""Milkglass's own server, `milkglass serve` (docs/api.md), the only engine here that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from milkglass.engines.engine import Call, IdsRequest
from milkglass.engines.events import ChoiceEngine


@dataclass(frozen=True)
class MilkglassServer(ChoiceEngine):
    """Generates by `POST /v1/completions` with ids. An encoder embeds: the mean of its last hidden states, of length 1.

    All settings come from the request; no generation_config.json has an effect.
    """

    name: ClassVar[str] = "milkglass"

    def completion(self, model: str, request: IdsRequest) -> Call:
        body: dict[str, Any] = {
            "model": model, "prompt": list(request.prompt), "max_tokens": request.max_tokens, "stream": True,
            "temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k,
            "stop_token_ids": list(request.stop_ids), "min_p": request.min_p,
            "presence_penalty": request.presence_penalty, "frequency_penalty": request.frequency_penalty,
            "repetition_penalty": request.repetition_penalty,
        }  # fmt: skip
        if request.seed is not None:
            body["seed"] = request.seed
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
        if request.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
        return Call("/v1/completions", body)

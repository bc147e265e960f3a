"""vLLM's server: `vllm serve FOLDER --tokens-only`, which loads no tokenizer.

It is called at `POST /inference/v1/generate`, not `/v1/completions`. With `--tokens-only` both take ids, but the
completions endpoint writes log-probabilities as text and needs a tokenizer for them. Generate has ids and numbers only,
returns no text, and refuses what would need it. Without `--tokens-only` (or `--skip-tokenizer-init
--enable-scale-out`) it answers 403. Written for vLLM 0.32.0 (`entrypoints/scale_out/token_in_token_out`);
tests/engines/test_real.py runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from milkglass.engines.engine import Call, IdsRequest
from milkglass.engines.events import ChoiceEngine


@dataclass(frozen=True)
class VLLM(ChoiceEngine):
    """Generates; embeds with `--runner pooling` and the folder of `milkglass export --for transformers`."""

    name: ClassVar[str] = "vllm"

    def completion(self, model: str, request: IdsRequest) -> Call:
        sampling = {
            "max_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p,
            "top_k": request.top_k, "min_p": request.min_p, "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty, "repetition_penalty": request.repetition_penalty,
            "stop_token_ids": list(request.stop_ids), "ignore_eos": False, "detokenize": False,
            "seed": request.seed, "logprobs": request.logprobs and request.logprobs + 1,  # the one taken is among them
            "logit_bias": {str(token): bias for token, bias in request.logit_bias.items()} or None,
        }  # fmt: skip
        body = {"model": model, "token_ids": list(request.prompt), "stream": True, "sampling_params": sampling}
        return Call("/inference/v1/generate", body)

"""GGUF files of every family that is written, served by llama.cpp itself: logits are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.engines.engine import IdsRequest
from milkglass.models.checkpoint import Checkpoint, end_ids
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny
from tests.engines.real import running
from tests.engines.test_real import ask, ids

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
WIDE = {**tiny.LLAMA, "hidden_size": 64, "head_dim": 16, "initializer_range": 0.2}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {
    "vocab_size": tiny.VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama with biases": LlamaConfig(**WIDE, attention_bias=True, tie_word_embeddings=False),
    "llama 3": LlamaConfig(**WIDE, rope_parameters=LLAMA_3),
    "llama in fp16": LlamaConfig(**WIDE, dtype="float16"),
    "llama in bf16": LlamaConfig(**WIDE, dtype="bfloat16"),
    "mistral": MistralConfig(**WIDE, sliding_window=None),
    "qwen2": Qwen2Config(**WIDE),
    "qwen3": Qwen3Config(**WIDE),
    "gpt2": GPT2Config(**GPT2),
}
PROMPT = [40, 9, 41, 200, 42, 43, 120, 7]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_computes_the_same_in_llama_cpp(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    base = Checkpoint.open(tmp_path / "base")
    scramble(base, new_key(base, "", ObfusLM(k=4, beta=0.9), base.digest(), bytes(range(32))), tmp_path / "out")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    (end,) = end_ids(tmp_path / "out")
    asked = IdsRequest(PROMPT, 6, temperature=0, logprobs=5, logit_bias={end: -100.0})
    with running("llamacpp", tmp_path / "out") as url:
        (answer,) = ask("llamacpp", url, asked)
    whole = PROMPT + ids(answer)
    with torch.inference_mode():
        chances = torch.log_softmax(served(torch.tensor([whole])).logits[0].double(), -1)
    rows = [row for chunk in answer for row in chunk.logprobs]
    assert len(rows) == 6
    close = 0.15 if "16" in name else 0.02  # llama.cpp keeps keys and values in fp16
    for place, row in enumerate(rows):
        at = chances[len(PROMPT) - 1 + place]
        assert all(abs(one.logprob - float(at[one.id])) < close for one in row)
        allowed = at.clone()
        allowed[end] -= 100
        assert float(allowed.max() - allowed[row[0].id]) < close
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == config.model_type

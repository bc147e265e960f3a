"""A real engine: vLLM over a tiny model on this machine's processor (`make test-engines`).

MILKGLASS_VLLM names the interpreter of an environment with vLLM. Its CPU attention has no heads of width 8, so that the
model has wider ones than those of other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from milkglass.errors import RemoteError, Unauthorized
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import load_tokenizer
from milkglass.split.decoder.client import SplitSampling
from milkglass.split.decoder.engines import PromptEmbedsEngine, pack_vectors
from tests import tiny
from tests.cli.kit import call, document
from tests.engines.real import KEY, NAME, WIDE, free_port, installed, started
from tests.split.decoder.kit import PATIENCE, PROMPT, TOKEN, serving
from tests.split.decoder.test_equal import PROMPTS, greedy

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]
PRIVATE = "my father has a fever since yesterday"


@dataclass(frozen=True)
class Running:
    """The engine, and the folder of its model."""

    client: PromptEmbedsEngine
    folder: Path

    def ids(self, prompt: list[int], sampling: SplitSampling, **fields: Any) -> list[int]:
        table = Checkpoint.open(self.folder).read("model.embed_tokens.weight")
        client = replace(self.client, **fields)
        about = {"width": table.shape[1], "rows": len(table), "table": "ab" * 32, "dtype": "float32"}
        return [*client.stream(client.info(about), sampling, "float32").ids(table[prompt], lambda ids: table[[*ids]])]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    interpreter = installed("MILKGLASS_VLLM")
    folder = tmp_path_factory.mktemp("engine")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**tiny.LLAMA, **WIDE}, tie_word_embeddings=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    port = free_port()
    words = [interpreter, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enable-prompt-embeds", "--dtype", "float32"]
    words += ["--max-model-len", "64", "--max-num-seqs", "4", "--enforce-eager"]
    words += ["--served-model-name", NAME, "--api-key", KEY]
    with started(words, port, folder / "log.txt") as url:
        yield Running(PromptEmbedsEngine(url, NAME, KEY, retry=PATIENCE), folder / "model")


def test_vllm_answers_as_the_unsplit_model_does(engine: Running) -> None:
    for prompt in PROMPTS:
        found = engine.ids(prompt, SplitSampling(max_tokens=12))
        assert found == greedy(engine.folder, prompt, 12)


def test_an_id_that_ends_the_answer_is_its_last(engine: Running) -> None:
    whole = greedy(engine.folder, PROMPTS[1], 12)
    end = next(one for one in whole if one != whole[0])
    found = engine.ids(PROMPTS[1], SplitSampling(max_tokens=12), stop_token_ids=(end,))
    assert found == whole[: whole.index(end) + 1] and len(found) < 12


def test_vllm_draws_by_the_seed(engine: Running) -> None:
    one, again, other = (
        engine.ids(PROMPT, SplitSampling(max_tokens=16, temperature=1.5, seed=seed)) for seed in (3, 3, 4)
    )
    assert one == again != other


def test_what_vllm_refuses_is_said(engine: Running) -> None:
    with pytest.raises(Unauthorized, match="401"):
        engine.ids(PROMPT, SplitSampling(max_tokens=4), bearer_token="another")
    with pytest.raises(RemoteError, match="'other'"):
        engine.ids(PROMPT, SplitSampling(max_tokens=4), model="other")
    body = {"model": NAME, "prompt_embeds": pack_vectors(torch.zeros(3, 8), 8), "max_tokens": 2}
    answer = httpx2.post(
        f"{engine.client.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert answer.status_code == 400 and "hidden_size" in answer.text, "as the stub of other tests says"


def test_text_through_the_enclave_and_vllm_is_the_unsplit_models(engine: Running, tmp_path: Path) -> None:
    token, key = tmp_path / "token", tmp_path / "key"
    token.write_text(TOKEN)
    key.write_text(KEY)
    with serving(engine.folder, tmp_path / "home") as served:
        built = call(
            *("split", "enclave", "build", served.server.url, "--out", tmp_path / "enclave"),
            *("--token-file", token, "--k", 8, "--json"),
        )
        assert built.exit_code == 0, built.stderr
    run = ("generate", PRIVATE, "--raw", "--split", engine.client.url, "--engine-model", NAME, "--token-file", key)
    answer = document(call(*run, "--enclave", tmp_path / "enclave", "--no-sanitize", "--max-tokens", 8, "--json"))
    tokenizer = load_tokenizer(engine.folder)
    expected = greedy(engine.folder, tokenizer(PRIVATE)["input_ids"], 8)
    assert answer["text"] == tokenizer.decode(expected, skip_special_tokens=True)

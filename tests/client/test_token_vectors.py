"""Vectors of tokens by the encoder: kept block by block, so that an interrupted command goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from milkglass.client.obfuscate import symbols as module
from milkglass.client.obfuscate.symbols import token_vectors
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.torch_model import body
from milkglass.progress import Progress
from tests import tiny


def test_an_interrupted_computation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "model"))
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    whole = token_vectors(base, "encoder")
    assert not (tmp_path / "cache").exists(), "a small vocabulary is not kept"
    monkeypatch.setattr(module, "TOKENS_PER_FILE", 64)
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 64)
    done: list[int] = []

    def stopping(name: str, size: int) -> Progress:
        def progress(more: int) -> None:
            done.append(more)
            if len(done) == 3:
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        token_vectors(base, "encoder", stopping)
    assert len(list((tmp_path / "cache" / "token_vectors").iterdir())) == 2
    encoded: list[int] = []
    real = module._mean_states

    def counting(model: Any, ids: torch.Tensor, *rest: Any) -> Any:
        encoded.extend(ids.tolist())
        return real(model, ids, *rest)

    monkeypatch.setattr(module, "_mean_states", counting)
    told: list[int] = []
    again = token_vectors(base, "encoder", lambda name, size: told.append)
    assert encoded == list(range(128, tiny.VOCAB)) and sum(told) == tiny.VOCAB
    np.testing.assert_allclose(again, whole, atol=1e-6)
    assert np.array_equal(token_vectors(base, "encoder"), again) and len(encoded) == tiny.VOCAB - 128
    tokenizer = load_tokenizer(base.folder)
    bare, around = (tokenizer("a", add_special_tokens=given)["input_ids"] for given in (False, True))
    assert len(bare) == 1
    one = [77 if token == bare[0] else token for token in around]
    with torch.inference_mode():
        alone = body(base).eval()(input_ids=torch.tensor([one])).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(again[77], alone.numpy(), atol=1e-5)

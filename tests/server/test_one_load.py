"""Models that are loaded side by side: transformers changes its own classes meanwhile, and must get them back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from milkglass.server.inference import model_cache
from milkglass.server.settings import ServerSettings
from tests import tiny


def test_loads_side_by_side_leave_heads_tied(tmp_path: Path) -> None:
    folder = tiny.save("gpt2", tmp_path / "model")
    tie, model = PreTrainedModel.tie_weights, SimpleNamespace(kind="decoder")

    def load(number: int) -> Any:
        engine = model_cache.build(folder, model, "generate", ServerSettings(home=tmp_path))  # type: ignore[arg-type]
        engine.close()
        return PreTrainedModel.tie_weights

    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(load, range(18)))
        assert PreTrainedModel.tie_weights is tie
    finally:
        PreTrainedModel.tie_weights = tie  # type: ignore[method-assign]

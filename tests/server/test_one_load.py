"""Models that are loaded side by side: transformers changes its own classes meanwhile, and must get them back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from milkglass.server import loading
from milkglass.server.settings import Settings
from tests import tiny


def test_loads_side_by_side_leave_heads_tied(tmp_path: Path) -> None:
    folder = tiny.save("gpt2", tmp_path / "model")
    tie, model = PreTrainedModel.tie_weights, SimpleNamespace(kind="decoder")

    def load(number: int) -> Any:
        engine = loading.build(folder, model, "generate", Settings(home=tmp_path))  # type: ignore[arg-type]
        engine.close()
        return PreTrainedModel.tie_weights

    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(load, range(18)))
        assert PreTrainedModel.tie_weights is tie
    finally:
        PreTrainedModel.tie_weights = tie  # type: ignore[method-assign]

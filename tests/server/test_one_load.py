"""Models that are loaded side by side: transformers changes its own classes meanwhile, and must get them back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from milkglass.defences.token_halves import _load_classifier
from milkglass.models import torch_model
from milkglass.models.checkpoint import Checkpoint
from milkglass.server.inference import model_cache
from milkglass.server.settings import ServerSettings
from tests import tiny
from tests.server.kit import classifier


def test_loads_side_by_side_leave_heads_tied(tmp_path: Path) -> None:
    folder = tiny.save("gpt2", tmp_path / "model")
    tie, model = PreTrainedModel.tie_weights, SimpleNamespace(kind="decoder")

    def load(number: int) -> Any:
        engine = model_cache.build_engine(folder, model, "generate", ServerSettings(home=tmp_path))  # type: ignore[arg-type]
        engine.close()
        return PreTrainedModel.tie_weights

    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(load, range(18)))
        assert PreTrainedModel.tie_weights is tie
    finally:
        PreTrainedModel.tie_weights = tie  # type: ignore[method-assign]


def test_cells_of_a_comparison_are_asked_side_by_side(tmp_path: Path) -> None:
    """Their models are loaded in threads, beside models that are built from a checkpoint and need their heads tied."""
    folder, tied = classifier(tmp_path / "classifier"), tiny.save("gpt2", tmp_path / "gpt2")
    base, tie = Checkpoint.open(tied), PreTrainedModel.tie_weights

    def load(number: int) -> Any:
        if number % 2:
            return _load_classifier(folder)
        return torch_model.language_model(base)

    try:
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(load, range(24)))
        assert PreTrainedModel.tie_weights is tie
        for one in found[::2]:
            assert one.get_output_embeddings().weight is one.get_input_embeddings().weight
    finally:
        PreTrainedModel.tie_weights = tie  # type: ignore[method-assign]

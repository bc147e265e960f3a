"""One tiny BERT, and each method's two folders, for a module's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from milkglass.models.checkpoint import Checkpoint
from tests.hidden_states.kit import SMALL, base
from tests.split.kit import Made, made


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return base(tmp_path_factory.mktemp("split-model"))


@pytest.fixture(scope="session", params=SMALL)
def each(request: pytest.FixtureRequest, bert: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(str(request.param), bert, tmp_path_factory.mktemp(f"split-{request.param}"))


@pytest.fixture(scope="session")
def noisy(bert: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """DP-Forward, cut after one layer."""
    return made("dp-forward", bert, tmp_path_factory.mktemp("split-noisy"))


@pytest.fixture
def fresh(bert: Checkpoint, tmp_path: Path) -> Made:
    """Folders of a test's own."""
    return made("dp-forward", bert, tmp_path)

"""One tiny BERT for a module's tests."""

from __future__ import annotations

import pytest

from milkglass.models.checkpoint import Checkpoint
from tests.hidden_states.kit import base


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return base(tmp_path_factory.mktemp("model"))

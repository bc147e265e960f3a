"""One tiny BERT for a module's tests."""

from __future__ import annotations

import pytest

from milkglass.checkpoint import Checkpoint
from tests.encoders.kit import base


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return base(tmp_path_factory.mktemp("model"))

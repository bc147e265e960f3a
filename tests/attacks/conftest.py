"""Tiny models for the tests of attacks that run them."""

from __future__ import annotations

import pytest

from milkglass.models.view import Model
from tests.attacks.tiny_scenes import TABLE
from tests.tiny import save


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Model.open(save(name, folder / name)) for name in TABLE}

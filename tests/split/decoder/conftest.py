from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.split.decoder.kit import Served, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama-tied", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(folder, tmp_path_factory.mktemp("home")) as running:
        yield running

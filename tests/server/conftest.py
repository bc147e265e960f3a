from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests import tiny
from tests.server.kit import classifier, running


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models as folders, made once."""
    root = tmp_path_factory.mktemp("models")
    made = {name: tiny.save(name, root / name) for name in ("llama-untied", "gpt2", "bert")}
    return made | {"classifier": classifier(root / "classifier")}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with running(tmp_path / "home") as client:
        yield client

"""The sites that these tests train with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.federated.kit import World, world


@pytest.fixture(scope="session")
def there(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(tmp_path_factory.mktemp("federated"))


@pytest.fixture(scope="session")
def searches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(searches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches are not kept in this machine's own cache, and one model is searched once."""
    monkeypatch.setenv("MILKGLASS_CACHE", str(searches))

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.kit import Owner
from tests.client.stub import TOKEN, Stub, running


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    return Owner(tmp_path_factory.mktemp("encoder"), "bert")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    return Owner(tmp_path_factory.mktemp("decoder"), "llama-tied")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    with running() as server:
        monkeypatch.setenv("MILKGLASS_SERVER", server.url)
        monkeypatch.setenv("MILKGLASS_TOKEN", TOKEN)
        server.chunk_bytes = 1 << 20
        yield server

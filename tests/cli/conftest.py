from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from milkglass.client.key import file as key_file
from tests.cli.kit import Owner
from tests.client.stub import TOKEN, Stub, running


@pytest.fixture(scope="module", autouse=True)
def cheap_passphrases() -> Iterator[None]:
    """A passphrase costs 0.4 s and 128 MB each time it is asked for, and hundreds of commands ask here. What it costs
    is tested in tests/client/test_key.py, and the main job's test pays it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_file, "Scrypt", lambda salt, length, n, r, p: Scrypt(salt, length, 2, r, p))
        yield


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

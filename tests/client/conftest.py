"""A server of prepared answers, for each test its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.stub import Stub, running


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    with running() as server:
        yield server

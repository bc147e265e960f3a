"""A server promises files of any size; this disk is not filled with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milkglass.client.remote import transfer
from milkglass.client.remote.connection import RetryPolicy
from milkglass.client.remote.remote import Remote
from milkglass.errors import RemoteError, UsageError
from tests import tiny
from tests.client.stub import TOKEN, Stub
from tests.client.test_remote import serve_model


@pytest.fixture
def remote(stub: Stub) -> Iterator[Remote]:
    with Remote(stub.url, TOKEN, retry=RetryPolicy(max_attempts=2, pause=lambda seconds: None)) as made:
        yield made


def lists(stub: Stub, *files: dict[str, Any]) -> None:
    entries = [{"name": "config.json", "bytes": 2, "sha256": None}, *files]
    stub.replies["GET /v1/models/ft/files"] = lambda h: h.answer(200, {"data": entries})


def nothing_came(stub: Stub, folder: Path) -> None:
    assert not [call for call, _, _ in stub.calls if "/files/" in call]
    assert not list(folder.glob("*out*")) and not list(folder.glob(".out*"))


def test_more_than_the_disk_has_is_not_begun(stub: Stub, remote: Remote, tmp_path: Path) -> None:
    lists(stub, {"name": "model.safetensors", "bytes": 10**15, "sha256": None})
    with pytest.raises(UsageError, match=r"takes 1,000,000,000 MB more, and the disk has"):
        remote.fetch_model("ft", tmp_path / "out")
    nothing_came(stub, tmp_path)


def test_some_room_is_left(stub: Stub, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=transfer.SPARE_BYTES + 1000))
    lists(stub, {"name": "model.safetensors", "bytes": 999, "sha256": None})
    with pytest.raises(UsageError, match="256 MiB are to be left"):
        remote.fetch_model("ft", tmp_path / "out")
    nothing_came(stub, tmp_path)


def test_more_than_the_model_can_have_is_not_begun(stub: Stub, remote: Remote, tmp_path: Path) -> None:
    lists(stub, {"name": "model.safetensors", "bytes": 5_000_000, "sha256": None})
    with pytest.raises(RemoteError, match="offers 5 MB, and this model has at most 4 MB"):
        remote.fetch_model("ft", tmp_path / "out", max_bytes=4_000_000)
    nothing_came(stub, tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"name": "generation_config.json", "bytes": 10**9, "sha256": None}, "at most 67108864 are fetched"),
        ({"name": "config.json", "bytes": 3, "sha256": None}, "lists a file twice"),
        ({"name": "a.safetensors", "bytes": 3, "sha256": "x"}, "describes a.safetensors badly"),
        ({"name": "a.safetensors", "bytes": True, "sha256": None}, "describes a.safetensors badly"),
        ({"name": "a.safetensors", "bytes": -1, "sha256": None}, "describes a.safetensors badly"),
    ],
)
def test_lists_that_cannot_be(stub: Stub, remote: Remote, tmp_path: Path, more: dict[str, Any], said: str) -> None:
    lists(stub, more)
    with pytest.raises(RemoteError, match=said):
        remote.fetch_model("ft", tmp_path / "out")
    nothing_came(stub, tmp_path)


def test_never_more_than_promised_is_written(stub: Stub, remote: Remote, tmp_path: Path) -> None:
    lists(stub)
    stub.replies["GET /v1/models/ft/files/config.json"] = lambda h: h.answer(200, b"{}" + b" " * 100_000)
    with pytest.raises(RemoteError, match="sends more than the 2 bytes of config.json"):
        remote.fetch_model("ft", tmp_path / "out")
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 2


def test_what_is_there_already_needs_no_room(
    stub: Stub, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    tiny.build("bert").save_pretrained(source)
    serve_model(stub, source)
    whole = sum(path.stat().st_size for path in source.iterdir())
    stub.replies["GET /v1/models/ft/files/model.safetensors"] = lambda h: h.answer(404, {})
    with pytest.raises(RemoteError, match="404"):
        remote.fetch_model("ft", tmp_path / "out")
    (staging,) = tmp_path.glob(".out*")
    there = sum(path.stat().st_size for path in staging.iterdir())
    assert 0 < there < whole
    serve_model(stub, source)
    free = transfer.SPARE_BYTES + whole - there
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free - 1))
    with pytest.raises(UsageError, match="MB more"):
        remote.fetch_model("ft", tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert remote.fetch_model("ft", tmp_path / "out", max_bytes=whole).is_dir()

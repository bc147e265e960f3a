"""What is kept in the cache: made once, read again, never used when damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from milkglass.errors import CorruptCheckpoint
from milkglass.models.array_cache import ArrayCache, digest_of


def test_made_once_and_read_again(tmp_path: Path) -> None:
    keep, made = ArrayCache("things", {"x": np.int32}, tmp_path / "things"), []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"x": np.arange(5)[::-1]}

    for reused in (False, True):
        found = keep("ab", make, lambda one: len(one["x"]) == 5)
        assert found["x"].tolist() == [4, 3, 2, 1, 0] and found["x"].dtype == np.int32
        assert keep.is_reused is reused and len(made) == 1
    (path,) = (tmp_path / "things").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(CorruptCheckpoint, match=r"things/ab\.safetensors"):
        keep("ab", make, lambda one: len(one["x"]) == 6)
    with pytest.raises(CorruptCheckpoint):
        ArrayCache("things", {"x": np.int64}, tmp_path / "things")("ab", make, lambda one: True)


def test_what_was_changed_or_has_no_digest_is_not_taken(tmp_path: Path) -> None:
    keep = ArrayCache("things", {"x": np.int32}, tmp_path)
    keep("ab", lambda: {"x": np.arange(5)}, lambda one: True)
    path = tmp_path / "ab.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptCheckpoint, match=r"ab\.safetensors"):
        keep("ab", lambda: {"x": np.arange(5)}, lambda one: True)
    save_file({"x": np.arange(5, dtype=np.int32)}, path)  # as an earlier version wrote it
    assert keep("ab", lambda: {"x": np.arange(1, 6)}, lambda one: True)["x"].tolist() == [1, 2, 3, 4, 5]
    assert not keep.is_reused


def test_the_default_place_is_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path))
    ArrayCache("things", {"x": np.int32})("ab", lambda: {"x": np.zeros(1)}, lambda one: True)
    assert (tmp_path / "things" / "ab.safetensors").is_file()


def test_the_digest_depends_on_every_part() -> None:
    one, two = np.arange(3), np.arange(3)[::-1]
    found = {digest_of(["a"], one), digest_of(["b"], one), digest_of(["a"], two), digest_of(["a"], one, two)}
    assert len(found) == 4
    assert digest_of(["a"], two) == digest_of(["a"], two.copy()), "by content, not by layout"

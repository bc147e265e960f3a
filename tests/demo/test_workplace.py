from __future__ import annotations

from pathlib import Path

import pytest

from milkglass.demo import workplace
from milkglass.demo.workplace import MARK, Workplace
from milkglass.errors import UsageError


def test_a_folder_with_other_things_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not lose")
    with pytest.raises(UsageError, match="other things"), Workplace.claim(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UsageError, match="is a file"), Workplace.claim(tmp_path / "out"):
        pass


def test_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    with Workplace.claim(tmp_path / "out") as first:
        (first.client / "old").touch()
        first.server.mkdir()
        (first.server / "old").touch()
        first.provide(tmp_path)
        (first.out / "index.html").touch()
    with Workplace.claim(tmp_path / "out") as second:
        assert list(second.client.iterdir()) == []
        assert not second.server.exists() and not second.bases.exists()
        assert sorted(path.name for path in second.out.iterdir()) == [MARK, "client"]


def test_private_folders_are_the_owners_only(tmp_path: Path) -> None:
    with Workplace.claim(tmp_path / "out") as place:
        assert place.out.stat().st_mode & 0o077 == 0
        assert place.client.stat().st_mode & 0o077 == 0


def test_models_go_and_small_files_stay_also_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workplace, "LARGE", 100)
    with pytest.raises(RuntimeError), Workplace.claim(tmp_path / "out") as place:
        (place.server / "models").mkdir(parents=True)
        (place.server / "models" / "model.safetensors").write_bytes(bytes(101))
        (place.server / "models" / "config.json").write_bytes(bytes(100))
        (place.client / "delta.safetensors").write_bytes(bytes(500))
        (tmp_path / "model.safetensors").write_bytes(bytes(500))
        place.provide(tmp_path)
        raise RuntimeError
    assert (tmp_path / "model.safetensors").stat().st_size == 500, "the model itself is not the demo's to remove"
    left = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert left == {MARK, "config.json"}

"""Files that appear whole or not at all, for their owner alone."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from milkglass import files
from milkglass.errors import UsageError


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture(autouse=True)
def open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_file_and_its_folders_are_their_owners(tmp_path: Path) -> None:
    target = files.make_private_dir(tmp_path / "a" / "b") / "x.json"
    files.write_json(target, {"b": 1, "a": "é"})
    assert target.read_text("utf-8") == '{\n  "b": 1,\n  "a": "é"\n}\n'
    assert (mode(target), mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o600, 0o700, 0o700)


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    assert mode(files.make_private_dir(tmp_path / "open")) == 0o755


def test_the_content_is_private_before_it_is_written(tmp_path: Path) -> None:
    with files.atomic_write(tmp_path / "x") as file:
        file.write("secret")
        file.flush()
        (partial,) = tmp_path.iterdir()
        assert mode(partial) == 0o600 and partial.name.startswith(".x.") and partial.name.endswith(".tmp")


def test_a_file_that_a_library_makes_anew_is_private_too(tmp_path: Path) -> None:
    with files.atomic_path(tmp_path / "x") as partial:
        partial.unlink()
        partial.write_bytes(b"by a library")
    assert mode(tmp_path / "x") == 0o600


def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "x"
    files.write(target, "old")
    with pytest.raises(RuntimeError), files.atomic_write(target) as file:
        file.write("new")
        raise RuntimeError
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_name_that_is_taken_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with pytest.raises(FileExistsError), files.atomic_write(target, "wb", replace=False) as file:
        file.write(b"mine")
        target.write_text("theirs")  # in the meantime
    assert target.read_text() == "theirs" and list(tmp_path.iterdir()) == [target]


def test_without_hard_links_a_taken_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*paths: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    files.write(tmp_path / "x", b"one", replace=False)
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "x", b"two", replace=False)
    assert (tmp_path / "x").read_bytes() == b"one" and mode(tmp_path / "x") == 0o600


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "run"
    with files.new_dir(target) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "x").write_text("x")
        assert not target.exists()
    assert (mode(target), mode(target / "inner"), mode(target / "inner" / "x")) == (0o700, 0o700, 0o600)
    with pytest.raises(FileExistsError), files.new_dir(target):
        pass
    with pytest.raises(RuntimeError), files.new_dir(tmp_path / "other"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_given_to_others_has_the_mode_of_any_file(tmp_path: Path) -> None:
    files.write(tmp_path / "x", "public", is_private=False)
    with files.new_dir(tmp_path / "a" / "b", is_private=False) as partial:
        (partial / "y").write_text("public")
    modes = [mode(tmp_path / name) for name in ("x", "a/b", "a/b/y")]
    assert modes == [0o666, 0o777, 0o666]  # the umask is 0 here


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(UsageError, match=f"{name} is not"):
            files.write(tmp_path / name, "x")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_finished_takes_its_name_with_its_content_on_the_disk(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, target, synced = tmp_path / "partial", tmp_path / "done", list[tuple[str, bool]]()
    inner = partial / "x" if kind == "folder" else partial
    inner.parent.mkdir(exist_ok=True)
    inner.write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    if kind == "folder":
        (tmp_path / "link").rename(partial / "link")  # a link to what is not there has nothing to sync
    monkeypatch.setattr(files, "sync", lambda path: synced.append((path.name, target.exists())))
    files.rename_into_place(partial, target)
    assert {("partial", False), (inner.name, False)} <= {*synced} and synced[-1] == (tmp_path.name, True)
    assert (target / "x" if kind == "folder" else target).read_text() == "x" and not partial.exists()


@pytest.mark.parametrize("taken", ["folder", "file"])
def test_what_is_finished_takes_no_name_of_another(taken: str, tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    held = tmp_path / "done" / "x" if taken == "folder" else tmp_path / "done"
    held.parent.mkdir(exist_ok=True)
    held.write_text("theirs")
    with pytest.raises(FileExistsError):
        files.rename_into_place(tmp_path / "partial", tmp_path / "done")
    assert held.read_text() == "theirs" and (tmp_path / "partial").is_dir()


def test_a_folder_loses_its_name_before_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "x").write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", lambda path: None)  # killed here
        files.remove_dir(tmp_path / "model", tmp_path / "gone")
    assert not (tmp_path / "model").exists() and (tmp_path / "gone" / "x").exists()
    (tmp_path / "model").mkdir()
    files.remove_dir(tmp_path / "model", tmp_path / "again")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "gone"]


def test_nothing_else_renames() -> None:
    source = Path(files.__file__).parent
    found = [path for path in source.rglob("*.py") if {"rename", "renames"} & attributes(path)]
    assert found == [source / "files.py"]


def attributes(path: Path) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Attribute)}

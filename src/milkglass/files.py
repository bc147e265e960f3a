"""Writes files and folders that appear whole or not at all, and that only their owner can read.

All that Milkglass writes for its user has mode 0600 (folders 0700) from the first byte. The content is on the disk
before the name is, and the name has its old content until then. A writer that is killed leaves a file or folder such
as `.key.mgkey.0a1b2c3d.tmp`, which is never read. Scrambled folders, which are for others, have the modes of any new
file.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from milkglass.errors import UsageError
from milkglass.progress import Progress, no_progress

NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL
READ_BYTES = 1 << 20  # bytes of a file that are read at a time


def require_writable(path: Path) -> None:
    """Raises UsageError if no file or folder can be created under this name."""
    parent = nearest_existing_parent(path)
    if not parent.is_dir():
        raise UsageError(f"{path} cannot be made: {parent} is a file", "give another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be made: {parent} is not writable", "give another place")


def nearest_existing_parent(path: Path) -> Path:
    """Returns the nearest parent of a path that exists."""
    return next(parent for parent in path.absolute().parents if parent.exists() or parent.is_symlink())


def free_disk_bytes(path: Path) -> int:
    """Returns how many bytes are free on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(path if path.exists() else nearest_existing_parent(path)).free


def make_private_dir(folder: Path, restrict_existing: bool = False) -> Path:
    """Creates a folder and its missing parents with mode 0700, and returns it.

    With `restrict_existing`, a folder that exists gets that mode, too.
    """
    if not folder.is_dir():
        make_private_dir(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    if restrict_existing:
        folder.chmod(0o700)
    return folder


@contextmanager
def atomic_path(target: Path, replace: bool = True, is_private: bool = True) -> Iterator[Path]:
    """Yields the path of an empty file beside `target`, which takes the target's name when the block ends.

    Args:
        target: the file's name. Its folder must exist. A link to a file stays a link.
        replace: whether a file of that name may exist.
        is_private: False for a file that is given to others, which gets the mode of any new file.

    Raises:
        FileExistsError: `replace` is False and the name is taken, also by a link or by a file that appeared meanwhile.
        UsageError: the name belongs to a folder, a device or a pipe.
    """
    if not replace and target.is_symlink():  # what is new must not appear where a link leads
        raise FileExistsError(target)
    target = target.resolve() if target.is_symlink() else target
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is not a file", "give the name of a file")
    partial = _temporary_path(target)
    try:
        os.close(os.open(partial, NEW_FILE_FLAGS, 0o600 if is_private else 0o666))
        yield partial
        if is_private:
            partial.chmod(0o600)  # a library may have made the file again
        sync(partial)
        if replace:
            partial.replace(target)
        else:
            _take_name(partial, target)
        sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_write(
    target: Path, mode: Literal["w", "wb"] = "w", replace: bool = True, newline: str | None = None
) -> Iterator[IO[Any]]:
    """Yields an open file that takes the target's name when the block ends. Text is UTF-8.

    See `atomic_path` for the arguments and errors.
    """
    encoding = None if "b" in mode else "utf-8"
    with atomic_path(target, replace) as partial, partial.open(mode, encoding=encoding, newline=newline) as file:
        yield file


def write(target: Path, content: str | bytes, replace: bool = True, is_private: bool = True) -> None:
    """Writes a whole file, text in UTF-8. See `atomic_path` for the arguments and errors."""
    with atomic_path(target, replace, is_private) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def require_new(path: Path) -> None:
    """Raises UsageError if there is a file or folder of this name, which would be replaced."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder that exists already", "give the name of a new file")
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already", "give another name, or remove it first")


def write_json(target: Path, value: Mapping[str, Any] | list[Any], indent: int | None = 2) -> None:
    """Writes JSON with a final line break and the keys in the order of the mapping. `indent` None: all on one line."""
    write(target, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def partial_folder(target: Path) -> Path:
    """Returns the folder beside `target` in which a long job builds `target`."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def new_dir(target: Path, is_private: bool = True, replaces: bool = False) -> Iterator[Path]:
    """Yields a folder that takes the target's name when the block ends, and is removed if the block fails.

    Args:
        is_private: whether folders are 0700 and files 0600. False for a folder that is given to others.
        replaces: whether a folder of that name is removed when the block has ended.

    Raises:
        FileExistsError: the name is taken by a file, or by a folder that is not empty and is not replaced.
    """
    if not replaces:
        _require_free_name(target)
    partial = _temporary_path(target)
    if is_private:
        make_private_dir(partial)
    else:
        partial.mkdir(parents=True)
    try:
        yield partial
        if is_private:
            for path in partial.rglob("*"):
                if not path.is_symlink():
                    path.chmod(0o700 if path.is_dir() else 0o600)
        if replaces and target.is_dir():
            remove_dir(target, _temporary_path(target))
        rename_into_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def rename_into_place(partial: Path, target: Path) -> None:
    """Renames a finished file or folder on the same disk, after all its content is on the disk.

    It serves work that resumes after a kill under a temporary name; other work uses `new_dir`. Modes do not change.

    Raises:
        FileExistsError: the name is taken by a file or by a folder that is not empty.
    """
    _require_free_name(target)
    for path in (partial, *partial.rglob("*")):
        if not path.is_symlink():
            sync(path)
    partial.rename(target)
    sync(target.parent)


def remove_dir(folder: Path, trash: Path) -> None:
    """Removes a folder, whose name is free at once.

    Args:
        folder: the folder.
        trash: the name that the folder gets while its content is deleted. The caller's next start must delete what a
            kill left there.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    folder.rename(trash)
    shutil.rmtree(trash)


def sha256(path: Path, progress: Progress = no_progress) -> str:
    """Returns the SHA-256 of a whole file in hex. `progress` receives the bytes that were read."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
            progress(len(chunk))
    return hasher.hexdigest()


@cache
def source_digest(label: bytes = b"", excluded: frozenset[str] = frozenset()) -> str:
    """Returns the SHA-256 in hex of a label and of the names and contents of this package's Python files.

    Args:
        excluded: folders whose files do not count, such as "cli".
    """
    hasher, root = hashlib.sha256(label), Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not any(name.startswith(f"{folder}/") for folder in excluded):
            hasher.update(json.dumps([name, sha256(path)]).encode())
    return hasher.hexdigest()


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- helpers ----------------------------------------------------------------------------------------------------------
def _temporary_path(target: Path) -> Path:
    """Returns a random hidden name in the folder of `target`."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def _require_free_name(target: Path) -> None:
    """Raises FileExistsError if the name is taken by a file or by a folder that is not empty."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise FileExistsError(target)


def _take_name(partial: Path, target: Path) -> None:
    """Renames a file without replacing another. Raises FileExistsError if the name was taken meanwhile."""
    try:
        os.link(partial, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, such as a memory stick's: hold the name, then fill it
        os.close(os.open(target, NEW_FILE_FLAGS, 0o600))
        partial.replace(target)

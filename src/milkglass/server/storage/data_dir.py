"""The folder that holds everything a server keeps, and the lock that gives it to one server at a time.

token           the bearer token, mode 0600
server.lock     held by the running server
state.sqlite    uploads, files, models, jobs
uploads/ID      what has arrived of an upload
files/ID        complete, checked files
models/ID/      ordinary Hugging Face folders
jobs/ID/        see server/spec.py
work/           what is being built; emptied at every start
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import IO

from milkglass import files
from milkglass.errors import Conflict, DiskFull, MilkglassError, UsageError

log = logging.getLogger("milkglass.server")
OTHERS = 0o077  # bits of a file's mode
MARKS = frozenset({"token", "server.lock", "state.sqlite"})  # one of these makes a folder a home
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
TINY = 8 << 20  # free bytes of a disk that something could not be written to
NO_ROOM = "the server's disk is full; free space and start the job again"  # of a job


def disk_full() -> DiskFull:
    return DiskFull(
        "the server's disk is full",
        "delete what is no longer needed: jobs that are over, models, files, uploads that were never completed "
        "(list them at /v1/fine_tuning/jobs, /v1/models, /v1/files and /v1/uploads)",
    )


def known_error(error: BaseException) -> MilkglassError | None:
    """What an error of the system means to the caller; None: it is a fault of ours."""
    if isinstance(error, MilkglassError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return disk_full()
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return disk_full()
    return None


def nearly_full(folder: Path) -> bool:
    """Whether its disk has so little room that what just failed there failed for that."""
    return shutil.disk_usage(folder).free < TINY


def free_bytes(home: Path, quota: int | None) -> int:
    """What may still be written in a home: by its disk, and by the quota that it has."""
    free = shutil.disk_usage(home).free
    return free if quota is None else max(0, min(free, quota - taken(home)))


def taken(*paths: Path) -> int:
    """Bytes on the disk of files, and of all files in folders, each once however many names it has."""
    seen: dict[tuple[int, int], int] = {}
    inside = (Path(place, name) for path in paths for place, _, names in os.walk(path) for name in names)
    for one in (*paths, *inside):
        try:
            found = one.lstat()
        except FileNotFoundError:
            continue  # removed at this moment
        if stat.S_ISREG(found.st_mode):
            seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


class DataDir:
    """spare: bytes of the disk that are left alone. quota: bytes that all of it may take; None: what the disk has."""

    def __init__(self, root: Path, spare: int, quota: int | None = None) -> None:
        self.root, self.spare, self.quota = root, spare, quota
        self.uploads, self.files, self.models = root / "uploads", root / "files", root / "models"
        self.jobs, self.work = root / "jobs", root / "work"

    def prepare(self) -> None:
        """Make the folders; throw away what a killed server was building."""
        self.claim()
        shutil.rmtree(self.work, ignore_errors=True)
        for folder in (self.uploads, self.files, self.models, self.jobs, self.work):
            folder.mkdir(exist_ok=True)

    def claim(self) -> None:
        """Make the home, and close it to others. Raises UsageError for an open folder of something else."""
        files.private_dir(self.root)
        if not self.root.stat().st_mode & OTHERS:
            return
        names = {path.name for path in self.root.iterdir()}
        if names and not names & MARKS:  # someone's folder: closing it is not ours to do
            raise UsageError(
                f"{self.root} is open to others and is not a server's home", f"chmod 700 {self.root}, or name another"
            )
        try:
            files.private_dir(self.root, close=True)
        except PermissionError:
            raise UsageError(f"{self.root} is open to others and not ours to close", "name another folder") from None

    def require_space(self, size: int) -> None:
        """Raises DiskFull when `size` bytes more would not leave the spare ones."""
        if self.free < size:
            raise disk_full()

    @property
    def free(self) -> int:
        """Bytes that may be written besides the spare ones."""
        return max(0, free_bytes(self.root, self.quota) - self.spare)

    def lock(self) -> IO[bytes]:
        """Hold the home until the returned file is closed, or this process dies. Raises Conflict.

        The lock is not inherited by workers: a server that was killed leaves its home free, its worker running.
        """
        self.claim()
        file = (self.root / "server.lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise Conflict(
                f"another server is using {self.root}", "stop that one, or give this one a home of its own"
            ) from None
        return file

    def token(self, provided: str | None) -> str:
        """The given token, else the stored one, else a new one that is stored for its owner's eyes only. Errors as of
        `claim`, which is done first where none is given."""
        if provided is not None:
            return provided
        self.claim()
        path = self.root / "token"
        if path.is_file():
            if path.stat().st_mode & OTHERS:
                log.warning("the token could be read by others; it is closed now, but a new one would be safer")
                path.chmod(0o600)
            stored = path.read_text("ascii").strip()
            if len(stored) < 16:
                raise UsageError("the stored token is empty or too short", f"remove {path}; a new one is made")
            return stored
        fresh = secrets.token_urlsafe(32)
        files.write(path, fresh + "\n")
        return fresh

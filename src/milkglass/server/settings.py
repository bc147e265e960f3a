"""Holds the server's settings, and manages its home folder, which one server uses at a time.

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
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, final

from milkglass import files
from milkglass.errors import Conflict, DiskFull, MilkglassError, UsageError

log = logging.getLogger("milkglass.server")
OTHERS_PERMISSIONS = 0o077  # bits of a file's mode for its group and all others
HOME_FILE_NAMES = frozenset({"token", "server.lock", "state.sqlite"})  # one of these makes a folder a home
FULL_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NEARLY_FULL_BYTES = 8 << 20  # free bytes of a disk that something could not be written to
NO_ROOM_MESSAGE = "the server's disk is full; free space and start the job again"  # the error of a failed job
RESERVED_OPEN_FILES = 128  # files that the server opens besides connections, at least


@final
@dataclass(frozen=True)
class Limits:
    """Limits connections. Times are in seconds, rates in bytes a second.

    Attributes:
        total: connections at a time.
        per_address: connections of one address at a time, among these.
        reserved: connections from this machine beyond `total`, so that a health check is answered.
        backlog: connections that the kernel keeps waiting; a further one is tried again after 1, 3, 7 s.
        handshake_seconds: time for the TLS handshake.
        head_seconds: time from the start of a connection, or from the last answer, to the end of a request's headers.
        window_seconds: time in which a body, or an answer that waits to be read, must progress.
        min_body_rate: least rate of a request's body over a window.
        body_grace_seconds: time for a body of any length that is kept in memory.
        expected_body_rate: a body of n bytes in memory may take body_grace_seconds + n / expected_body_rate seconds.
        min_send_rate: least rate at which a waiting answer is read, over a window.
        linger_seconds: time for the rest of a body whose request was answered already.
        tick_seconds: time between two checks of these times.
    """

    total: int = 512
    per_address: int = 256
    reserved: int = 16
    backlog: int = 2048
    handshake_seconds: float = 10.0
    head_seconds: float = 20.0
    window_seconds: float = 20.0
    min_body_rate: float = 1024.0
    body_grace_seconds: float = 30.0
    expected_body_rate: float = 65_536.0
    min_send_rate: float = 1024.0
    linger_seconds: float = 20.0
    tick_seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.per_address <= self.total:
            raise UsageError(
                f"{self.per_address} connections of one address do not fit into {self.total} in all",
                "give 1 at least, and no more than in all",
            )

    def body_seconds(self, size: int) -> float:
        """Returns how long a body of `size` bytes that is kept in memory may take to arrive."""
        return self.body_grace_seconds + size / self.expected_body_rate

    def within_open_files(self, open_files: int) -> Limits:
        """Returns limits with no more connections than open files allow, at two files for each connection.

        One address gets half of the connections at most.

        Args:
            open_files: the most files that this process may open.
        """
        total = min(self.total, max(1, (open_files - RESERVED_OPEN_FILES) // 2 - self.reserved))
        per_address = min(self.per_address, max(1, total // 2))
        return replace(self, total=total, per_address=per_address)


MIB = 1 << 20
# -P: nothing is imported from the job's folder
WORKER_COMMAND = (sys.executable, "-P", "-m", "milkglass.server.training")


@dataclass(frozen=True)
class ServerSettings:
    """Holds all settings of a server. Sizes are in bytes, times in seconds; comments describe the fields."""

    home: Path
    host: str = "127.0.0.1"
    port: int = 8420  # 0: any free port
    token: str | None = None  # None: read from home/token, which is made at first start
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    base_models: tuple[Path, ...] = ()  # folders, or folders of folders, that deltas may be assembled with

    record: Path | None = None  # keep what is seen there, as transcripts for audits

    max_body: int = 64 * MIB  # one request with file content
    max_json: int = 8 * MIB  # any other request
    max_held: int = 64 * MIB  # all bodies that are in memory at a time
    connections: Limits = field(default_factory=Limits)
    chunk_bytes: int = 8 * MIB  # what clients are asked to send at a time
    max_upload: int = 512 * 1024 * MIB  # one file
    max_uploads: int = 256  # that are not complete
    upload_max_idle: float = 86_400.0  # time without a chunk after which an upload is deleted
    spare_disk: int = 64 * MIB  # never filled by an upload
    quota: int | None = None  # bytes that the home may take; None: what its disk has

    max_prompt_tokens: int = 8192
    max_new_tokens: int = 4096
    max_inputs: int = 256  # prompts of one request
    max_batch: int = 16  # rows of one forward pass
    max_waiting: int = 1024  # rows that may wait for a model; more get 503
    max_loaded_models: int = 2
    prefix_cache: int = 512 * MIB  # keys and values of finished answers, of all loaded models; 0: none are kept
    inference_threads: int | None = None  # CPU threads; None: torch's choice

    training_threads: int | None = None  # of a job; None: torch's choice
    worker: tuple[str, ...] = field(default=WORKER_COMMAND, repr=False)
    max_crashes: int = 3  # a job has failed whose worker dies this often without a status
    cancel_grace: float = 60.0  # time after which a worker that does not stop is killed
    shutdown_grace: float = 60.0  # time to save a checkpoint; a worker that is killed resumes from an older one

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.home.absolute())  # workers run in folders of their own
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port {self.port} is not between 0 and 65535", "0 takes any free port")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UsageError("TLS needs both a certificate and a key", "give both files, or neither")
        for name in _POSITIVE_SETTINGS:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; 1 is the least", "give a positive number")
        if self.quota is not None and self.quota < 1:
            raise UsageError(f"quota is {self.quota}; 1 is the least", "give a positive number, or none")
        if self.prefix_cache < 0:
            raise UsageError(f"prefix_cache is {self.prefix_cache}; 0 is the least", "0 keeps nothing")
        if self.token is not None:
            require_token(self.token)


def require_token(token: str) -> str:
    """Returns a server's token. Raises UsageError for one that can be guessed, or cannot be in a header."""
    if len(token) < 16 or not token.isascii() or " " in token:
        raise UsageError("the token is too short or not plain ASCII", "16 characters at least, no spaces")
    return token


_POSITIVE_SETTINGS = (
    "max_body", "max_json", "max_held", "chunk_bytes", "max_upload", "max_uploads",
    "max_prompt_tokens", "max_new_tokens", "max_inputs",
    "max_batch", "max_waiting", "max_loaded_models", "max_crashes",
)  # fmt: skip


# --- the home folder --------------------------------------------------------------------------------------------------
def disk_full_error() -> DiskFull:
    """Returns the error that tells a caller what to delete."""
    return DiskFull(
        "the server's disk is full",
        "delete what is no longer needed: jobs that are over, models, files, uploads that were never completed "
        "(list them at /v1/fine_tuning/jobs, /v1/models, /v1/files and /v1/uploads)",
    )


def error_for_caller(error: BaseException) -> MilkglassError | None:
    """Returns the error that a caller gets for an error, or None if the error is a fault of the server."""
    if isinstance(error, MilkglassError):
        return error
    if isinstance(error, OSError) and error.errno in FULL_DISK_ERRNOS:
        return disk_full_error()
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return disk_full_error()
    return None


def is_nearly_full(folder: Path) -> bool:
    """Returns whether the folder's disk has so little room that this explains a failed write."""
    return shutil.disk_usage(folder).free < NEARLY_FULL_BYTES


def free_bytes(home: Path, quota: int | None) -> int:
    """Returns how many bytes may still be written in a home, by its disk and by its quota."""
    disk_bytes = shutil.disk_usage(home).free
    return disk_bytes if quota is None else max(0, min(disk_bytes, quota - bytes_on_disk(home)))


def bytes_on_disk(*paths: Path) -> int:
    """Returns the bytes on the disk of files and of all files in folders, each hard-linked file once."""
    bytes_by_inode: dict[tuple[int, int], int] = {}
    paths_inside = (Path(folder, name) for path in paths for folder, _, names in os.walk(path) for name in names)
    for path in (*paths, *paths_inside):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # removed at this moment
        if stat.S_ISREG(status.st_mode):
            bytes_by_inode[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(bytes_by_inode.values())


class HomeFolder:
    """Manages the home folder: its lock, token and room.

    Attributes:
        root: the home itself.
        spare: the bytes of the disk, or of the quota, that are never filled.
        quota: the bytes that the home may take. None: all that its disk has.
        uploads, files, models, jobs, work: folders in the home; the text at the top of this file says what they hold.
    """

    def __init__(self, root: Path, spare: int, quota: int | None = None) -> None:
        self.root, self.spare, self.quota = root, spare, quota
        self.uploads, self.files, self.models = root / "uploads", root / "files", root / "models"
        self.jobs, self.work = root / "jobs", root / "work"

    def prepare(self) -> None:
        """Makes the folders, and removes what a killed server was building."""
        self.claim()
        shutil.rmtree(self.work, ignore_errors=True)
        for folder in (self.uploads, self.files, self.models, self.jobs, self.work):
            folder.mkdir(exist_ok=True)

    def claim(self) -> None:
        """Makes the home, and closes it to other users.

        Raises:
            UsageError: the folder is open to others and holds something else, or is not this user's.
        """
        files.make_private_dir(self.root)
        if not self.root.stat().st_mode & OTHERS_PERMISSIONS:
            return
        names = {path.name for path in self.root.iterdir()}
        if names and not names & HOME_FILE_NAMES:  # someone's folder: closing it is not ours to do
            raise UsageError(
                f"{self.root} is open to others and is not a server's home", f"chmod 700 {self.root}, or name another"
            )
        try:
            files.make_private_dir(self.root, restrict_existing=True)
        except PermissionError:
            raise UsageError(f"{self.root} is open to others and not ours to close", "name another folder") from None

    def require_space(self, size: int) -> None:
        """Raises DiskFull if fewer than the `spare` bytes would be left after `size` further bytes."""
        if self.usable_bytes < size:
            raise disk_full_error()

    @property
    def usable_bytes(self) -> int:
        """Returns how many bytes may still be written, without the spare ones."""
        return max(0, free_bytes(self.root, self.quota) - self.spare)

    def lock(self) -> IO[bytes]:
        """Locks the home until the file is closed or this process dies. Raises Conflict if another server has it.

        Workers do not inherit the lock: a killed server leaves its home unlocked while its worker runs.
        """
        self.claim()
        lock_file = (self.root / "server.lock").open("wb")
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock_file.close()
            raise Conflict(
                f"another server is using {self.root}", "stop that one, or give this one a home of its own"
            ) from None
        return lock_file

    def token(self, requested: str | None) -> str:
        """Returns the requested token, or the stored one, or a new one, which is stored with mode 0600.

        Without a requested token the home is made, and closed to others, first.

        Args:
            requested: a token from the settings.

        Raises:
            UsageError: the home cannot be used (`claim`), or the stored token is too short.
        """
        if requested is not None:
            return requested
        self.claim()
        path = self.root / "token"
        if path.is_file():
            if path.stat().st_mode & OTHERS_PERMISSIONS:
                log.warning("the token could be read by others; it is closed now, but a new one would be safer")
                path.chmod(0o600)
            stored_token = path.read_text("ascii").strip()
            if len(stored_token) < 16:
                raise UsageError("the stored token is empty or too short", f"remove {path}; a new one is made")
            return stored_token
        token = secrets.token_urlsafe(32)
        files.write(path, token + "\n")
        return token

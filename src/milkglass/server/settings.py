"""A server's settings: folders, the token and TLS, and every limit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from milkglass.errors import UsageError

OTHER_FILES = 128  # files that the server opens besides connections, at least


@final
@dataclass(frozen=True)
class Limits:
    """Of connections. Times are in seconds, rates in bytes a second.

    Attributes:
        total: connections at a time.
        per_address: of these from one address.
        reserved: connections from this machine beyond `total`, so that a health check is answered.
        backlog: connections that the kernel keeps waiting; one more is tried again after 1, 3, 7 s.
        handshake: time for the TLS handshake.
        head: time from the start of a connection, or from the last answer, to the end of a request's headers.
        window: time in which a body, or an answer that waits to be read, must progress.
        body_rate: least rate of a request's body over a window.
        body_grace: time that a body which is kept in memory may take, whatever its length.
        body_pace: rate that adds to this time: a longer body may take longer.
        send_rate: least rate at which a waiting answer is read, over a window.
        linger: time for the rest of a body whose request was answered already.
        tick: time between two looks at the deadlines.
    """

    total: int = 512
    per_address: int = 256
    reserved: int = 16
    backlog: int = 2048
    handshake: float = 10.0
    head: float = 20.0
    window: float = 20.0
    body_rate: float = 1024.0
    body_grace: float = 30.0
    body_pace: float = 65_536.0
    send_rate: float = 1024.0
    linger: float = 20.0
    tick: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.per_address <= self.total:
            raise UsageError(
                f"{self.per_address} connections of one address do not fit into {self.total} in all",
                "give 1 at least, and no more than in all",
            )

    def body_time(self, size: int) -> float:
        """Seconds in which a body of `size` bytes must have arrived."""
        return self.body_grace + size / self.body_pace

    def within(self, open_files: int) -> Limits:
        """The same, with no more connections than `open_files` allow: each may need a file besides its socket."""
        total = min(self.total, max(1, (open_files - OTHER_FILES) // 2 - self.reserved))
        per_address = min(self.per_address, max(1, total // 2))
        return replace(self, total=total, per_address=per_address)


MIB = 1 << 20
WORKER = (sys.executable, "-P", "-m", "milkglass.server.training")  # -P: nothing is imported from the job's folder


@dataclass(frozen=True)
class ServerSettings:
    """Sizes are in bytes, times in seconds."""

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
    upload_patience: float = 86_400.0  # after so long without a chunk, an upload is abandoned and thrown away
    spare_disk: int = 64 * MIB  # never filled by an upload
    quota: int | None = None  # bytes that the home may take; None: what its disk has

    max_prompt_tokens: int = 8192
    max_new_tokens: int = 4096
    max_inputs: int = 256  # prompts of one request
    max_batch: int = 16  # rows of one forward pass
    max_waiting: int = 1024  # rows that may wait for a model; more get 503
    max_loaded_models: int = 2
    runner: str = "transformers"  # of inference/runners.py
    prefix_cache: int = 512 * MIB  # keys and values of finished answers, of all loaded models; 0: none are kept
    inference_threads: int | None = None  # CPU threads; None: torch's choice

    training_threads: int | None = None  # of a job; None: torch's choice
    worker: tuple[str, ...] = field(default=WORKER, repr=False)
    max_crashes: int = 3  # a job whose worker dies this often without a word has failed
    cancel_grace: float = 60.0  # then a worker that doesn't stop is killed
    shutdown_grace: float = 60.0  # then a worker that doesn't checkpoint is killed, and resumes from an older one

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.home.absolute())  # workers run in folders of their own
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port {self.port} is not between 0 and 65535", "0 takes any free port")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UsageError("TLS needs both a certificate and a key", "give both files, or neither")
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; 1 is the least", "give a positive number")
        if self.quota is not None and self.quota < 1:
            raise UsageError(f"quota is {self.quota}; 1 is the least", "give a positive number, or none")
        if self.prefix_cache < 0:
            raise UsageError(f"prefix_cache is {self.prefix_cache}; 0 is the least", "0 keeps nothing")
        if self.token is not None and (len(self.token) < 16 or not self.token.isascii() or " " in self.token):
            raise UsageError("the token is too short or not plain ASCII", "16 characters at least, no spaces")


_POSITIVE = (
    "max_body", "max_json", "max_held", "chunk_bytes", "max_upload", "max_uploads",
    "max_prompt_tokens", "max_new_tokens", "max_inputs",
    "max_batch", "max_waiting", "max_loaded_models", "max_crashes",
)  # fmt: skip

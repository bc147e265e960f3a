"""Seals a file to an attested job, and opens it there: HPKE (RFC 9180) with ML-KEM-768 and X25519, by `cryptography`.

The job makes a key pair when it starts, and the hardware signs the digest of its public half beside the TLS key. So a
file opens in that job alone, also if somebody else terminates TLS or keeps what crossed.

Anybody can seal to that public key. So the job takes files of one sender, who gives a token. The job knows only the
token's digest, since the host can read the image and the options that a confidential machine starts with.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from milkglass import files
from milkglass.errors import AttestationError, Busy, Conflict, Unauthorized, UsageError

HPKE_SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)
MLKEM_BYTES, X25519_BYTES = 1_184, 32
# Bytes of a sealed file besides its content: the encapsulated keys of ML-KEM-768 and of X25519, and a tag
SEALED_EXTRA_BYTES = 1_088 + X25519_BYTES + 16
MAX_FILE_BYTES = 256 << 20  # HPKE opens a file as a whole, in memory
MAX_FILES = 64  # the most files in a job's folder, including the job's own
MAX_ARRIVING = 2  # the most files that arrive at a time
MIN_TOKEN_CHARACTERS = 32  # the host has the digest, and can try all short tokens
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
HPKE_INFO_PREFIX = b"milkglass release 1"


def require_file_name(name: str) -> str:
    """Returns a file's name if it is valid, else raises UsageError. A valid name cannot leave its folder."""
    if not FILE_NAME_PATTERN.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a released file", "letters, digits, dots, dashes; at most 100")
    return name


def seal(content: bytes, public_key: bytes, name: str) -> bytes:
    """Seals a file's content to a job's public key, and binds it to a name.

    Raises AttestationError for a key of another length or form.
    """
    if len(public_key) != MLKEM_BYTES + X25519_BYTES:
        raise AttestationError("sealing", f"the job's sealing key has {len(public_key)} bytes")
    try:
        key = hpke.MLKEM768X25519PublicKey(
            MLKEM768PublicKey.from_public_bytes(public_key[:MLKEM_BYTES]),
            X25519PublicKey.from_public_bytes(public_key[MLKEM_BYTES:]),
        )
    except ValueError:
        raise AttestationError("sealing", "the job's sealing key is malformed") from None
    return HPKE_SUITE.encrypt(content, key, HPKE_INFO_PREFIX + name.encode())


def token_digest(token: str) -> str:
    """Returns SHA-256 of a sender's token, in hex. Raises UsageError for a token that is short or not ASCII."""
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii():
        raise UsageError(
            f"the token has {len(token)} characters, or is not ASCII; at least {MIN_TOKEN_CHARACTERS} are required",
            "make it with: openssl rand -hex 32 | tr -d '\\n' > release.token",
        )
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True)
class ReleaseInbox:
    """Receives files that were released to a job, and keeps them opened. No file is replaced.

    Attributes:
        folder: the folder of the files, readable by its owner only.
        public_key: the sealing key's public half: the 1,184 bytes of ML-KEM-768, then the 32 bytes of X25519.
        sender_token_digest: `token_digest` of the token of whoever may release files.
    """

    folder: Path
    public_key: bytes
    sender_token_digest: str
    _key: hpke.MLKEM768X25519PrivateKey = field(repr=False)
    # One file at a time is in memory
    _unseal_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _arrival_slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MAX_ARRIVING), repr=False)

    @classmethod
    def new(cls, folder: Path, sender_token_digest: str) -> Self:
        """Returns an inbox with a new key pair, which is never written. Raises UsageError for an invalid digest."""
        if not DIGEST_PATTERN.fullmatch(sender_token_digest):
            raise UsageError(
                f"{sender_token_digest[:80]!r} is no SHA-256",
                "give the 64 digits that `sha256sum release.token` prints",
            )
        mlkem_key, x25519_key = MLKEM768PrivateKey.generate(), X25519PrivateKey.generate()
        public_key = mlkem_key.public_key().public_bytes_raw() + x25519_key.public_key().public_bytes_raw()
        return cls(
            files.make_private_dir(folder, restrict_existing=True),
            public_key,
            sender_token_digest,
            hpke.MLKEM768X25519PrivateKey(mlkem_key, x25519_key),
        )

    def require_sender(self, authorization: str) -> None:
        """Raises Unauthorized if a request's Authorization header does not have the sender's token."""
        token = authorization.removeprefix("Bearer ")
        if not hmac.compare_digest(hashlib.sha256(token.encode()).hexdigest(), self.sender_token_digest):
            raise Unauthorized("the token is missing, or is not the one whose SHA-256 --receive-from names",
                               "give it with --token-file")  # fmt: skip

    def require_free(self, name: str) -> Path:
        """Returns the path of a new file.

        Raises UsageError for an invalid name, and Conflict if the name is taken or the folder is full.
        """
        target = self.folder / require_file_name(name)
        if target.exists() or target.is_symlink():
            raise _taken_error(name)
        if sum(1 for _ in self.folder.iterdir()) >= MAX_FILES:
            raise Conflict(f"the job's folder has {MAX_FILES} files, and takes no more", "start the job anew")
        return target

    @contextmanager
    def arrival_file(self) -> Iterator[IO[bytes]]:
        """Yields a temporary file for the bytes of a sealed file. Raises Busy if MAX_ARRIVING others are arriving."""
        if not self._arrival_slots.acquire(blocking=False):
            raise Busy(f"{MAX_ARRIVING} files are arriving", "try again when they are there")
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                yield file
        finally:
            self._arrival_slots.release()

    def unseal(self, sealed: IO[bytes], name: str) -> Path:
        """Opens a sealed file that has arrived, keeps its content under its name, and returns the path.

        Raises:
            UsageError: the name is invalid.
            Conflict: the name is taken, or the folder is full.
            AttestationError: the file was sealed to another job or under another name, or it was altered.
        """
        with self._unseal_lock:
            target = self.require_free(name)
            sealed.seek(0)
            try:
                content = HPKE_SUITE.decrypt(sealed.read(), self._key, HPKE_INFO_PREFIX + name.encode())
            except (InvalidTag, ValueError):
                raise AttestationError("sealing", "the file was sealed to another job, or changed on its way") from None
            try:
                files.write(target, content, replace=False)
            except FileExistsError:
                raise _taken_error(name) from None
            return target


def _taken_error(name: str) -> Conflict:
    """Returns the error for a name that is taken."""
    return Conflict(f"the job has a file {name}, and replaces none", "give another name, with --name")

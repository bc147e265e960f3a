"""Seals a file to a job that proved itself: HPKE (RFC 9180) with ML-KEM-768 and X25519, in one shot, by `cryptography`.

The job makes a key pair when it starts, and the hardware signs the digest of its public half beside the TLS key. So a
file opens in that job alone, also if somebody else ends the TLS connection or keeps what crossed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from milkglass import files
from milkglass.errors import AttestationError, UsageError

SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)
MLKEM_BYTES, X25519_BYTES = 1_184, 32
MAX_FILE_BYTES = 4 << 30
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
HPKE_INFO = b"milkglass release 1"


def require_name(name: str) -> str:
    """Returns a file's name. Raises UsageError for one that could leave its folder, or tell more than a name does."""
    if not FILE_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a released file", "letters, digits, dots, dashes; at most 100")
    return name


def seal(content: bytes, public_key: bytes, name: str) -> bytes:
    """Returns a file's content sealed to a job's public key and bound to a name. Raises AttestationError."""
    if len(public_key) != MLKEM_BYTES + X25519_BYTES:
        raise AttestationError("sealing", f"the job's sealing key has {len(public_key)} bytes")
    try:
        key = hpke.MLKEM768X25519PublicKey(
            MLKEM768PublicKey.from_public_bytes(public_key[:MLKEM_BYTES]),
            X25519PublicKey.from_public_bytes(public_key[MLKEM_BYTES:]),
        )
    except ValueError:
        raise AttestationError("sealing", "the job's sealing key is malformed") from None
    return SUITE.encrypt(content, key, HPKE_INFO + name.encode())


@dataclass(frozen=True)
class Vault:
    """Where a job keeps what was released to it.

    Attributes:
        folder: inside the machine, readable by its owner only.
        public_key: the sealing key's public half: ML-KEM's, then X25519's.
    """

    folder: Path
    public_key: bytes
    _key: hpke.MLKEM768X25519PrivateKey = field(repr=False)

    @classmethod
    def new(cls, folder: Path) -> Self:
        """Makes a key pair, which is never written anywhere."""
        kem, curve = MLKEM768PrivateKey.generate(), X25519PrivateKey.generate()
        public_key = kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()
        return cls(files.private_dir(folder, close=True), public_key, hpke.MLKEM768X25519PrivateKey(kem, curve))

    def open(self, sealed: bytes, name: str) -> Path:
        """Opens a sealed file and keeps it under its name. Raises AttestationError, and UsageError for a name."""
        target = self.folder / require_name(name)
        try:
            content = SUITE.decrypt(sealed, self._key, HPKE_INFO + name.encode())
        except (InvalidTag, ValueError):
            raise AttestationError("sealing", "the file was sealed to another job, or changed on its way") from None
        files.write(target, content)
        return target

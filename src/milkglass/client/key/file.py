"""Open, seal and update a key file.

The sealed file, version 1 (docs/formats.md):

    one line of JSON, the header: format, version, scrypt's parameters, nonce, passphrase check, length of the seal
    the seal: ChaCha20-Poly1305 over the payload, the header line as associated data
    32 bytes: SHA-256 of all before, so that damage is distinguished from tampering
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from milkglass import files
from milkglass.client.key import usage
from milkglass.client.key.file_format import (
    CHECK,
    NONCE,
    SALT,
    SCRYPT_P,
    SCRYPT_R,
    TAG,
    Header,
    format_of,
    pack,
    parse,
    unpack,
)
from milkglass.client.key.info import KeyInfo
from milkglass.client.key.key import Key
from milkglass.client.key.passphrases import require_strong
from milkglass.client.label_scale import Scale
from milkglass.errors import DamagedKey, KeyExists, KeyFileError, TamperedKey, TruncatedKey, WrongPassphrase
from milkglass.progress import Log

SCRYPT_N = 1 << 17  # about 0.4 s and 128 MB
CHECKSUM = 32  # bytes
MAX_FILE = 1 << 28  # bytes; a key of a million tokens with four ids each has 16 MB


def seal(key: Key, passphrase: str, scrypt_n: int = SCRYPT_N) -> bytes:
    """The key file's bytes, under any passphrase but an empty one; `write_key` insists on a strong one."""
    if not passphrase:
        raise KeyFileError("the passphrase is empty", "give one of several words: it guards all your fine-tunes")
    payload = pack(key)
    salt, nonce = secrets.token_bytes(SALT), secrets.token_bytes(NONCE)
    fresh = Header(scrypt_n, salt, nonce, bytes(CHECK), len(payload) + TAG, format_of(key))
    sealing, check = _derive(passphrase, fresh)
    header = replace(fresh, check=check)
    body = header.line() + ChaCha20Poly1305(sealing).encrypt(header.nonce, payload, header.line())
    return body + hashlib.sha256(body).digest()


def unseal(data: bytes, passphrase: str, name: str = "this") -> Key:
    """name: of the file, in messages.

    Raises KeyFileError, TruncatedKey, DamagedKey, UnknownKeyVersion, WrongPassphrase or TamperedKey.
    """
    whole = _whole(data)
    header, line = parse(data, whole, name)
    expected = len(line) + header.length + CHECKSUM
    if len(data) < expected:
        raise TruncatedKey(f"the key file is cut off: {len(data)} bytes, {expected} expected", "restore a backup")
    if len(data) > expected:
        raise DamagedKey(f"the key file is damaged: {len(data)} bytes, {expected} expected", "restore a backup")
    if not whole:
        raise DamagedKey("the key file is damaged: its checksum is wrong", "restore a backup")
    sealing, check = _derive(passphrase, header)
    if not hmac.compare_digest(check, header.check):
        raise WrongPassphrase("the passphrase is wrong", "try again; no one can recover a lost passphrase")
    try:
        payload = ChaCha20Poly1305(sealing).decrypt(header.nonce, data[len(line) : -CHECKSUM], line)
    except InvalidTag as error:
        raise TamperedKey(
            "the key file was altered: its checksum holds and its seal does not", "restore a backup, ask who had access"
        ) from error
    return unpack(payload, header.format)


def _whole(data: bytes) -> bool:
    return hashlib.sha256(data[:-CHECKSUM]).digest() == data[-CHECKSUM:]


def _derive(passphrase: str, header: Header) -> tuple[bytes, bytes]:
    """The sealing key, and a value that tells a wrong passphrase from an altered file (it costs a guesser the same)."""
    secret = unicodedata.normalize("NFC", passphrase).encode("utf-8", "surrogatepass")
    both = Scrypt(header.salt, 64, header.scrypt_n, SCRYPT_R, SCRYPT_P).derive(secret)
    return both[:32], hashlib.sha256(b"milkglass/1 passphrase check" + both[32:]).digest()[:CHECK]


def require_key_file(path: Path) -> None:
    """Raises KeyFileError for a file that is not a key file; its passphrase is not needed, its seal is not checked."""
    data = _bytes(path)
    parse(data, _whole(data), str(path))


def _bytes(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_FILE:
        raise KeyFileError(
            f"{path} is not a milkglass key file: it has {size:,} bytes, at most {MAX_FILE:,} are read",
            "give the file that `milkglass obfuscate` wrote",
        )
    return path.read_bytes()


def write_key(
    path: Path, key: Key, passphrase: str, scrypt_n: int = SCRYPT_N, replace: bool = False, weak: bool = False
) -> None:
    """Write atomically, readable by its owner only. An existing key is never overwritten unless `replace`.

    weak: take any passphrase, such as the one that an existing key was opened with. Raises WeakPassphrase, KeyExists.
    """
    if path.exists() and not replace:
        raise _exists(path)
    if not weak and passphrase:
        require_strong(passphrase)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        files.write(path, seal(key, passphrase, scrypt_n), replace)
    except FileExistsError:  # it appeared in the meantime
        raise _exists(path) from None


def _exists(path: Path) -> KeyExists:
    return KeyExists(f"{path} exists already", "give another file: overwriting a key makes its fine-tunes useless")


def read_key(path: Path, passphrase: str) -> Key:
    """Raises KeyFileError or one of its kinds."""
    if not path.is_file():
        raise KeyFileError(f"there is no key file at {path}", "give the file that `milkglass obfuscate` wrote")
    return unseal(_bytes(path), passphrase, str(path))


@dataclass(frozen=True)
class UnlockedKey:
    """`repr` shows nothing secret.

    Attributes:
        path: of the key file.
        key: its content.
        passphrase: with which it was opened, and is sealed again.
    """

    path: Path
    key: Key
    passphrase: str

    def __repr__(self) -> str:
        return f"UnlockedKey({self.path})"

    @classmethod
    def open(cls, path: Path, passphrase: str) -> UnlockedKey:
        """Raises KeyFileError or one of its kinds."""
        return cls(path, read_key(path, passphrase), passphrase)

    def remember(self, numbers: Mapping[str, int] | Scale | None, job: str | None = None) -> UnlockedKey:
        """The key with these label names, or this scale of scores, sealed in it: as the newest, and as the job's."""
        if numbers is None:
            return self
        if isinstance(numbers, Scale):
            return self._changed(lambda info: info.with_scale(numbers, job))
        return self._changed(lambda info: info.with_labels(numbers, job))

    def count(self, texts: int, tokens: int, notice: Log) -> None:
        """Count what is encoded under the key. A threshold of its audits that this passes is a warning."""
        before = usage.read(self.path).passed()
        for who, share, at in usage.add(self.path, texts, tokens).passed():
            if (who, share, at) not in before:
                notice(
                    f"warning: more than {at:,} tokens are encoded under this key: the attacker with {who} of its last "
                    f"audit reads {share} of what carries content by then; see `milkglass key status {self.path}`"
                )

    def sealed_with(self, passphrase: str) -> UnlockedKey:
        """The same key under another passphrase, written over the file and opened again.

        Raises WeakPassphrase; KeyFileError where the written file is not this key.
        """
        with usage.locked(self.path):
            key = read_key(self.path, self.passphrase)
            write_key(self.path, key, passphrase, replace=True)
            if read_key(self.path, passphrase).identifier != key.identifier:
                raise KeyFileError(f"{self.path} is not the key that was sealed", "restore a backup")
        return UnlockedKey(self.path, key, passphrase)

    def _changed(self, change: Callable[[KeyInfo], KeyInfo]) -> UnlockedKey:
        """The file is read again and written under a lock, so that what another command noted meanwhile stays."""
        with usage.locked(self.path):
            key = read_key(self.path, self.passphrase)
            info = change(key.info)
            if info != key.info:
                key = replace(key, info=info)
                write_key(self.path, key, self.passphrase, replace=True, weak=True)  # the one that opened it
        return replace(self, key=key)

"""Opens, seals and updates a key file.

The sealed file, version 1 (docs/formats.md):

    one line of JSON, the header: format, version, scrypt's parameters, nonce, passphrase check, length of the seal
    the seal: ChaCha20-Poly1305 over the payload, the header line as associated data
    32 bytes: SHA-256 of all before, so that damage is distinguished from tampering
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from milkglass import files
from milkglass.client.key import usage
from milkglass.client.key.file_format import (
    CHECK_BYTES,
    NONCE_BYTES,
    SALT_BYTES,
    SCRYPT_P,
    SCRYPT_R,
    TAG_BYTES,
    Header,
    format_of,
    pack,
    parse,
    unpack,
)
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.key.passphrases import require_strong
from milkglass.errors import (
    DamagedKey,
    KeyExists,
    KeyFileError,
    TamperedKey,
    TruncatedKey,
    WrongPassphrase,
    missing_key_error,
)
from milkglass.progress import Log
from milkglass.rows.labels import Scale

SCRYPT_N = 1 << 17  # about 0.4 s and 128 MB
CHECKSUM_BYTES = 32  # SHA-256
MAX_FILE_BYTES = 1 << 28  # bytes; a key of a million tokens with four ids each has 16 MB


@final
@dataclass(frozen=True)
class KeySeal:
    """Seals and opens a key file. It is derived from the passphrase, which is not kept. `repr` shows no secret.

    Attributes:
        scrypt_n: scrypt's cost.
        salt: scrypt's salt.
        passphrase_check: distinguishes a wrong passphrase from an altered file.
        cipher_key: the key of the cipher, 32 bytes.
    """

    scrypt_n: int
    salt: bytes
    passphrase_check: bytes
    cipher_key: bytes = field(repr=False)

    @classmethod
    def derive(cls, passphrase: str, scrypt_n: int, salt: bytes) -> KeySeal:
        """Derives a seal from a passphrase.

        An attacker who guesses passphrases by the check needs as long as one who guesses by the seal.
        """
        if not isinstance(passphrase, str):
            raise KeyFileError("the passphrase is not a text", "give it as a string")
        secret = unicodedata.normalize("NFC", passphrase).encode("utf-8", "surrogatepass")
        derived_bytes = Scrypt(salt, 64, scrypt_n, SCRYPT_R, SCRYPT_P).derive(secret)
        check = hashlib.sha256(b"milkglass/1 passphrase check" + derived_bytes[32:]).digest()[:CHECK_BYTES]
        return cls(scrypt_n, salt, check, derived_bytes[:32])

    @classmethod
    def new(cls, passphrase: str, scrypt_n: int = SCRYPT_N) -> KeySeal:
        """Makes a seal with a fresh salt. `write_key` requires a strong passphrase.

        Raises KeyFileError for an empty passphrase.
        """
        if not passphrase:
            raise KeyFileError("the passphrase is empty", "give one of several words: it guards all your fine-tunes")
        return cls.derive(passphrase, scrypt_n, secrets.token_bytes(SALT_BYTES))

    @classmethod
    def of(cls, file_bytes: bytes, passphrase: str, name: str = "this") -> KeySeal:
        """Derives the seal of a file's bytes. Raises what the function `unseal` raises."""
        header, _ = _parse(file_bytes, name)
        seal = cls.derive(passphrase, header.scrypt_n, header.salt)
        if not hmac.compare_digest(seal.passphrase_check, header.passphrase_check):
            raise WrongPassphrase("the passphrase is wrong", "try again; no one can recover a lost passphrase")
        return seal

    def matches(self, passphrase: str) -> bool:
        """Returns whether this seal was derived from a passphrase. Like each derivation this takes 0.4 s or so."""
        return hmac.compare_digest(self.derive(passphrase, self.scrypt_n, self.salt).cipher_key, self.cipher_key)

    def seal(self, key: Key) -> bytes:
        """Returns the bytes of a key file, with a fresh nonce."""
        payload = pack(key)
        header = Header(
            self.scrypt_n,
            self.salt,
            secrets.token_bytes(NONCE_BYTES),
            self.passphrase_check,
            len(payload) + TAG_BYTES,
            format_of(key),
        )
        body = header.line() + ChaCha20Poly1305(self.cipher_key).encrypt(header.nonce, payload, header.line())
        return body + hashlib.sha256(body).digest()

    def unseal(self, file_bytes: bytes, name: str = "this") -> Key:
        """Returns the key in a file's bytes. Raises what the function `unseal` raises."""
        header, line = _parse(file_bytes, name)
        if (header.scrypt_n, header.salt, header.passphrase_check) != (self.scrypt_n, self.salt, self.passphrase_check):
            raise WrongPassphrase(
                f"{name} was sealed with another passphrase after it was opened", "begin again with the new passphrase"
            )
        try:
            sealed = file_bytes[len(line) : -CHECKSUM_BYTES]
            payload = ChaCha20Poly1305(self.cipher_key).decrypt(header.nonce, sealed, line)
        except InvalidTag as error:
            raise TamperedKey(
                "the key file was altered: its checksum holds and its seal does not",
                "restore a backup, ask who had access",
            ) from error
        return unpack(payload, header.format)


def seal(key: Key, passphrase: str, scrypt_n: int = SCRYPT_N) -> bytes:
    """Returns the bytes of a new key file. `scrypt_n` is scrypt's cost. Raises KeyFileError for an empty passphrase."""
    return KeySeal.new(passphrase, scrypt_n).seal(key)


def unseal(file_bytes: bytes, passphrase: str, name: str = "this") -> Key:
    """Returns the key in a file's bytes. `name` is the file's, for messages.

    Raises:
        KeyFileError: it is not a key file; also its kinds TruncatedKey, DamagedKey, UnknownKeyVersion, WrongPassphrase
            and TamperedKey.
    """
    return KeySeal.of(file_bytes, passphrase, name).unseal(file_bytes, name)


def _parse(file_bytes: bytes, name: str) -> tuple[Header, bytes]:
    """Returns the header of a complete file, and the header's line. Raises what `unseal` raises for a broken file."""
    has_checksum = _has_checksum(file_bytes)
    header, line = parse(file_bytes, has_checksum, name)
    length = len(line) + header.ciphertext_bytes + CHECKSUM_BYTES
    if len(file_bytes) < length:
        raise TruncatedKey(f"the key file is cut off: {len(file_bytes)} bytes, {length} expected", "restore a backup")
    if len(file_bytes) > length:
        raise DamagedKey(f"the key file is damaged: {len(file_bytes)} bytes, {length} expected", "restore a backup")
    if not has_checksum:
        raise DamagedKey("the key file is damaged: its checksum is wrong", "restore a backup")
    return header, line


def _has_checksum(file_bytes: bytes) -> bool:
    return hashlib.sha256(file_bytes[:-CHECKSUM_BYTES]).digest() == file_bytes[-CHECKSUM_BYTES:]


def require_key_file(path: Path) -> None:
    """Raises KeyFileError for a file that is not a key file. This needs no passphrase and checks no seal."""
    file_bytes = _read_limited(path)
    parse(file_bytes, _has_checksum(file_bytes), str(path))


def _read_limited(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise KeyFileError(
            f"{path} is not a milkglass key file: it has {size:,} bytes, at most {MAX_FILE_BYTES:,} are read",
            "give the file that `milkglass obfuscate` wrote",
        )
    return path.read_bytes()


def write_key(
    path: Path, key: Key, passphrase: str, scrypt_n: int = SCRYPT_N, replace: bool = False, allows_weak: bool = False
) -> KeySeal:
    """Writes a key file atomically, readable by its owner only.

    Args:
        scrypt_n: scrypt's cost.
        replace: whether an existing file is overwritten.
        allows_weak: whether a weak passphrase is accepted, such as the one of an existing key.

    Raises:
        KeyExists: the file exists, and `replace` is not set.
        WeakPassphrase: the passphrase is weak, and `allows_weak` is not set.
        KeyFileError: the passphrase is empty.
    """
    if not replace:
        require_free(path)
    if not allows_weak and passphrase:
        require_strong(passphrase)
    path.parent.mkdir(parents=True, exist_ok=True)
    key_seal = KeySeal.new(passphrase, scrypt_n)
    try:
        files.write(path, key_seal.seal(key), replace)
    except FileExistsError:  # it appeared meanwhile
        raise _exists_error(path) from None
    return key_seal


def require_free(path: Path) -> None:
    """Raises KeyExists if a new key would replace a file, or follow a link."""
    if path.is_symlink() or path.exists():
        raise _exists_error(path)


def _exists_error(path: Path) -> KeyExists:
    is_link = path.is_symlink() and not path.exists()
    fault = f"{path} is a link that leads nowhere" if is_link else f"{path} exists already"
    return KeyExists(fault, "give another file: overwriting a key makes its fine-tunes useless")


def read_key(path: Path, passphrase: str) -> Key:
    """Returns the key of a file. Raises KeyFileError; each reason has its own subclass."""
    return UnlockedKey.open(path, passphrase).key


def leftovers(path: Path) -> list[Path]:
    """Returns the files that killed commands left beside a key: sealed copies and counts."""
    name = re.escape(path.name)
    pattern = re.compile(rf"\.({name}|\.{name}\.usage\.json)\.[0-9a-f]{{8}}\.tmp")
    try:
        return sorted(file for file in path.absolute().parent.iterdir() if pattern.fullmatch(file.name))
    except OSError:
        return []


def clear_leftovers(path: Path) -> None:
    """Removes the leftovers of a key, unless another command has the lock and may be writing them."""
    if not leftovers(path):
        return
    with suppress(OSError), usage.exclusive_lock(path, wait=False):
        for leftover in leftovers(path):
            leftover.unlink()


@dataclass(frozen=True)
class UnlockedKey:
    """Holds the key of a file, and the seal with which the file is read and written again. `repr` shows no secret."""

    path: Path
    key: Key
    seal: KeySeal

    def __repr__(self) -> str:
        return f"UnlockedKey({self.path})"

    @classmethod
    def open(cls, path: Path, passphrase: str) -> UnlockedKey:
        """Opens a key file. Raises KeyFileError; each reason has its own subclass."""
        file_bytes = _read_key_file(path)
        seal = KeySeal.of(file_bytes, passphrase, str(path))
        unlocked = cls(path, seal.unseal(file_bytes, str(path)), seal)
        clear_leftovers(path)
        return unlocked

    @classmethod
    def new(
        cls, path: Path, key: Key, passphrase: str, scrypt_n: int = SCRYPT_N, allows_weak: bool = False
    ) -> UnlockedKey:
        """Writes a new key file. Raises what `write_key` raises."""
        return cls(path, key, write_key(path, key, passphrase, scrypt_n, allows_weak=allows_weak))

    def reread(self, path: Path | None = None) -> Key:
        """Returns the key that is now in the file, or in a copy of it at `path`. Raises KeyFileError if none opens."""
        path = path or self.path
        return self.seal.unseal(_read_key_file(path), str(path))

    def remember(
        self, labels: Mapping[str, int] | Scale | None, job: str | None = None, model: str | None = None
    ) -> UnlockedKey:
        """Returns the key with label names or a scale of scores sealed in it, as the newest and as the job's.

        Args:
            model: the server's name of the key's model that the job trains, or that was uploaded. A proxy with several
                keys trusts these names, and not the server, for which key a model belongs to.
        """

        def with_names(changed_info: KeyInfo) -> KeyInfo:
            if isinstance(labels, Scale):
                changed_info = changed_info.with_scale(labels, job)
            elif labels is not None:
                changed_info = changed_info.with_labels(labels, job)
            return changed_info if model is None else changed_info.with_upload(model, job)

        return self if labels is None and model is None else self._change_info(with_names)

    def count(self, texts: int, tokens: int, notice: Log) -> None:
        """Counts text that is encoded under the key, and warns when this passes a threshold of its audits."""
        passed_before = usage.read(self.path).passed_thresholds()
        for attacker, share, threshold in usage.add(self.path, texts, tokens).passed_thresholds():
            if (attacker, share, threshold) not in passed_before:
                notice(
                    f"warning: more than {threshold:,} tokens are encoded under this key: the attacker with {attacker} "
                    f"of its last audit reads {share} of what carries content by then; see `milkglass key status "
                    f"{self.path}`"
                )

    def seal_again(self, passphrase: str) -> UnlockedKey:
        """Seals the key under another passphrase, writes it over the file, and opens it again.

        Raises WeakPassphrase, or KeyFileError if the written file is not this key.
        """
        with usage.exclusive_lock(self.path):
            key = self.reread()
            seal = write_key(self.path, key, passphrase, replace=True)
            unlocked = UnlockedKey(self.path, key, seal)
            if unlocked.reread().identifier != key.identifier:
                raise KeyFileError(f"{self.path} is not the key that was sealed", "restore a backup")
        return unlocked

    def _change_info(self, change: Callable[[KeyInfo], KeyInfo]) -> UnlockedKey:
        """Reads and writes the file under a lock, so that another command's changes stay."""
        with usage.exclusive_lock(self.path):
            key = self.reread()
            new_info = change(key.info)
            if new_info != key.info:
                key = replace(key, info=new_info)
                files.write(self.path, self.seal.seal(key))
        return replace(self, key=key)


def _read_key_file(path: Path) -> bytes:
    if not path.is_file():
        raise missing_key_error(path)
    return _read_limited(path)

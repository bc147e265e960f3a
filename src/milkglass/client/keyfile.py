"""The key's sealed file, version 1 (docs/formats.md):

    one line of JSON, the header: format, version, scrypt's parameters, nonce, passphrase check, length of the seal
    the seal: ChaCha20-Poly1305 over the payload, the header line as associated data
    32 bytes: SHA-256 of all before, so that damage is told from tampering

What this module does not know: what a key is for, and where a model lies.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from numpy.typing import NDArray
from safetensors.numpy import load, save

from milkglass.client.key import Key
from milkglass.errors import (
    DamagedKey,
    KeyExists,
    KeyFileError,
    TamperedKey,
    TruncatedKey,
    UnknownKeyVersion,
    WrongPassphrase,
)

FORMAT, VERSION = "milkglass-key", 1
SCRYPT_N = 1 << 17  # about 0.4 s and 128 MB
MAX_SCRYPT_N = 1 << 20  # a file asking for more is refused, not obeyed
MAX_HEADER = 4096
CHECKSUM = 32


def seal(key: Key, passphrase: str, scrypt_n: int = SCRYPT_N) -> bytes:
    """The key file's bytes."""
    if not passphrase:
        raise KeyFileError("the passphrase is empty", "give one of several words: it guards all your fine-tunes")
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
    sealing, check = _derive(passphrase, salt, scrypt_n, 8, 1)
    payload = save(
        {"root": np.frombuffer(key.root, np.uint8), "sigma": np.asarray(key.sigma, np.int32)},
        {"model_digest": key.model_digest, "about": json.dumps(dict(key.about)), "sigma_sha256": _sigma_sum(key.sigma)},
    )
    header = _header_line(
        {
            "format": FORMAT,
            "version": VERSION,
            "kdf": {"name": "scrypt", "n": scrypt_n, "r": 8, "p": 1, "salt": _b64(salt)},
            "cipher": "chacha20-poly1305",
            "nonce": _b64(nonce),
            "check": _b64(check),
            "length": len(payload) + 16,
        }
    )
    body = header + ChaCha20Poly1305(sealing).encrypt(nonce, payload, header)
    return body + hashlib.sha256(body).digest()


def unseal(data: bytes, passphrase: str) -> Key:
    """Raises TruncatedKey, DamagedKey, UnknownKeyVersion, WrongPassphrase or TamperedKey."""
    whole = hashlib.sha256(data[:-CHECKSUM]).digest() == data[-CHECKSUM:]
    header, line = _parse_header(data, whole)
    expected = len(line) + int(header["length"]) + CHECKSUM
    if len(data) < expected:
        raise TruncatedKey(f"the key file is cut off: {len(data)} bytes, {expected} expected", "restore a backup")
    body = data[:-CHECKSUM]
    if len(data) > expected or not whole:
        raise DamagedKey("the key file is damaged: its checksum is wrong", "restore a backup")
    kdf = header["kdf"]
    sealing, check = _derive(passphrase, _unb64(kdf["salt"]), int(kdf["n"]), int(kdf["r"]), int(kdf["p"]))
    if not hmac.compare_digest(check, _unb64(header["check"])):
        raise WrongPassphrase("the passphrase is wrong", "try again; nobody can recover a lost passphrase")
    try:
        payload = ChaCha20Poly1305(sealing).decrypt(_unb64(header["nonce"]), body[len(line) :], line)
    except InvalidTag as error:
        raise TamperedKey(
            "the key file was altered: its checksum holds and its seal does not", "restore a backup, ask who had access"
        ) from error
    return _parse_payload(payload)


def _derive(passphrase: str, salt: bytes, n: int, r: int, p: int) -> tuple[bytes, bytes]:
    """The sealing key, and a value that tells a wrong passphrase from an altered file (it costs a guesser the same)."""
    both = Scrypt(salt, 64, n, r, p).derive(unicodedata.normalize("NFC", passphrase).encode("utf-8", "surrogatepass"))
    return both[:32], hashlib.sha256(b"milkglass/1 passphrase check" + both[32:]).digest()[:16]


def _header_line(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def require_key_file(path: Path) -> None:
    """Raises KeyFileError for a file that is none; its passphrase is not needed, and its seal is not checked."""
    with path.open("rb") as file:
        _parse_header(file.read(MAX_HEADER), whole=False)


def _parse_header(data: bytes, whole: bool) -> tuple[dict[str, Any], bytes]:
    """`whole`: the file's checksum holds, so that what is odd in the header was written so."""
    if not data.startswith(b"{"):
        if not data:
            raise TruncatedKey("the key file is empty", "restore a backup")
        raise KeyFileError("this is not a milkglass key file", "give the file that `milkglass obfuscate` wrote")
    line = data[: data.find(b"\n") + 1] if b"\n" in data[:MAX_HEADER] else b""
    if not line:
        raise TruncatedKey(f"the key file is cut off in its header: {len(data)} bytes", "restore a backup")
    try:
        header = json.loads(line)
        if whole and header["format"] == FORMAT and header["version"] != VERSION:
            raise UnknownKeyVersion(f"key file version {header['version']!r}, this reads {VERSION}", "update milkglass")
        kdf = header["kdf"]
        plausible = (
            (header["format"], header["version"]) == (FORMAT, VERSION)
            and kdf["name"] == "scrypt"
            and 2 <= int(kdf["n"]) <= MAX_SCRYPT_N
            and int(kdf["n"]) & (int(kdf["n"]) - 1) == 0
            and (int(kdf["r"]), int(kdf["p"])) == (8, 1)
            and len(_unb64(kdf["salt"])) == 16
            and len(_unb64(header["nonce"])) == 12
            and len(_unb64(header["check"])) == 16
            and int(header["length"]) >= 16
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedKey("the header of the key file is damaged", "restore a backup") from error
    if not plausible:
        raise DamagedKey("the header of the key file asks for something impossible", "restore a backup")
    return header, line


def _parse_payload(payload: bytes) -> Key:
    """The payload is authentic here. Its metadata is read from safetensors' header."""
    arrays = load(payload)
    length = int.from_bytes(payload[:8], "little")
    meta = json.loads(payload[8 : 8 + length])["__metadata__"]
    sigma = arrays["sigma"].astype(np.int32)
    if _sigma_sum(sigma) != meta["sigma_sha256"]:
        raise DamagedKey("the permutation in the key file fails its checksum", "restore a backup")
    return Key(arrays["root"].tobytes(), meta["model_digest"], sigma, json.loads(meta["about"]))


def _sigma_sum(sigma: NDArray[np.int32]) -> str:
    return hashlib.sha256(np.asarray(sigma, "<i4").tobytes()).hexdigest()


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unb64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def write_key(path: Path, key: Key, passphrase: str, scrypt_n: int = SCRYPT_N, replace: bool = False) -> None:
    """Write atomically, readable by its owner only. An existing key is never overwritten unless `replace`."""
    if path.exists() and not replace:
        raise _exists(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(seal(key, passphrase, scrypt_n))
            file.flush()
            os.fsync(file.fileno())
        if replace:
            partial.replace(path)
        else:
            _take_name(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _take_name(partial: Path, path: Path) -> None:
    """Under its name unless something has it: what appeared there since anybody looked is not overwritten."""
    try:
        try:
            os.link(partial, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links, such as a memory stick's: hold the name, then fill it
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            partial.replace(path)
    except FileExistsError:
        raise _exists(path) from None


def _exists(path: Path) -> KeyExists:
    return KeyExists(f"{path} exists already", "give another file: overwriting a key makes its fine-tunes useless")


def _sync_folder(folder: Path) -> None:
    """A new name survives a power cut only when its folder is on the disk, too."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_key(path: Path, passphrase: str) -> Key:
    """Raises KeyFileError or one of its kinds."""
    if not path.is_file():
        raise KeyFileError(f"there is no key file at {path}", "give the file that `milkglass obfuscate` wrote")
    return unseal(path.read_bytes(), passphrase)

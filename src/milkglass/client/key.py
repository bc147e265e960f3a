"""The key: one root secret, sub-keys by label, and a sealed file.

Sub-keys are HKDF-SHA256(root, salt = digest of the base model, info = "milkglass/1 " + label), so a key used with
another model gives another permutation. The permutation and the noise are drawn from ChaCha20 key streams, never from a
framework's generator (those change between versions, and are not cryptographic). `vectors/` holds known answers.

The sealed file, version 1 (docs/formats.md):

    one line of JSON, the header: format, version, scrypt's parameters, nonce, passphrase check, length of the seal
    the seal: ChaCha20-Poly1305 over the payload, the header line as associated data
    32 bytes: SHA-256 of all before, so that damage is told from tampering

What this module does not know: schemes, but for how many ids a token has and what its cluster is, and where a model
lies. It does not protect a key in memory: Python cannot wipe it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import unicodedata
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from numpy.typing import NDArray
from safetensors.numpy import load, save

from milkglass.errors import (
    DamagedKey,
    KeyExists,
    KeyFileError,
    KeyForOtherModel,
    TamperedKey,
    TruncatedKey,
    UnknownKeyVersion,
    WrongPassphrase,
)
from milkglass.schemes.aliases import Slots

FORMAT, VERSION = "milkglass-key", 1
SCRYPT_N = 1 << 17  # about 0.4 s and 128 MB
MAX_SCRYPT_N = 1 << 20  # a file asking for more is refused, not obeyed
MAX_HEADER = 4096
CHECKSUM = 32


# --- sub-keys and streams ---------------------------------------------------------------------------------------------
def subkey(root: bytes, model_digest: str, label: str) -> bytes:
    """32 bytes for one purpose."""
    salt = model_digest.encode()
    return HKDF(hashes.SHA256(), 32, salt, b"milkglass/1 " + label.encode()).derive(root)


class Stream:
    """A ChaCha20 key stream. The nonce is fixed because each sub-key is used for one stream only."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(key, b"\0" * 16), None).encryptor()

    def words(self, count: int) -> NDArray[np.uint32]:
        """The next `count` little-endian 32-bit words."""
        return np.frombuffer(self._cipher.update(b"\0" * (4 * count)), dtype="<u4")

    def uniform(self, count: int) -> NDArray[np.float64]:
        """`count` numbers strictly between 0 and 1, 52 bits each (with 53, the largest would round to 1)."""
        words = np.frombuffer(self._cipher.update(b"\0" * (8 * count)), dtype="<u8")
        return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def laplace(self, count: int) -> NDArray[np.float64]:
        """`count` draws of the Laplace distribution with scale 1, by its inverse distribution function."""
        centred = self.uniform(count) - 0.5
        return -np.sign(centred) * np.log1p(-2 * np.abs(centred))


def permutation(key: bytes, n: int, pinned: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """A uniform permutation of n ids, sigma[original] = scrambled; `pinned` ids keep their place.

    Fisher-Yates from the end; each index by rejection sampling of 32-bit words, so that no index is likelier.
    """
    movable = np.setdiff1d(np.arange(n, dtype=np.int32), np.asarray(pinned, np.int32))
    shuffled = movable.tolist()
    stream = Stream(key)
    buffer: list[int] = []
    for i in range(len(shuffled) - 1, 0, -1):
        limit = (1 << 32) - (1 << 32) % (i + 1)
        while True:
            if not buffer:
                buffer = stream.words(4096).tolist()[::-1]
            word = buffer.pop()
            if word < limit:
                break
        j = word % (i + 1)
        shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
    sigma = np.arange(n, dtype=np.int32)
    sigma[movable] = shuffled
    return sigma


def hashed_permutation(key: bytes, n: int, pinned: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """The same by hashing, as SentinelLMs maps tokens: ids sorted by BLAKE2b of each under the key."""
    movable = np.setdiff1d(np.arange(n, dtype=np.int32), np.asarray(pinned, np.int32))
    hashes = [hashlib.blake2b(int(one).to_bytes(8, "little"), key=key, digest_size=16).digest() for one in movable]
    sigma = np.arange(n, dtype=np.int32)
    sigma[movable[sorted(range(len(movable)), key=hashes.__getitem__)]] = movable
    return sigma


# --- the key and its file ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Key:
    """What the client must keep. `repr` shows nothing secret.

    root: 32 bytes. model_digest: the base model that it belongs to. sigma: (n',) int32, slot -> scrambled id, stored as
    well so that text can be recovered should the derivation ever change; without aliases a slot is an original id and
    n' is n (`slots`). about: what the codec needs (where the tokenizer is, the scheme's parameters, the label names);
    private, sealed with the rest.
    """

    root: bytes
    model_digest: str
    sigma: NDArray[np.int32]
    about: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Key(model_digest={self.model_digest!r}, vocab_size={len(self.sigma)})"

    @classmethod
    def new(
        cls,
        model_digest: str,
        vocab_size: int,
        pinned: tuple[int, ...],
        about: Mapping[str, Any],
        order: Callable[[bytes, int, tuple[int, ...]], NDArray[np.int32]] = permutation,
        root: bytes | None = None,
    ) -> Key:
        """root: of a key that is no secret, such as a recipe's; None draws one. order: how ids are permuted."""
        root = secrets.token_bytes(32) if root is None else root
        sigma = order(subkey(root, model_digest, "permutation"), vocab_size, pinned)
        return cls(root, model_digest, sigma, about)

    @property
    def slots(self) -> Slots:
        """The token of each slot of sigma."""
        told = self.about.get("slots")
        if told is None:
            return Slots.of(len(self.sigma))
        copies, single = int(told["copies"]), told["single"]
        n = (len(self.sigma) + (copies - 1) * len(single)) // copies
        slots = Slots.of(n, copies, single)
        if len(slots.origin) != len(self.sigma):
            raise DamagedKey(f"a key of {len(self.sigma)} ids cannot give {copies} to each token", "restore a backup")
        return slots

    @property
    def first(self) -> NDArray[np.int32]:
        """(n,) the scrambled id of each token, of its first alias where it has several."""
        return self.sigma[: self.slots.tokens]

    @property
    def inverse(self) -> NDArray[np.int64]:
        """(n',) the token behind each scrambled id; with shared rows the one whose place it was, which says nothing."""
        return self.slots.origin[np.argsort(self.sigma)]

    @property
    def groups(self) -> list[NDArray[np.int64]] | None:
        """The clusters, each ascending, where the key keeps them."""
        told = self.about.get("groups")
        return None if told is None else unpacked_groups(told)

    @property
    def shares(self) -> bool:
        """Whether an id names a cluster and no token."""
        return (self.about.get("scheme") or {}).get("rows") == "shared"

    def stream(self, label: str) -> Stream:
        return Stream(subkey(self.root, self.model_digest, label))

    @property
    def identifier(self) -> str:
        """16 bytes in hex that tell whether a scrambled model was made with this key. Public: a server is shown it.

        HKDF's outputs for two labels are independent to anybody without the root, so this one reveals nothing of the
        permutation, the noise or the root. It does link what was made with one key; so does comparing the tables.
        Derived and never stored, so that every key file has one.
        """
        return subkey(self.root, self.model_digest, "identifier")[:16].hex()

    def require_model(self, digest: str) -> None:
        if digest != self.model_digest:
            raise KeyForOtherModel(
                f"this key belongs to the model {self.model_digest}, not to {digest}",
                "give the model that the key was made for, or make a new key with `milkglass obfuscate`",
            )


def packed_groups(groups: list[NDArray[np.int64]], n: int) -> str:
    """base64 of zlib of (n,) little-endian int32: the number of each token's cluster, -1 outside every cluster."""
    number = np.full(n, -1, "<i4")
    for at, group in enumerate(groups):
        number[group] = at
    return _b64(zlib.compress(number.tobytes(), 9))


def unpacked_groups(text: str) -> list[NDArray[np.int64]]:
    """Raises DamagedKey."""
    try:
        number = np.frombuffer(zlib.decompress(_unb64(text)), "<i4")
    except (ValueError, zlib.error) as error:
        raise DamagedKey("the clusters in the key file cannot be read", "restore a backup") from error
    order = np.argsort(number, kind="stable")
    inside = order[number[order] >= 0]
    return np.split(inside, np.flatnonzero(np.diff(number[inside])) + 1) if len(inside) else []


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

"""Writes the bytes of a key file, version 1, and reads them strictly: the header line and the payload.

docs/formats.md describes both. A header line must equal the line that its fields are written as. This refuses duplicate
keys, other spacing, another order, other spellings of a number or a string, and fields that version 1 does not define.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from milkglass.client.key.key import Key, KeyInfo
from milkglass.errors import CorruptCheckpoint, DamagedKey, KeyFileError, TruncatedKey, UnknownKeyVersion
from milkglass.models.safetensors_header import METADATA, parse_header
from milkglass.unique_keys import unique_keys

KEY_FORMAT, CODEC_FORMAT, VERSION = "milkglass-key", "milkglass-codec", 1
CIPHER, KDF = "chacha20-poly1305", "scrypt"
SCRYPT_R, SCRYPT_P = 8, 1
MAX_SCRYPT_N = 1 << 20  # a file asking for more is refused, not obeyed
MAX_HEADER_BYTES = 4096  # bytes of the header line
SALT_BYTES, NONCE_BYTES, CHECK_BYTES, TAG_BYTES, ROOT_BYTES = 16, 12, 16, 16, 32
HEADER_FIELDS = {"format", "version", "kdf", "cipher", "nonce", "check", "length"}
FIRST_BYTES = b'{"check":"'  # keys are sorted
KDF_FIELDS = {"name", "n", "r", "p", "salt"}

# The payload is a safetensors file with the root secret, the permutation and further information. It is authentic when
# it is read, since only someone with the passphrase can seal. It is read strictly nevertheless: a key that is not of
# version 1 must not reach a user's models. A codec alone has no root, from which the identifier is derived, so the
# payload has the identifier.
TENSOR_DTYPES = {KEY_FORMAT: {"root": np.uint8, "sigma": np.int32}, CODEC_FORMAT: {"sigma": np.int32}}
METADATA_NAMES = {KEY_FORMAT: {"model_digest", "about", "sigma_sha256"}}
METADATA_NAMES[CODEC_FORMAT] = METADATA_NAMES[KEY_FORMAT] | {"identifier"}
IDENTIFIER_PATTERN = re.compile("[0-9a-f]{32}")


@final
@dataclass(frozen=True)
class Header:
    """Holds the header of a key file. `parse` checks every value of a header that is read.

    Attributes:
        scrypt_n: scrypt's cost, a power of two from 2 to 2^20.
        salt: scrypt's salt.
        nonce: the cipher's nonce.
        passphrase_check: bytes derived from the passphrase, which distinguish a wrong passphrase from an altered file.
        ciphertext_bytes: the size of the ciphertext, with its tag.
        format: KEY_FORMAT for a whole key, CODEC_FORMAT for a codec alone.
    """

    scrypt_n: int
    salt: bytes
    nonce: bytes
    passphrase_check: bytes
    ciphertext_bytes: int
    format: str = KEY_FORMAT

    def line(self) -> bytes:
        """Returns the header as the file has it: JSON in ASCII, keys sorted, no spaces, ended by a line feed."""
        kdf = {"name": KDF, "n": self.scrypt_n, "r": SCRYPT_R, "p": SCRYPT_P, "salt": _to_base64(self.salt)}
        header = {
            "format": self.format, "version": VERSION, "kdf": kdf, "cipher": CIPHER,
            "nonce": _to_base64(self.nonce), "check": _to_base64(self.passphrase_check),
            "length": self.ciphertext_bytes,
        }  # fmt: skip
        return json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


def parse(file_bytes: bytes, has_valid_checksum: bool, name: str = "this") -> tuple[Header, bytes]:
    """Parses the header of a key file, and returns it with its line as bytes.

    Args:
        file_bytes: the file's bytes, or its beginning with the whole header line.
        has_valid_checksum: whether the file's checksum is right. Then a header that is not of version 1 was written so,
            and the error does not call it damaged.
        name: the file's name in messages.

    Raises:
        KeyFileError: the file is not a key file; or, as its subclasses, TruncatedKey, DamagedKey, UnknownKeyVersion.
    """
    if not file_bytes:
        raise TruncatedKey(f"the key file is empty: {name} has no bytes", "is it the right file? Restore a backup")
    if not _looks_like_key(file_bytes):
        raise _foreign_error(name)
    line = file_bytes[: file_bytes.find(b"\n", 0, MAX_HEADER_BYTES) + 1]
    if not line:
        raise TruncatedKey(f"the key file is cut off in its header: {len(file_bytes)} bytes", "restore a backup")
    try:
        return _read_header(line, has_valid_checksum, name), line
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedKey("the header of the key file is damaged", "restore a backup") from error


def _looks_like_key(file_bytes: bytes) -> bool:
    """Returns whether a file begins like a key file or has several of its field names. It may be damaged or cut off."""
    head = file_bytes[:MAX_HEADER_BYTES]
    if not head.startswith(b"{"):
        return False
    return (
        FIRST_BYTES.startswith(head[: len(FIRST_BYTES)])
        or sum(f'"{name}"'.encode() in head for name in HEADER_FIELDS) > 1
    )


def _read_header(line: bytes, has_valid_checksum: bool, name: str) -> Header:
    """Reads a header. Raises DamagedKey; ValueError, KeyError or TypeError for what version 1 never writes."""
    fields = json.loads(line.decode("ascii"), object_pairs_hook=unique_keys)
    if has_valid_checksum and fields["format"] not in TENSOR_DTYPES:
        raise _foreign_error(name)
    if has_valid_checksum and type(fields["version"]) is int and fields["version"] != VERSION:
        raise UnknownKeyVersion(f"key file version {fields['version']}, this reads {VERSION}", "update milkglass")
    kdf = fields["kdf"]
    _require_types(fields, kdf)
    fixed_values = (fields["version"], fields["cipher"], kdf["name"], kdf["r"], kdf["p"])
    header = Header(
        kdf["n"],
        _from_base64(kdf["salt"]),
        _from_base64(fields["nonce"]),
        _from_base64(fields["check"]),
        fields["length"],
        fields["format"],
    )
    is_plausible = (
        fixed_values == (VERSION, CIPHER, KDF, SCRYPT_R, SCRYPT_P)
        and header.format in TENSOR_DTYPES
        and 2 <= header.scrypt_n <= MAX_SCRYPT_N
        and header.scrypt_n & (header.scrypt_n - 1) == 0
        and (len(header.salt), len(header.nonce), len(header.passphrase_check))
        == (SALT_BYTES, NONCE_BYTES, CHECK_BYTES)
        and header.ciphertext_bytes >= TAG_BYTES
    )
    if not is_plausible:
        raise DamagedKey("the header of the key file asks for something impossible", "restore a backup")
    if header.line() != line:
        raise ValueError("the header is not spelt as version 1 spells it")
    return header


def _require_types(header: Mapping[str, Any], kdf: Mapping[str, Any]) -> None:
    """Refuses True, which equals 1 in Python, and 8.0, which equals 8: neither is a whole number in a key file."""
    if set(header) != HEADER_FIELDS or set(kdf) != KDF_FIELDS:
        raise ValueError("the header has other fields than version 1 defines")
    numbers = (header["version"], header["length"], kdf["n"], kdf["r"], kdf["p"])
    if any(type(number) is not int for number in numbers):
        raise TypeError("a number of the header is not a whole number")


def _to_base64(data: bytes) -> str:
    """Returns bytes as base64."""
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    """Returns the bytes of a base64 text. Raises ValueError for any other text."""
    return base64.b64decode(text, validate=True)


def _foreign_error(name: str) -> KeyFileError:
    """Returns the error for a file that is not a key file."""
    return KeyFileError(f"{name} is not a milkglass key file", "give the file that `milkglass obfuscate` wrote")


def format_of(key: Key) -> str:
    """Returns the format of a key's file: CODEC_FORMAT for a key without a root secret, else KEY_FORMAT."""
    return CODEC_FORMAT if key.secret is None else KEY_FORMAT


def pack(key: Key) -> bytes:
    """Returns a key as the payload of its file, not yet sealed."""
    document = json.dumps(dict(key.info.document))
    arrays = {"sigma": np.asarray(key.sigma, np.int32)}
    metadata = {"model_digest": key.model_digest, "about": document, "sigma_sha256": _sigma_digest(key.sigma)}
    if key.secret is None:
        return save(arrays, {**metadata, "identifier": key.identifier})
    return save({"root": np.frombuffer(key.secret, np.uint8), **arrays}, metadata)


def unpack(payload: bytes, payload_format: str = KEY_FORMAT) -> Key:
    """Returns the key in a payload of the header's format.

    Raises:
        DamagedKey: the payload has other tensors or metadata than version 1 defines.
    """
    try:
        arrays = load(payload)
        safetensors_header = parse_header(payload[8 : 8 + int.from_bytes(payload[:8], "little")], "the payload")
        metadata = safetensors_header.get(METADATA, {})
        document = json.loads(metadata["about"]) if metadata.keys() == METADATA_NAMES[payload_format] else None
    except (SafetensorError, CorruptCheckpoint, ValueError, RecursionError) as error:
        raise _damage_error("cannot be read") from error
    dtypes = {name: array.dtype for name, array in arrays.items()}
    if dtypes != TENSOR_DTYPES[payload_format] or not isinstance(document, dict):
        raise _damage_error("is not what version 1 defines")
    root, sigma = arrays.get("root"), arrays["sigma"]
    if sigma.ndim != 1 or not np.array_equal(np.sort(sigma), np.arange(len(sigma))):
        raise _damage_error("holds no permutation")
    if root is not None and root.shape != (ROOT_BYTES,):
        raise _damage_error("holds a root of another size than 32 bytes")
    if _sigma_digest(sigma) != metadata["sigma_sha256"]:
        raise DamagedKey("the permutation in the key file fails its checksum", "restore a backup")
    if root is None and not IDENTIFIER_PATTERN.fullmatch(metadata["identifier"]):
        raise _damage_error("holds an identifier that is not of 32 hexadecimal digits")
    secret = None if root is None else root.tobytes()
    return Key(secret, metadata["model_digest"], sigma, KeyInfo(document), metadata.get("identifier"))


def _sigma_digest(sigma: NDArray[np.int32]) -> str:
    """Returns the SHA-256 of a permutation, as little-endian 32-bit integers, in hex."""
    return hashlib.sha256(np.asarray(sigma, "<i4").tobytes()).hexdigest()


def _damage_error(fault: str) -> DamagedKey:
    """Returns the error for a payload that is not valid. `fault` says why, as the end of a sentence."""
    return DamagedKey(f"the content of the key file {fault}", "restore a backup")

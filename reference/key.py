"""The key's derivations and its sealed file from their specifications alone: slow, literal, standard library only.

ChaCha20 and Poly1305: RFC 8439. HKDF: RFC 5869. The file: docs/formats.md. Imports nothing of milkglass. The oracle of
`milkglass.noise.stream` and `milkglass.client.key`. It would open a key file if milkglass were lost.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re
import struct
import unicodedata
from collections.abc import Iterator


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869, one block: 32 bytes."""
    prk = hmac.digest(salt, secret, "sha256")
    return hmac.digest(prk, info + b"\x01", "sha256")


def subkey(root: bytes, model_digest: str, label: str) -> bytes:
    return hkdf_sha256(root, model_digest.encode(), b"milkglass/1 " + label.encode())


def _quarter(s: list[int], a: int, b: int, c: int, d: int) -> None:
    def turn(x: int, n: int) -> int:
        return (x << n | x >> (32 - n)) & 0xFFFFFFFF

    s[a] = (s[a] + s[b]) & 0xFFFFFFFF
    s[d] = turn(s[d] ^ s[a], 16)
    s[c] = (s[c] + s[d]) & 0xFFFFFFFF
    s[b] = turn(s[b] ^ s[c], 12)
    s[a] = (s[a] + s[b]) & 0xFFFFFFFF
    s[d] = turn(s[d] ^ s[a], 8)
    s[c] = (s[c] + s[d]) & 0xFFFFFFFF
    s[b] = turn(s[b] ^ s[c], 7)


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> bytes:
    start = list(struct.unpack("<16I", b"expand 32-byte k" + key + struct.pack("<I", counter) + nonce))
    s = start.copy()
    for _ in range(10):
        for a, b, c, d in ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)):
            _quarter(s, a, b, c, d)
        for a, b, c, d in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
            _quarter(s, a, b, c, d)
    return struct.pack("<16I", *((x + y) & 0xFFFFFFFF for x, y in zip(s, start, strict=True)))


def key_stream(key: bytes) -> Iterator[int]:
    """Bytes. The nonce is zero, the counter starts at 0."""
    counter = 0
    while True:
        yield from chacha20_block(key, counter, b"\0" * 12)
        counter += 1


def words(key: bytes) -> Iterator[int]:
    """Little-endian 32-bit words of the key stream."""
    stream = key_stream(key)
    while True:
        yield int.from_bytes(bytes(next(stream) for _ in range(4)), "little")


def permutation(key: bytes, n: int, pinned: tuple[int, ...] = ()) -> list[int]:
    movable = [i for i in range(n) if i not in pinned]
    shuffled = movable.copy()
    source = words(key)
    for i in range(len(shuffled) - 1, 0, -1):
        limit = 2**32 - 2**32 % (i + 1)
        word = next(w for w in source if w < limit)
        j = word % (i + 1)
        shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
    sigma = list(range(n))
    for place, value in zip(movable, shuffled, strict=True):
        sigma[place] = value
    return sigma


def laplace(key: bytes, count: int) -> list[float]:
    source = words(key)
    out = []
    for _ in range(count):
        word = next(source) | next(source) << 32
        centred = ((word >> 12) + 0.5) / 2**52 - 0.5
        out.append(-math.copysign(1, centred) * math.log1p(-2 * abs(centred)))
    return out


def poly1305(key: bytes, message: bytes) -> bytes:
    r = int.from_bytes(key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    total = 0
    for at in range(0, len(message), 16):
        total = (total + int.from_bytes(message[at : at + 16] + b"\1", "little")) * r % (2**130 - 5)
    return ((total + int.from_bytes(key[16:], "little")) % 2**128).to_bytes(16, "little")


def _chacha20(key: bytes, nonce: bytes, data: bytes) -> bytes:
    out = bytearray()
    for at in range(0, len(data), 64):
        block = chacha20_block(key, 1 + at // 64, nonce)
        out += bytes(a ^ b for a, b in zip(data[at : at + 64], block, strict=False))
    return bytes(out)


def _tag(key: bytes, nonce: bytes, ciphertext: bytes, associated: bytes) -> bytes:
    def padded(data: bytes) -> bytes:
        return data + b"\0" * (-len(data) % 16)

    lengths = struct.pack("<QQ", len(associated), len(ciphertext))
    one_time = chacha20_block(key, 0, nonce)[:32]
    return poly1305(one_time, padded(associated) + padded(ciphertext) + lengths)


def aead_seal(key: bytes, nonce: bytes, content: bytes, associated: bytes) -> bytes:
    ciphertext = _chacha20(key, nonce, content)
    return ciphertext + _tag(key, nonce, ciphertext, associated)


def aead_open(key: bytes, nonce: bytes, sealed: bytes, associated: bytes) -> bytes | None:
    """None: the tag does not fit."""
    ciphertext, tag = sealed[:-16], sealed[-16:]
    if not hmac.compare_digest(_tag(key, nonce, ciphertext, associated), tag):
        return None
    return _chacha20(key, nonce, ciphertext)


HEADER = re.compile(
    rb'{"check":"([A-Za-z0-9+/]{21}[AQgw]==)","cipher":"chacha20-poly1305","format":"milkglass-(key|codec)",'
    rb'"kdf":{"n":([1-9][0-9]*),"name":"scrypt","p":1,"r":8,"salt":"([A-Za-z0-9+/]{21}[AQgw]==)"},'
    rb'"length":([1-9][0-9]*),"nonce":"([A-Za-z0-9+/]{16})","version":1}\n'
)


def _other_kind(line: bytes) -> str | None:
    """What a header that is not version 1's is, where it says so itself and is not ambiguous."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    try:
        header = json.loads(line, object_pairs_hook=once)
    except ValueError:
        return None
    if "format" not in header:
        return None
    if header["format"] not in ("milkglass-key", "milkglass-codec"):
        return "not a key file"
    version = header.get("version")
    return "unknown version" if type(version) is int and version != 1 else None


def open_key_file(data: bytes, passphrase: str) -> dict[str, object] | str:
    """The payload, or what is reported of the file."""
    if not data:
        return "truncated"
    if data[:1] != b"{":
        return "not a key file"
    end = data[:4096].find(b"\n") + 1
    if end == 0:
        return "truncated"
    right_checksum = hashlib.sha256(data[:-32]).digest() == data[-32:]
    if right_checksum and (other := _other_kind(data[:end])):
        return other
    header = HEADER.fullmatch(data[:end])
    if header is None:
        return "damaged"
    n, length = int(header[3]), int(header[5])
    if n not in [2**power for power in range(1, 21)] or length < 16:
        return "damaged"
    if len(data) < end + length + 32:
        return "truncated"
    if len(data) > end + length + 32 or not right_checksum:
        return "damaged"
    secret = unicodedata.normalize("NFC", passphrase).encode()
    both = hashlib.scrypt(secret, salt=base64.b64decode(header[4]), n=n, r=8, p=1, dklen=64, maxmem=2**31 - 1)
    if hashlib.sha256(b"milkglass/1 passphrase check" + both[32:]).digest()[:16] != base64.b64decode(header[1]):
        return "wrong passphrase"
    payload = aead_open(both[:32], base64.b64decode(header[6]), data[end:-32], data[:end])
    return "tampered" if payload is None else _read_payload(payload, codec=header[2] == b"codec")


def _read_payload(payload: bytes, codec: bool) -> dict[str, object] | str:
    length = int.from_bytes(payload[:8], "little")
    table, body = json.loads(payload[8 : 8 + length]), payload[8 + length :]
    meta = table.pop("__metadata__", {})
    dtypes = {"sigma": "I32"} if codec else {"root": "U8", "sigma": "I32"}
    names = {"model_digest", "about", "sigma_sha256"} | ({"identifier"} if codec else set())
    if set(meta) != names or {name: one["dtype"] for name, one in table.items()} != dtypes:
        return "damaged"
    first, last = (0, 0) if codec else table["root"]["data_offsets"]
    root = body[first:last]
    first, last = table["sigma"]["data_offsets"]
    packed = body[first:last]
    sigma = list(struct.unpack(f"<{len(packed) // 4}i", packed))
    about = json.loads(meta["about"])
    if len(root) != (0 if codec else 32) or sorted(sigma) != list(range(len(sigma))) or not isinstance(about, dict):
        return "damaged"
    if hashlib.sha256(packed).hexdigest() != meta["sigma_sha256"]:
        return "damaged"
    whole = {"sigma": sigma, "model_digest": meta["model_digest"], "about": about}
    if not codec:
        return {"root": root.hex(), **whole}
    if re.fullmatch("[0-9a-f]{32}", meta["identifier"]) is None:
        return "damaged"
    return {"identifier": meta["identifier"], **whole}

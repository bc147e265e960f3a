"""The key's derivations and its sealed file from their specifications alone: slow, literal, standard library only.

ChaCha20 and Poly1305: RFC 8439. HKDF: RFC 5869. The file: docs/formats.md. Imports nothing of milkglass. The oracle of
`milkglass.client`'s `streams` and `keyfile`, and what would open a key file if milkglass were lost.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import struct
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


def aead_open(key: bytes, nonce: bytes, sealed: bytes, associated: bytes) -> bytes | None:
    """None: the tag does not fit."""
    ciphertext, tag = sealed[:-16], sealed[-16:]

    def padded(data: bytes) -> bytes:
        return data + b"\0" * (-len(data) % 16)

    lengths = struct.pack("<QQ", len(associated), len(ciphertext))
    one_time = chacha20_block(key, 0, nonce)[:32]
    if not hmac.compare_digest(poly1305(one_time, padded(associated) + padded(ciphertext) + lengths), tag):
        return None
    out = bytearray()
    for at in range(0, len(ciphertext), 64):
        block = chacha20_block(key, 1 + at // 64, nonce)
        out += bytes(a ^ b for a, b in zip(ciphertext[at : at + 64], block, strict=False))
    return bytes(out)


def open_key_file(data: bytes, passphrase: str) -> dict[str, object] | str:
    """The payload, or the name of what is wrong with the file."""
    end = data.find(b"\n") + 1
    header = json.loads(data[:end])
    if len(data) < end + header["length"] + 32:
        return "truncated"
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        return "damaged"
    kdf = header["kdf"]
    both = hashlib.scrypt(
        passphrase.encode(),
        salt=base64.b64decode(kdf["salt"]),
        n=kdf["n"],
        r=kdf["r"],
        p=kdf["p"],
        dklen=64,
        maxmem=2**30,
    )
    check = hashlib.sha256(b"milkglass/1 passphrase check" + both[32:]).digest()[:16]
    if check != base64.b64decode(header["check"]):
        return "wrong passphrase"
    payload = aead_open(both[:32], base64.b64decode(header["nonce"]), data[end:-32], data[:end])
    if payload is None:
        return "tampered"
    length = int.from_bytes(payload[:8], "little")
    table, body = json.loads(payload[8 : 8 + length]), payload[8 + length :]
    first, last = table["root"]["data_offsets"]
    root = body[first:last].hex()
    first, last = table["sigma"]["data_offsets"]
    sigma = list(struct.unpack(f"<{(last - first) // 4}i", body[first:last]))
    meta = table["__metadata__"]
    return {"root": root, "sigma": sigma, "model_digest": meta["model_digest"], "about": json.loads(meta["about"])}

"""The scenarios of vectors/key-file-*.json: a sealed key file, and everything that can be wrong with one.

Each file is built here from docs/formats.md alone, by literal programs, with a fixed salt and nonce, so that writing
the vectors again gives the same bytes. Each scenario states what must be reported; the literal reader must agree.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Callable

import key as literal

PASSPHRASE = "correct horse battery staple"
SALT, NONCE, N = bytes(range(100, 116)), bytes(range(200, 212)), 1024


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def derive(passphrase: str, n: int) -> tuple[bytes, bytes]:
    both = hashlib.scrypt(passphrase.encode(), salt=SALT, n=n, r=8, p=1, dklen=64, maxmem=2**31 - 1)
    return both[:32], hashlib.sha256(b"milkglass/1 passphrase check" + both[32:]).digest()[:16]


def with_checksum(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def payload(
    root: bytes | None, sigma: list[int], notes: dict[str, str], more: dict[str, object] | None = None
) -> bytes:
    """root: None in a codec alone."""
    packed = struct.pack(f"<{len(sigma)}i", *sigma)
    table: dict[str, object] = {
        "__metadata__": notes,
        "sigma": {"dtype": "I32", "shape": [len(sigma)], "data_offsets": [0, len(packed)]},
    }
    if root is not None:
        ends = [len(packed), len(packed) + len(root)]
        table["root"] = {"dtype": "U8", "shape": [len(root)], "data_offsets": ends}
    table |= more or {}
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + packed + (root or b"")


def notes(digest: str, sigma: list[int], **other: str) -> dict[str, str]:
    digest_of_sigma = hashlib.sha256(struct.pack(f"<{len(sigma)}i", *sigma)).hexdigest()
    about = json.dumps({"model": "somewhere/model"})
    return {"model_digest": digest, "about": about, "sigma_sha256": digest_of_sigma, **other}


def header(length: int, check: bytes, n: int = N) -> dict[str, object]:
    return {
        "format": "milkglass-key",
        "version": 1,
        "kdf": {"name": "scrypt", "n": n, "r": 8, "p": 1, "salt": b64(SALT)},
        "cipher": "chacha20-poly1305",
        "nonce": b64(NONCE),
        "check": b64(check),
        "length": length,
    }


def line_of(table: dict[str, object]) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def sealed(
    content: bytes, respell: Callable[[bytes], bytes] = lambda line: line, n: int = N, passphrase: str = PASSPHRASE
) -> bytes:
    """A whole file, its seal and checksum right for the header line as `respell` leaves it."""
    sealing, check = derive(passphrase, n)
    line = respell(line_of(header(len(content) + 16, check, n)))
    return with_checksum(line + literal.aead_seal(sealing, NONCE, content, line))


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def respell(line: bytes) -> bytes:
        assert line.count(old) == 1, (old, line)
        return line.replace(old, new)

    return respell


def headers(content: bytes) -> dict[str, tuple[str, bytes, str]]:
    """Whole files, seal and checksum right, whose header is not version 1's."""
    salt = b64(SALT).encode()
    loose = salt[:-3] + bytes([salt[-3] + 1]) + b"=="  # the unused bits are not zero, the bytes are the same
    kdf = b'"n":1024,'
    cases = {
        "base64-not-canonical": ("the salt's base64 has unused bits that are not zero", replaced(salt, loose)),
        "base64-no-padding": ("the salt's base64 has no padding", replaced(salt, salt[:-2])),
        "base64-line-break": (
            "the salt's base64 holds an escaped line feed",
            replaced(salt, salt[:8] + b"\\n" + salt[8:]),
        ),
        "base64-urlsafe": ("the nonce is in the URL-safe alphabet", replaced(b64(NONCE).encode(), b"_" * 16)),
        "salt-short": ("the salt has 15 bytes", replaced(salt, b64(SALT[:15]).encode())),
        "nonce-long": ("the nonce has 15 bytes", replaced(b64(NONCE).encode(), b64(bytes(15)).encode())),
        "key-twice": ("n stands twice in kdf, with the same value", replaced(kdf, kdf + kdf)),
        "key-twice-version": ("version stands twice", replaced(b'"version":1', b'"version":2,"version":1')),
        "keys-unsorted": ("two keys are not in their order", replaced(b'"p":1,"r":8', b'"r":8,"p":1')),
        "spaces": ("a space follows a colon", replaced(b'"version":1', b'"version": 1')),
        "escaped-letter": ("a letter is spelt as an escape", replaced(b'"scrypt"', b'"scr\\u0079pt"')),
        "n-not-power-of-two": ("n is 1,000", replaced(kdf, b'"n":1000,')),
        "n-too-large": ("n is 2^21, above the limit of 2^20", replaced(kdf, b'"n":2097152,')),
        "n-huge": ("n is 2^62", replaced(kdf, b'"n":4611686018427387904,')),
        "n-one": ("n is 1, below the limit of 2", replaced(kdf, b'"n":1,')),
        "n-zero": ("n is 0", replaced(kdf, b'"n":0,')),
        "n-negative": ("n is -1,024", replaced(kdf, b'"n":-1024,')),
        "n-float": ("n is 1024.0", replaced(kdf, b'"n":1024.0,')),
        "n-string": ("n is a string", replaced(kdf, b'"n":"1024",')),
        "r": ("r is 16", replaced(b'"r":8', b'"r":16')),
        "p": ("p is 2", replaced(b'"p":1', b'"p":2')),
        "p-true": ("p is true, which equals 1 in some languages", replaced(b'"p":1', b'"p":true')),
        "kdf-name": ("the key derivation is called argon2id", replaced(b'"scrypt"', b'"argon2id"')),
        "cipher": ("the cipher is called aes-256-gcm", replaced(b"chacha20-poly1305", b"aes-256-gcm")),
        "version-true": ("the version is true", replaced(b'"version":1', b'"version":true')),
        "field-missing": ("the header has no cipher", replaced(b'"cipher":"chacha20-poly1305",', b"")),
        "field-added": ("the header has one field more", replaced(b'"format"', b'"comment":"x","format"')),
        "kdf-field-missing": ("kdf has no p", replaced(b'"p":1,', b"")),
        "kdf-field-added": ("kdf has one field more", replaced(b'"r":8', b'"q":1,"r":8')),
        "length-negative": ("the length is negative", lambda line: line.replace(b'"length":', b'"length":-')),
    }
    damaged = {name: (about, sealed(content, respell), "damaged") for name, (about, respell) in cases.items()}
    version2 = sealed(content, replaced(b'"version":1', b'"version":2'))
    label = sealed(content, replaced(b'"milkglass-key"', b'"milkglass-token"'))
    return damaged | {
        "version-2": ("version 2, otherwise as version 1", version2, "unknown version"),
        "format-label": ("the format is called milkglass-token", label, "not a key file"),
    }


def payloads(root: bytes, digest: str, sigma: list[int]) -> dict[str, tuple[str, bytes, str]]:
    """Whole files that open, and hold what version 1 does not define."""
    good = notes(digest, sigma)
    twice = [sigma[0], *sigma[:-1]]
    extra: dict[str, object] = {"more": {"dtype": "U8", "shape": [0], "data_offsets": [80, 80]}}
    fewer = {name: text for name, text in good.items() if name != "about"}
    cases = {
        "payload-tensor-added": ("the payload has one tensor more", payload(root, sigma, good, extra)),
        "payload-note-missing": ("the payload has no about", payload(root, sigma, fewer)),
        "payload-note-added": ("the payload has one note more", payload(root, sigma, notes(digest, sigma, more="x"))),
        "payload-about-list": ("about is a list", payload(root, sigma, notes(digest, sigma, about="[]"))),
        "payload-root-short": ("the root has 31 bytes", payload(root[:31], sigma, good)),
        "payload-not-a-permutation": ("an id occurs twice", payload(root, twice, notes(digest, twice))),
        "payload-sigma-sum": ("the permutation's checksum is another's", payload(root, sigma, notes(digest, twice))),
    }
    return {name: (about, sealed(content), "damaged") for name, (about, content) in cases.items()}


def files(content: bytes) -> dict[str, tuple[str, bytes, str]]:
    """A file whose header is in order, and what can happen to it as a whole."""
    good = sealed(content)
    body, middle = good[:-32], len(good) // 2
    flipped = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
    other_salt = body.replace(b64(SALT).encode(), b64(SALT[::-1]).encode())
    other_n = body.replace(b'"n":1024,', b'"n":2048,')
    other_nonce = body.replace(b64(NONCE).encode(), b64(NONCE[::-1]).encode())
    return {
        "flipped-bit": ("one bit of the seal is flipped", flipped + good[-32:], "damaged"),
        "tampered": ("one bit of the seal is flipped and the checksum made anew", with_checksum(flipped), "tampered"),
        "nonce-altered": ("the nonce is altered and the checksum made anew", with_checksum(other_nonce), "tampered"),
        "truncated": ("the last 40 bytes are missing", good[:-40], "truncated"),
        "truncated-checksum": ("the last byte is missing", good[:-1], "truncated"),
        "truncated-header": ("the file ends inside its header", good[:100], "truncated"),
        "empty": ("the file is empty", b"", "truncated"),
        "another-file": ("the file is a PEM block", b"-----BEGIN PRIVATE KEY-----\n", "not a key file"),
        "trailing-byte": ("a byte follows the checksum", good + b"\0", "damaged"),
        "trailing-bytes-checked": (
            "four bytes follow the seal, and the checksum is over them too",
            with_checksum(body + b"more"),
            "damaged",
        ),
        "salt-altered": (
            "the salt is altered and the checksum made anew: not to be told from a wrong passphrase",
            with_checksum(other_salt),
            "wrong passphrase",
        ),
        "n-altered": (
            "n is doubled and the checksum made anew: not to be told from a wrong passphrase",
            with_checksum(other_n),
            "wrong passphrase",
        ),
    }


def codecs(root: bytes, digest: str, sigma: list[int]) -> dict[str, tuple[str, bytes, object]]:
    """Files of a codec alone: the header's format is another, and the payload has an identifier and no root."""
    identifier = literal.subkey(root, digest, "identifier")[:16].hex()
    named = replaced(b'"milkglass-key"', b'"milkglass-codec"')
    good = notes(digest, sigma, identifier=identifier)
    right = {"identifier": identifier, "sigma": sigma, "model_digest": digest, "about": {"model": "somewhere/model"}}
    whole, alone = payload(root, sigma, notes(digest, sigma)), payload(None, sigma, good)
    passed_off = sealed(alone, named)[:-32].replace(b'"milkglass-codec"', b'"milkglass-key"')
    return {
        "codec-opens": ("opens: a codec alone", sealed(alone, named), right),
        "codec-with-root": ("a codec alone holds a root", sealed(payload(root, sigma, good), named), "damaged"),
        "codec-of-a-key": ("a whole key is called a codec alone", sealed(whole, named), "damaged"),
        "codec-as-key": ("a codec alone is called a whole key", sealed(alone), "damaged"),
        "codec-relabelled": (
            "a codec alone is called a whole key after it was sealed, and the checksum made anew",
            with_checksum(passed_off),
            "tampered",
        ),
        "codec-identifier": (
            "a codec's identifier is in capitals",
            sealed(payload(None, sigma, {**good, "identifier": identifier.upper()}), named),
            "damaged",
        ),
    }


def write_all(write: Callable[..., None], root: bytes, digest: str) -> None:
    """vectors/key-file-*.json. Fails where the literal reader reports something else than is stated here."""
    sigma = literal.permutation(literal.subkey(root, digest, "permutation"), 12)
    content = payload(root, sigma, notes(digest, sigma))
    opened = {"root": root.hex(), "sigma": sigma, "model_digest": digest, "about": {"model": "somewhere/model"}}
    cases: list[tuple[str, str, bytes, str, object]] = [
        ("opens", "opens", sealed(content), PASSPHRASE, opened),
        ("n-least", "opens: n is 2, the least", sealed(content, n=2), PASSPHRASE, opened),
        (
            "passphrase-decomposed",
            "opens: sealed with a letter in one code point, given as two",
            sealed(content, passphrase="caf\u00e9 au lait"),
            "cafe\u0301 au lait",
            opened,
        ),
        ("wrong-passphrase", "the passphrase is another one", sealed(content), PASSPHRASE + "r", "wrong passphrase"),
    ]
    broken = headers(content) | payloads(root, digest, sigma) | files(content)
    cases += [(name, about, data, PASSPHRASE, expected) for name, (about, data, expected) in broken.items()]
    cases += [
        (name, about, data, PASSPHRASE, found) for name, (about, data, found) in codecs(root, digest, sigma).items()
    ]
    for name, about, data, said, expected in cases:
        found = literal.open_key_file(data, said)
        assert found == expected, (name, found, expected)
        write(f"key-file-{name}", about, file=b64(data), passphrase=said, expected=expected)

"""Key files with anything changed: one of our errors, or the very key that was sealed."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from milkglass.client.key import file_format as keyheader
from milkglass.client.key.file import seal, unseal
from milkglass.client.key.key import Key, KeyInfo
from milkglass.errors import KeyFileError
from tests.mutations import mutated

KEY = Key.new("sha256:" + "ab" * 32, 64, (0, 3), KeyInfo({"model": "m", "kind": "encoder", "labels": {"a": 0}}))
FILE = seal(KEY, "pw", scrypt_n=4)
BODY = FILE[:-32]
LINE, SEAL = BODY[: BODY.index(b"\n") + 1], BODY[BODY.index(b"\n") + 1 :]
VALUES: list[Any] = [None, True, -1, 0, 1, 1.5, 1e400, float("nan"), "", "x", "scrypt", [], {}, [1], {"a": 1}, 2**31,
    2**64, 10**300, "A" * 100, "\ud800", "=", "AAAA", "4", " 4", "4.0", 131072, 4, 8, 16, 4.0, 1.0]  # fmt: skip


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed cost is refused above 4,096, not computed."""
    monkeypatch.setattr(keyheader, "MAX_SCRYPT_N", 1 << 12)


def checked(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def opened(data: bytes) -> str:
    """The error's name. Fails for any other exception, and for whatever opens and is not the file that was sealed."""
    try:
        unseal(data, "pw")
    except KeyFileError as error:
        return type(error).__name__
    assert data == FILE
    return "opened"


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flips(step: int) -> Counter[str]:
    """Every `step`th bit, with the old checksum and with a new one; every `step`th length likewise."""
    found = Counter(opened(flipped(FILE, bit)) for bit in range(0, 8 * len(FILE), step))
    found.update(opened(checked(flipped(BODY, bit))) for bit in range(0, 8 * len(BODY), step))
    found.update(opened(FILE[:length]) for length in range(0, len(FILE), step))
    found.update(opened(checked(BODY[:length])) for length in range(0, len(BODY), step))
    return found


def other_header(draw: random.Random) -> bytes:
    header = json.loads(LINE)
    for _ in range(draw.randint(1, 3)):
        kdf = header.get("kdf")
        table = draw.choice([header, kdf if isinstance(kdf, dict) else header])
        name, kind = draw.choice([*table] or ["x"]), draw.random()
        if kind < 0.6:
            table[name] = copy.deepcopy(draw.choice(VALUES))
        elif kind < 0.8:
            table.pop(name, None)
        else:
            table[f"extra{draw.randint(0, 3)}"] = copy.deepcopy(draw.choice(VALUES))
    tight = (",", ":") if draw.random() < 0.7 else None
    return json.dumps(header, sort_keys=draw.random() < 0.7, separators=tight).encode() + b"\n"


def other_bytes(draw: random.Random) -> bytes:
    return mutated(BODY, draw, 8, [b"\xff" * 4, b"\n\n\n\n", b"{}[]", b"9999", b'"":,'])


MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "header": lambda draw: checked(other_header(draw) + SEAL),
    "header, old checksum": lambda draw: other_header(draw) + SEAL + FILE[-32:],
    "bytes": lambda draw: checked(other_bytes(draw)),
    "random": lambda draw: draw.randbytes(draw.randint(0, 200)),
    "random after a brace": lambda draw: b"{" + draw.randbytes(draw.randint(0, 200)),
}


def test_flipped_bits_and_lengths() -> None:
    assert opened(FILE) == "opened"
    found = flips(13)
    assert found["opened"] == 0
    assert {"DamagedKey", "TruncatedKey", "TamperedKey", "WrongPassphrase", "KeyFileError"} <= {*found}


@pytest.mark.parametrize("maker", MAKERS)
def test_mutated_files(maker: str) -> None:
    draw = random.Random(20261122)
    found = Counter(opened(MAKERS[maker](draw)) for _ in range(1500))
    assert found["opened"] <= 60  # a header mutated into itself
    assert sum(found.values()) == 1500


@pytest.mark.slow
def test_every_flipped_bit_and_every_length() -> None:
    found = flips(1)
    assert found["opened"] == 0 and sum(found.values()) > 16_000


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS)
def test_many_mutated_files(maker: str) -> None:
    draw = random.Random(7)
    assert sum(Counter(opened(MAKERS[maker](draw)) for _ in range(60_000)).values()) == 60_000

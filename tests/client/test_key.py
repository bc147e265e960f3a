"""The key against its known answers, and every way in which a key file can be wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.client.key.file import MAX_FILE_BYTES, KeySeal, read_key, require_key_file, seal, unseal, write_key
from milkglass.client.key.key import Key, KeyInfo, permutation
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
from milkglass.noise.stream import Stream, subkey
from milkglass.schemes.clustering import embed_cluster, weight_synth
from milkglass.schemes.mixture import Mixture

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import key as literal  # noqa: E402

STRONG = "correct horse battery"
VECTORS = Path(__file__).parents[2] / "vectors"
ERRORS = {
    "not a key file": KeyFileError,
    "unknown version": UnknownKeyVersion,
    "truncated": TruncatedKey,
    "damaged": DamagedKey,
    "wrong passphrase": WrongPassphrase,
    "tampered": TamperedKey,
}


def vector(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / f"{name}.json").read_text("utf-8"))


def a_key(n: int = 50) -> Key:
    return Key.new("sha256:base", n, (), KeyInfo({"model": "secret place"}))


def test_derivations_have_known_answers() -> None:
    known = vector("key-derivation")
    root, digest = bytes.fromhex(known["root"]), known["model_digest"]
    for label, expected in known["subkeys"].items():
        assert subkey(root, digest, label).hex() == expected
    assert Key(root, digest, np.arange(3, dtype=np.int32), KeyInfo({})).identifier == known["identifier"]
    key = bytes.fromhex(known["subkeys"]["permutation"])
    assert Stream(key).words(20).tolist() == known["words"]
    assert permutation(key, 12).tolist() == known["permutation_12"]
    assert permutation(key, 12, (1, 7)).tolist() == known["permutation_12_pinned_1_7"]
    noise = Stream(bytes.fromhex(known["subkeys"]["noise/embedding"])).laplace(10)
    np.testing.assert_allclose(noise, known["laplace"], rtol=1e-14)


def test_the_scheme_has_known_answers() -> None:
    import torch

    known = vector("obfuslm")
    table = torch.tensor(known["table"], dtype=torch.float64)
    order = np.array(known["order"])
    clusters = embed_cluster(table, order, 4, 0.8)
    assert [c.tolist() for c in clusters] == known["clusters"]
    weights = weight_synth(table, clusters, 1.0, lambda n: np.array(known["noise"][:n]))
    mixed = Mixture.of(30, clusters, weights).apply(table, order)
    np.testing.assert_allclose(mixed.numpy(), known["mixed"], atol=1e-6)


@pytest.mark.parametrize("name", sorted(p.stem for p in VECTORS.glob("key-file-*.json")))
def test_key_files_have_known_answers(name: str) -> None:
    known = vector(name)
    data, expected = base64.b64decode(known["file"]), known["expected"]
    if isinstance(expected, str):
        with pytest.raises(KeyFileError) as refused:
            unseal(data, known["passphrase"])
        assert type(refused.value) is ERRORS[expected]
        return
    key = unseal(data, known["passphrase"])
    assert (None if key.secret is None else key.secret.hex()) == expected.get("root")
    assert key.identifier == expected.get("identifier", key.identifier)
    assert key.sigma.tolist() == expected["sigma"]
    assert (key.model_digest, dict(key.info.document)) == (expected["model_digest"], expected["about"])


def test_what_is_sealed_here_opens_by_the_specification() -> None:
    made = a_key()
    told = literal.open_key_file(seal(made, "caf\u00e9 noir", scrypt_n=2), "cafe\u0301 noir")
    assert told == {
        "root": made.root.hex(),
        "sigma": made.sigma.tolist(),
        "model_digest": made.model_digest,
        "about": dict(made.info.document),
    }


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "k"
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(MAX_FILE_BYTES + 1)
    for read in (lambda: read_key(path, "pass"), lambda: require_key_file(path)):
        with pytest.raises(KeyFileError, match="268,435,457 bytes, at most 268,435,456 are read"):
            read()


def test_a_key_file_is_known_without_its_passphrase(tmp_path: Path) -> None:
    path = tmp_path / "k"
    for name in ("opens", "wrong-passphrase", "tampered", "payload-about-list"):
        path.write_bytes(base64.b64decode(vector(f"key-file-{name}")["file"]))
        require_key_file(path)
    path.write_bytes(base64.b64decode(vector("key-file-version-2")["file"]))
    with pytest.raises(UnknownKeyVersion):
        require_key_file(path)


def test_a_permutation_is_one_and_keeps_what_is_pinned() -> None:
    sigma = permutation(b"k" * 32, 5000, (0, 17))
    assert sorted(sigma.tolist()) == list(range(5000))
    assert (sigma[0], sigma[17]) == (0, 17)
    assert (sigma == np.arange(5000)).sum() < 12


def test_permutations_are_uniform() -> None:
    """All 24 orders of 4 things, 4,800 keys: chi-square with 23 degrees of freedom stays below its 99.9 % point."""
    counts: dict[tuple[int, ...], int] = {}
    for i in range(4800):
        found = tuple(permutation(i.to_bytes(32, "little"), 4).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 24
    assert sum((c - 200) ** 2 / 200 for c in counts.values()) < 49.7


def test_uniform_numbers_never_reach_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest word once rounded to 1, whose Laplace draw is infinite."""

    class Constant:
        def __init__(self, byte: bytes) -> None:
            self.byte = byte

        def update(self, data: bytes) -> bytes:
            return self.byte * len(data)

    stream = Stream(b"k" * 32)
    for byte in (b"\xff", b"\0"):
        monkeypatch.setattr(stream, "_cipher", Constant(byte))
        assert 0 < stream.uniform(1)[0] < 1
        assert np.isfinite(stream.laplace(1)[0])


@pytest.mark.parametrize("header", [b"{" * 3500, b'{"kdf":{"n":Infinity}}', b'{"a":' + b"[" * 3000 + b"\n"])
def test_hostile_headers_are_damage_and_no_crash(header: bytes) -> None:
    body = header + b"\n" + bytes(64)
    with pytest.raises(KeyFileError):
        unseal(body + hashlib.sha256(body).digest(), "pass")


def test_a_passphrase_is_the_same_however_it_was_typed() -> None:
    assert unseal(seal(a_key(3), "caf\u00e9", scrypt_n=2), "cafe\u0301").sigma.size == 3


def test_laplace_noise_has_its_moments() -> None:
    draws = Stream(b"n" * 32).laplace(400_000)
    assert abs(draws.mean()) < 0.01
    assert abs(np.abs(draws).mean() - 1) < 0.01
    assert abs(draws.var() - 2) < 0.05


def test_round_trip_on_disk(tmp_path: Path) -> None:
    key, path = a_key(), tmp_path / "deep" / "my.mgkey"
    write_key(path, key, STRONG, scrypt_n=2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["my.mgkey"]
    again = read_key(path, STRONG)
    assert (again.root, again.model_digest, dict(again.info.document)) == (
        key.root,
        key.model_digest,
        dict(key.info.document),
    )
    assert np.array_equal(again.sigma, key.sigma)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "k"
    write_key(path, a_key(), STRONG, scrypt_n=2)
    before = path.read_bytes()
    with pytest.raises(KeyExists):
        write_key(path, a_key(), STRONG, scrypt_n=2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("links", [True, False])
def test_a_key_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Between the look and the writing; also on a file system without hard links."""
    path, late = tmp_path / "k", tmp_path / "other"

    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    sealed = KeySeal.seal

    def sealing(own: KeySeal, key: Key) -> bytes:
        path.write_bytes(b"another's")
        return sealed(own, key)

    if not links:
        monkeypatch.setattr("os.link", no_links)
    key = a_key()
    write_key(late, key, STRONG, scrypt_n=2)
    assert read_key(late, STRONG).root == key.root and stat.S_IMODE(late.stat().st_mode) == 0o600
    monkeypatch.setattr(KeySeal, "seal", sealing)
    with pytest.raises(KeyExists):
        write_key(path, a_key(), STRONG, scrypt_n=2)
    assert path.read_bytes() == b"another's" and {p.name for p in tmp_path.iterdir()} == {"k", "other"}


def test_a_keys_folder_is_on_the_disk_before_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    monkeypatch.setattr("os.fsync", lambda number: synced.append(stat.S_ISDIR(os.fstat(number).st_mode)))
    for replace in (False, True):
        write_key(tmp_path / "k", a_key(), STRONG, scrypt_n=2, replace=replace)
    assert synced == [False, True] * 2


def test_every_flipped_bit_is_noticed_and_nothing_opens() -> None:
    data = seal(a_key(3), "pass", scrypt_n=2)
    for at in range(0, len(data), 7):
        broken = bytearray(data)
        broken[at] ^= 1 << (at % 8)
        # A changed length in the header is a file that seems cut off; the first byte makes it another kind of file.
        with pytest.raises((DamagedKey, TruncatedKey) if at else KeyFileError):
            unseal(bytes(broken), "pass")


@pytest.mark.parametrize("length", [0, 1, 30, 200, 400])
def test_a_truncated_file_is_called_so(length: int) -> None:
    data = seal(a_key(), "pass", scrypt_n=2)
    with pytest.raises(TruncatedKey):
        unseal(data[:length], "pass")


def test_a_header_cannot_ask_for_gigabytes() -> None:
    data = seal(a_key(), "pass", scrypt_n=2).replace(b'"n":2', b'"n":1073741824')
    with pytest.raises(DamagedKey, match="impossible"):
        unseal(data, "pass")


def test_other_files_and_other_versions_are_refused() -> None:
    with pytest.raises(KeyFileError, match="not a milkglass key file"):
        unseal(b"-----BEGIN PRIVATE KEY-----\n", "pass")
    for other in (
        b'{"text": "the wound is open", "label": "a"}\n' * 200,
        b'{"a":1}',
        b'{"text": "' + b"x" * 5000,
        b"{}",
    ):
        with pytest.raises(KeyFileError, match="this is not a milkglass key file") as caught:
            unseal(other, "pass")
        assert "backup" not in caught.value.hint
    body = seal(a_key(), "pass", scrypt_n=2)[:-32].replace(b'"version":1', b'"version":9')
    with pytest.raises(UnknownKeyVersion):
        unseal(body + hashlib.sha256(body).digest(), "pass")
    with pytest.raises(DamagedKey):  # the same byte, changed by accident
        unseal(body + bytes(32), "pass")


def test_an_empty_passphrase_is_refused() -> None:
    with pytest.raises(KeyFileError, match="passphrase is empty"):
        seal(a_key(), "")


def test_a_key_of_another_model_is_refused() -> None:
    with pytest.raises(KeyForOtherModel):
        a_key().require_model("sha256:other")


def test_nothing_secret_is_shown() -> None:
    key = a_key()
    for text in (repr(key), str(key)):
        assert key.root.hex() not in text
        assert "secret place" not in text
    data = seal(key, "open sesame", scrypt_n=2)
    assert b"secret place" not in data
    assert key.root not in data

"""`milkglass key for-codec`: a worker's part of a key encodes, decodes and asks a server, and makes nothing else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import milkglass
from milkglass.client.codec.aliases import repeated_stream
from milkglass.client.codec.codec import Codec
from milkglass.client.key import usage
from milkglass.client.key.file import UnlockedKey, read_key, seal, unseal, write_key
from milkglass.client.key.generate import for_job, new_key
from milkglass.errors import CodecAlone, TamperedKey
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.stream import Stream
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny
from tests.cli.kit import PASSPHRASE, SMALL, Owner, call, document, has_model_of, refused
from tests.client.stub import TOKEN, Handler, Stub

WORKER = "seven quite different passphrase words"
TEXT = tiny.TEXTS[0]


@pytest.fixture
def owner(encoder: Owner) -> Owner:
    encoder.reset()
    return encoder


@pytest.fixture
def codec(owner: Owner, tmp_path: Path) -> Path:
    (tmp_path / "pw").write_text(WORKER)
    (tmp_path / "pw").chmod(0o600)
    out = tmp_path / "worker.mgkey"
    shown = document(
        call("key", "for-codec", owner.path, "--out", out, "--new-passphrase-file", tmp_path / "pw", "--json")
    )
    assert shown == {"codec": str(out), "key": str(owner.path), "key_id": owner.key.identifier}
    return out


def test_it_encodes_and_decodes_as_the_key_does(owner: Owner, codec: Path) -> None:
    by_key = call("encode", TEXT, "--key", owner.path)
    by_codec = call("encode", TEXT, "--key", codec, passphrase=WORKER)
    assert by_codec.exit_code == 0 and by_codec.stdout == by_key.stdout
    back = call("decode", "--key", codec, stdin=by_codec.stdout, passphrase=WORKER)
    assert back.stdout.strip() == TEXT
    assert usage.read(codec).texts == 1, "it counts for itself"
    assert codec.stat().st_mode & 0o077 == 0


def test_it_holds_no_root_and_nothing_that_only_the_owner_needs(owner: Owner, codec: Path) -> None:
    held = read_key(codec, WORKER)
    assert held.secret is None and held.identifier == owner.key.identifier and "order" not in held.info.document
    with pytest.raises(CodecAlone, match="without the secret"):
        held.stream("noise/embedding")
    assert document(call("key", "show", codec, "--json", passphrase=WORKER))["holds"] == "the codec alone"
    assert document(call("key", "show", owner.path, "--json"))["holds"] == "the whole key"
    refused(call("key", "show", codec), 4, "the passphrase is wrong")


def test_what_needs_the_secret_refuses(owner: Owner, codec: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    labelled = [{"text": text, "label": f"{number % 2}"} for number, text in enumerate(tiny.TEXTS)]
    rows.write_text("".join(json.dumps(one) + "\n" for one in labelled))
    out = tmp_path / "out"
    for words in (
        ("obfuscate", owner.model, out, "--key", codec, *SMALL), ("verify", owner.scrambled, "--key", codec),
        ("audit", "--key", codec, "--text", rows, "--out", out), ("key", "for-job", codec, "march", "--out", out),
        ("key", "for-codec", codec, "--out", out, "--new-passphrase-file", tmp_path / "pw"),
        ("encode", "--key", codec, "--in", rows, "--out", tmp_path / "rows.parquet"),  # the order of labels is secret
    ):  # fmt: skip
        refused(call(*words, passphrase=WORKER), 4, "holds a key's codec, without the secret that this needs")
        assert not out.exists() and not (tmp_path / "rows.parquet").exists()
    base, held = Checkpoint.open(owner.model), read_key(codec, WORKER)
    for work in (
        lambda: milkglass.scramble(base, held, out), lambda: milkglass.verify(base, held, owner.scrambled),
        lambda: for_job(base, held, "march"), lambda: milkglass.audit_key(codec, WORKER, rows, out), held.codec_alone,
    ):  # fmt: skip
        with pytest.raises(CodecAlone):
            work()


def test_it_asks_a_server_and_keeps_label_names(owner: Owner, codec: Path, stub: Stub) -> None:
    named = UnlockedKey.open(codec, WORKER).remember({"care": 0, "time": 1}, "ftjob-7")
    assert read_key(codec, WORKER).secret is None and named.key.info.labels_by_job["ftjob-7"]["time"] == 1

    def reply(handler: Handler) -> None:
        handler.answer(200, {"data": [{"index": 0, "label": "LABEL_1", "probs": [0.25, 0.75]}]})

    has_model_of(stub, owner, job="ftjob-7")
    stub.replies["POST /classify"] = reply
    with milkglass.Session.open(codec, WORKER, stub.url, TOKEN) as session:
        (found,) = session.classify("ft-7", [TEXT])
    assert (found.label, found.probability) == ("time", 0.75)
    ids = json.loads(next(body for name, _, body in stub.calls if name == "POST /classify"))["input"][0]
    assert ids == owner.codec.encode([TEXT]).ids[0].tolist()


def test_its_passphrase_is_its_own(owner: Owner, tmp_path: Path) -> None:
    out = tmp_path / "w.mgkey"
    refused(call("key", "for-codec", owner.path, "--out", out), 2, "MILKGLASS_PASSPHRASE holds the old passphrase")
    (tmp_path / "same").write_text(PASSPHRASE)
    (tmp_path / "same").chmod(0o600)
    refused(
        call("key", "for-codec", owner.path, "--out", out, "--new-passphrase-file", tmp_path / "same"),
        2, "the new passphrase is the old one",
    )  # fmt: skip
    assert not out.exists()
    refused(call("key", "for-codec", owner.path, "--out", owner.path), 4, "exists already")


def test_audits_of_the_key_warn_the_worker(owner: Owner, tmp_path: Path) -> None:
    usage.record_audit(owner.path, {"similar text": {"10 %": 5}}, 100)
    (tmp_path / "pw").write_text(WORKER)
    (tmp_path / "pw").chmod(0o600)
    out = tmp_path / "w.mgkey"
    call("key", "for-codec", owner.path, "--out", out, "--new-passphrase-file", tmp_path / "pw")
    found = call("encode", TEXT, "--key", out, passphrase=WORKER)
    assert "more than 5 tokens are encoded under this key" in found.stderr
    usage.counts_file(owner.path).unlink()


@pytest.mark.parametrize("scheme", [ObfusLM(4, beta=0.9, aliases=2), ObfusLM(4, beta=0.9, rows="shared")])
def test_several_ids_and_clusters_go_along(scheme: ObfusLM, tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "model"))
    key = new_key(base, str(base.folder), scheme, base.digest())
    held = unseal(seal(key.codec_alone(), "pw", scrypt_n=2), "pw")
    draws = [
        Codec.open(one, base.folder, repeated_stream(Stream(b"d" * 32))).encode([TEXT]).ids[0] for one in (key, held)
    ]
    assert np.array_equal(*draws) and (held.groups is None) == (key.groups is None)


def test_a_codec_is_not_passed_off_as_a_key(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "model"))
    key = new_key(base, str(base.folder), ObfusLM(4, beta=0.9), base.digest())
    sealed = seal(key.codec_alone(), "pw", scrypt_n=2)
    body = sealed[:-32].replace(b'"milkglass-codec"', b'"milkglass-key"')
    with pytest.raises(TamperedKey):
        unseal(body + hashlib.sha256(body).digest(), "pw")
    write_key(tmp_path / "k", replace(key, secret=None, kept_identifier="ab" * 16), "pw", scrypt_n=2, allows_weak=True)
    assert read_key(tmp_path / "k", "pw").identifier == "ab" * 16

"""A key of another model, or another key of the same one: no id leaves, and the person is told what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milkglass.client.key.file import write_key
from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.models.checkpoint import Checkpoint, read_json
from tests.cli.kit import PASSPHRASE, SCHEME, SECRET, Owner, call, document, has_model_of, refused
from tests.client.stub import Stub

IDS = ("POST /classify", "POST /v1/completions", "POST /v1/uploads", "PUT", "POST /v1/fine_tuning/jobs")


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    path = tmp_path / "tickets.jsonl"
    rows = [{"text": f"{SECRET} again", "label": ("urgent", "billing")[i % 2]} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"instruction": "Answer.", "input": SECRET, "output": "We will call."}) + "\n")
    return path


def sent(stub: Stub) -> list[str]:
    return [name for name, _, _ in stub.calls if name.startswith(IDS)]


def commands(owner: Owner, tickets: Path, talks: Path) -> Iterator[tuple[tuple[Any, ...], str | None]]:
    """Every command that takes a key and the name of a server's model."""
    key = ("--key", owner.path)
    if owner.key.info.document["kind"] == "encoder":
        yield ("classify", "mine", "the nurse", *key), None
        yield ("finetune", "mine", tickets, *key), None
    else:
        yield ("generate", "mine", "hello", *key), None
        yield ("generate", "mine", "hello", "--raw", *key), None
        yield ("chat", "mine", *key), "hello\n"
        yield ("finetune", "mine", talks, *key), None


def test_another_key_of_the_same_model_is_refused(
    stub: Stub, encoder: Owner, decoder: Owner, tickets: Path, talks: Path
) -> None:
    for owner in (encoder, decoder):
        before = owner.about
        stub.described = {"kind": owner.key.info.document["kind"], "vocab_size": 300, "key_id": "0" * 32}
        for words, stdin in commands(owner, tickets, talks):
            result = call(*words, stdin=stdin)
            refused(result, 4, "mine was scrambled with another key than this one, so nothing was sent")
            assert "milkglass models --server URL --key FILE" in result.stderr
        assert owner.about == before, "a refused fine-tune leaves no labels in the key"
    assert not sent(stub)


def test_a_key_of_another_model_is_refused_though_the_model_names_no_key(
    stub: Stub, encoder: Owner, decoder: Owner, tickets: Path, talks: Path
) -> None:
    for owner, other in ((encoder, "decoder"), (decoder, "encoder")):
        for words, stdin in commands(owner, tickets, talks):
            stub.described = {"kind": owner.key.info.document["kind"], "vocab_size": 301}
            refused(call(*words, stdin=stdin), 4, "mine has 301 tokens, this key is for a model of 300")
            stub.described = {"kind": other, "vocab_size": 300}
            refused(
                call(*words, stdin=stdin), 4, f"mine is not an {owner.key.info.document['kind']}".replace("an d", "a d")
            )
    assert not sent(stub)


def test_a_model_that_names_no_key_is_used_with_a_warning(stub: Stub, encoder: Owner) -> None:
    stub.described = {"kind": "encoder", "vocab_size": 300, "key_id": None}
    stub.replies["POST /classify"] = lambda h: h.answer(
        200, {"data": [{"index": 0, "label": "LABEL_0", "probs": [1.0]}]}
    )
    result = call("classify", "mine", "the nurse", "--key", encoder.path)
    assert result.exit_code == 0 and "warning: mine doesn't say which key scrambled it" in result.stderr
    has_model_of(stub, encoder)
    assert "doesn't say" not in call("classify", "mine", "the nurse", "--key", encoder.path).stderr


@pytest.mark.parametrize("description", [{}, {"vocab_size": "300"}, {"vocab_size": True}, {"vocab_size": -1}])
def test_a_description_that_cannot_be(stub: Stub, encoder: Owner, description: dict[str, Any]) -> None:
    stub.described = description
    refused(call("classify", "mine", "the nurse", "--key", encoder.path), 6, "vocab_size")
    assert not sent(stub)


def test_an_encoder_does_not_generate(stub: Stub, encoder: Owner) -> None:
    has_model_of(stub, encoder)
    result = call("generate", "mine", "hello", "--raw", "--key", encoder.path)
    refused(result, 3, "mine is an encoder: it cannot generate")
    assert "milkglass classify" in result.stderr and not sent(stub)


def test_the_identifier_is_in_folders_and_deltas_and_verify_looks(decoder: Owner, tmp_path: Path) -> None:
    base = Checkpoint.open(decoder.model)
    scramble(base, decoder.key, tmp_path / "delta", delta=True)
    scramble(base, decoder.key, tmp_path / "whole")
    for name in ("delta", "whole"):
        config = read_json(tmp_path / name / "config.json")
        assert config["milkglass_key_id"] == decoder.key.identifier
        assert document(call("verify", tmp_path / name, "--key", decoder.path, "--json"))["passed"]
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"milkglass_key_id": "0" * 32}))
        result = call("verify", tmp_path / name, "--key", decoder.path)
        assert result.exit_code == 4 and "scrambled with another key" in result.stderr


def test_two_keys_of_one_model_have_two_identifiers(decoder: Owner, tmp_path: Path) -> None:
    base = Checkpoint.open(decoder.model)
    other = new_key(base, str(decoder.model), SCHEME, base.digest())
    assert other.identifier != decoder.key.identifier
    write_key(tmp_path / "k", decoder.key, PASSPHRASE, scrypt_n=2)
    assert decoder.key.identifier not in decoder.key.root.hex()

"""What the tests of commands share: an owner of a model and a key, and a way to call a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from milkglass.cli.main import app
from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import read_key, write_key
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny
from tests.client.stub import Stub

PASSPHRASE = "correct horse battery"
SECRET = "zanzibar"
SMALL = ["--k", "4", "--set", "beta=0.9"]
SCHEME = ObfusLM(k=4, beta=0.9)


class Owner:
    """A model, its key and its scrambled folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.model = tiny.save(name, folder / "model")
        base = Checkpoint.open(self.model)
        self.key = new_key(base, str(self.model), SCHEME, base.digest())
        self.path = folder / "owner.mgkey"
        self.scrambled = folder / "scrambled"
        scramble(base, self.key, self.scrambled)
        self.codec = Codec.open(self.key, self.model)
        self.reset()

    def reset(self) -> Key:
        write_key(self.path, self.key, PASSPHRASE, scrypt_n=2, replace=True)
        return self.key

    @property
    def about(self) -> dict[str, Any]:
        return dict(read_key(self.path, PASSPHRASE).info.document)


def call(*words: Any, stdin: str | None = None, passphrase: str | None = PASSPHRASE) -> Result:
    environment = {"MILKGLASS_PASSPHRASE": passphrase or ""}
    return CliRunner().invoke(app, [str(word) for word in words], input=stdin, env=environment)


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(result: Result, code: int, message: str) -> None:
    assert result.exit_code == code, (result.exit_code, result.stderr, result.exception)
    assert message in result.stderr, (message, result.stderr)
    assert "\nerror: " in f"\n{result.stderr}"  # after notes on what was read
    assert "Traceback" not in result.stderr


def has_model_of(stub: Stub, owner: Owner, **more: Any) -> None:
    """The stub tells that every model that is asked for was scrambled with the owner's key."""
    kind = owner.key.info.document["kind"]
    stub.described = {"kind": kind, "vocab_size": tiny.VOCAB, "key_id": owner.key.identifier, **more}

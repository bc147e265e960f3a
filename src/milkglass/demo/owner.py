"""The data owner's side of the demo for one model: a key, a scrambled copy, a codec. The same classes as the CLI's.

Its folder holds the key and, for a while, scrambled files on their way to the server.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import UnlockedKey
from milkglass.client.key.generate import new_key, scheme_of
from milkglass.client.key.key import Key
from milkglass.client.remote.remote import Remote
from milkglass.client.session import Session
from milkglass.demo.attacker import Ids, ordinary
from milkglass.errors import CorruptCheckpoint
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import of
from milkglass.models.resolve import resolve
from milkglass.models.safetensors_header import read_header
from milkglass.models.view import Model
from milkglass.schemes.mixture import Promise
from milkglass.sequences import common_prefix


@dataclass(frozen=True)
class DemoOwner:
    """Attributes:
    ref: the public model's.
    folder: of the owner's files.
    base: the public model.
    unlocked: the key file.
    codec: text to scrambled ids and back.
    """

    ref: str
    folder: Path
    base: Checkpoint
    unlocked: UnlockedKey
    codec: Codec

    @classmethod
    def new(cls, ref: str, folder: Path) -> DemoOwner:
        """Makes the key. Its passphrase is thrown away: the demo's models are of no use to anyone later."""
        folder.mkdir(parents=True)
        source = resolve(ref)
        base = Checkpoint.open(source)
        key = new_key(base, ref, None, base.digest())
        unlocked = UnlockedKey.new(folder / "demo.mgkey", key, secrets.token_urlsafe(16))
        return cls(ref, folder, base, unlocked, Codec.open(key, source))

    @property
    def key(self) -> Key:
        return self.unlocked.key

    @property
    def name(self) -> str:
        return self.ref.removeprefix("demo:")

    @property
    def scrambled(self) -> Path:
        return self.folder / self.name

    def session(self, remote: Remote) -> Session:
        return Session(self.unlocked, self.codec, remote)

    @cached_property
    def uploaded(self) -> Model:
        """What the attacker has of the scrambled model: its table, as it was uploaded."""
        name = of(self.base).table
        for path in self.scrambled.glob("*.safetensors"):
            if ref := read_header(path).get(name):
                table = Checkpoint(self.scrambled, {}, None, {name: ref}).read(name)
                return Model({name: table}, self.base.config)
        raise CorruptCheckpoint(f"the scrambled {self.ref} has no table", "run the demo again")

    def about(self, promise: Promise) -> dict[str, Any]:
        """What ModelRun says of the scheme."""
        scheme = scheme_of(self.key)
        kept = {name: getattr(promise, name) for name in ("clusters", "below_k", "singletons", "verbatim")}
        kept["largest"] = max(promise.sizes, default=0)
        return {"k": scheme.k, "epsilon": scheme.document()["epsilon"], "vocabulary": len(self.key.sigma), "kept": kept}

    def prompt(self, text: str) -> tuple[Ids, Ids]:
        """A whole chat prompt, and of it the text's own tokens: not those that the template puts around every text."""
        whole, other = (self.codec.encode_chat([{"role": "user", "content": one}]) for one in (text, "?"))
        before = common_prefix(whole.tolist(), other.tolist())
        after = common_prefix(whole[before:][::-1].tolist(), other[before:][::-1].tolist())
        own = whole[before : len(whole) - after]
        return whole.astype(np.int64), ordinary(self.codec, own)

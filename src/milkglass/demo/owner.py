"""The data owner's side of the demo for one model: a key, a scrambled copy, a codec. The same classes as the CLI's.

Its folder holds the key and, for a while, scrambled files on their way to the server.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.client.codec.codec import Codec
from milkglass.client.data.parquet import WrittenParquet, write_parquet
from milkglass.client.key.file import write_key
from milkglass.client.key.generate import new_key, scheme_of
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.demo.attacker import Attacker, Ids, ordinary
from milkglass.errors import CorruptCheckpoint
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import of
from milkglass.models.resolve import resolve
from milkglass.models.safetensors_file import read_header
from milkglass.progress import Stage
from milkglass.schemes.mixture import Promise


@dataclass(frozen=True)
class DemoOwner:
    ref: str
    folder: Path
    base: Checkpoint
    key: Key
    codec: Codec
    delta: bool

    @classmethod
    def new(cls, ref: str, folder: Path, delta: bool) -> DemoOwner:
        """Makes the key. Its passphrase is thrown away: the demo's models are of no use to anybody later."""
        folder.mkdir(parents=True)
        source = resolve(ref)
        base = Checkpoint.open(source)
        key = new_key(base, ref, None, base.digest())
        write_key(folder / "demo.mgkey", key, secrets.token_urlsafe(16))
        return cls(ref, folder, base, key, Codec.open(key, source), delta)

    @property
    def name(self) -> str:
        return self.ref.removeprefix("demo:")

    @property
    def scrambled(self) -> Path:
        return self.folder / self.name

    def scramble(self, stage: Stage) -> Promise:
        return scramble(self.base, self.key, self.scrambled, self.delta, stage)

    def write(self, data: Path, labels: Mapping[str, int] | None, max_length: int) -> tuple[Path, WrittenParquet]:
        """Private rows as scrambled Parquet."""
        out = self.folder / f"{data.stem}.parquet"
        return out, write_parquet(self.codec, data, out, labels, max_length)

    @cached_property
    def attacker(self) -> Attacker:
        """Armed with the table as it was uploaded and with the public model."""
        name = of(self.base).table
        for path in self.scrambled.glob("*.safetensors"):
            if ref := read_header(path).get(name):
                uploaded = Checkpoint(self.scrambled, {}, None, {name: ref}).read(name)
                return Attacker(uploaded, self.base.read(name), self.codec.tokenizer)
        raise CorruptCheckpoint(f"the scrambled {self.ref} has no table", "run the demo again")

    def about(self, promise: Promise) -> dict[str, Any]:
        """What ModelRun says of the scheme."""
        scheme = scheme_of(self.key)
        kept = {name: getattr(promise, name) for name in ("clusters", "below_k", "singletons", "verbatim")}
        kept["largest"] = max(promise.sizes, default=0)
        return {"k": scheme.k, "epsilon": scheme.told()["epsilon"], "vocabulary": len(self.key.sigma), "kept": kept}

    def prompt(self, text: str) -> tuple[Ids, Ids]:
        """A whole chat prompt, and of it the text's own tokens: not those that the template puts around every text."""
        whole, other = (self.codec.encode_chat([{"role": "user", "content": one}]) for one in (text, "?"))
        before = _common(whole, other)
        after = _common(whole[before:][::-1], other[before:][::-1])
        own = whole[before : len(whole) - after]
        return whole.astype(np.int64), ordinary(self.codec, own)


def _common(one: Any, other: Any) -> int:
    """How many first tokens are the same."""
    short = min(len(one), len(other))
    same = one[:short] == other[:short]
    return short if same.all() else int(same.argmin())

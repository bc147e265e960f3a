"""Milkglass: fine-tune and run language models on machines that you don't trust.

The public surface, on one page. Everything else may change between versions.

    resolve(ref) -> Path                      a model's local folder
    Checkpoint.open(folder) -> Checkpoint     its config and where its tensors lie
    ObfusLM(k, epsilon, ...)                  the scheme
    new_key, read_key, write_key              the key and its sealed file
    scramble(base, key, out), verify(...)     make a scrambled checkpoint, check one
    Codec.open(key, folder)                   text to scrambled ids and back
    Remote(url, token)                        a server

Names are imported when they are first used: `import milkglass` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milkglass.checkpoint import Checkpoint
    from milkglass.client.codec import Codec
    from milkglass.client.key import Key
    from milkglass.client.keyfile import read_key, write_key
    from milkglass.client.making import new_key
    from milkglass.client.remote import Remote
    from milkglass.client.scramble import scramble
    from milkglass.client.verifying import verify
    from milkglass.errors import MilkglassError
    from milkglass.models import resolve
    from milkglass.schemes.obfuslm import ObfusLM

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "milkglass.checkpoint",
    "Codec": "milkglass.client.codec",
    "Key": "milkglass.client.key",
    "MilkglassError": "milkglass.errors",
    "ObfusLM": "milkglass.schemes.obfuslm",
    "Remote": "milkglass.client.remote",
    "new_key": "milkglass.client.making",
    "read_key": "milkglass.client.keyfile",
    "resolve": "milkglass.models",
    "scramble": "milkglass.client.scramble",
    "verify": "milkglass.client.verifying",
    "write_key": "milkglass.client.keyfile",
}

__all__ = [
    "Checkpoint",
    "Codec",
    "Key",
    "MilkglassError",
    "ObfusLM",
    "Remote",
    "new_key",
    "read_key",
    "resolve",
    "scramble",
    "verify",
    "write_key",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'milkglass' has no attribute {name!r}")

"""Milkglass: fine-tune and run language models on machines that you don't trust.

The public surface, on one page. Everything else may change between versions.

    Session.open(key, passphrase, server)     a key, its codec and a server: classify, generate, chat, finetune
    AsyncSession.open(...)                    the same for asyncio: its verbs are awaited
    resolve_model(ref) -> Path                a model's local folder
    Checkpoint.open(folder) -> Checkpoint     its config and where its tensors lie
    ObfusLM(k, epsilon, ...)                  the scheme
    Key; new_key, read_key, write_key         the key and its sealed file
    scramble(base, key, out), verify(...)     make a scrambled checkpoint, check one
    audit_key(key, passphrase, text, out)     attack your own model, key and text: what `milkglass audit` runs
    Codec.open(key, folder)                   text to scrambled ids and back
    DataFile(path, text, label, ...)          a file of your rows, and which of its columns are read
    Remote(url, token)                        a server
    http_client(key, passphrase, server)      for OpenAI(http_client=..., base_url=NOWHERE): the proxy, in this process
    async_http_client(...)                    for AsyncOpenAI(http_client=...)
    NOWHERE                                   the base_url at which no one listens
    MilkglassError                            what all of them raise

Names are imported when they are first used: `import milkglass` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milkglass.audit.key_audit import audit_key
    from milkglass.client.async_session import AsyncSession
    from milkglass.client.codec.codec import Codec
    from milkglass.client.key.file import read_key, write_key
    from milkglass.client.key.generate import new_key
    from milkglass.client.key.key import Key
    from milkglass.client.obfuscate.scramble import scramble
    from milkglass.client.obfuscate.verify import verify
    from milkglass.client.remote.remote import Remote
    from milkglass.client.session import Session
    from milkglass.errors import MilkglassError
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.resolve import resolve_model
    from milkglass.proxy.transport import NOWHERE, async_http_client, http_client
    from milkglass.rows.data_file import DataFile
    from milkglass.schemes.obfuslm import ObfusLM

__version__ = "0.1.0"

_MODULE_OF = {
    "AsyncSession": "milkglass.client.async_session",
    "Checkpoint": "milkglass.models.checkpoint",
    "Codec": "milkglass.client.codec.codec",
    "DataFile": "milkglass.rows.data_file",
    "Key": "milkglass.client.key.key",
    "MilkglassError": "milkglass.errors",
    "NOWHERE": "milkglass.proxy.transport",
    "ObfusLM": "milkglass.schemes.obfuslm",
    "Remote": "milkglass.client.remote.remote",
    "Session": "milkglass.client.session",
    "audit_key": "milkglass.audit.key_audit",
    "async_http_client": "milkglass.proxy.transport",
    "new_key": "milkglass.client.key.generate",
    "read_key": "milkglass.client.key.file",
    "resolve_model": "milkglass.models.resolve",
    "scramble": "milkglass.client.obfuscate.scramble",
    "http_client": "milkglass.proxy.transport",
    "verify": "milkglass.client.obfuscate.verify",
    "write_key": "milkglass.client.key.file",
}

__all__ = [
    "AsyncSession",
    "Checkpoint",
    "Codec",
    "DataFile",
    "Key",
    "MilkglassError",
    "NOWHERE",
    "ObfusLM",
    "Remote",
    "Session",
    "async_http_client",
    "audit_key",
    "new_key",
    "read_key",
    "resolve_model",
    "scramble",
    "http_client",
    "verify",
    "write_key",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        try:
            return getattr(import_module(_MODULE_OF[name]), name)
        except ModuleNotFoundError as error:
            from milkglass.extras import missing_extra_error

            raise missing_extra_error(error, name) or error from error
    raise AttributeError(f"module 'milkglass' has no attribute {name!r}")

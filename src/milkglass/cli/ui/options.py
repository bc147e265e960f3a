"""Options that several commands share, and what they open: the key, the codec, the server."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass.cli.ui.passphrase import passphrase
from milkglass.cli.ui.terminal import note
from milkglass.errors import UsageError

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey
    from milkglass.client.remote.remote import Remote
    from milkglass.client.session import Session

TOKEN_VARIABLE = "MILKGLASS_TOKEN"

KeyFile = Annotated[Path, typer.Option("--key", help="The key file.", show_default=False)]
PassphraseFile = Annotated[
    Path | None, typer.Option("--passphrase-file", help="A file with the key's passphrase on its first line.")
]
ModelRef = Annotated[str | None, typer.Option("--model", help="The original model, if it has moved.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, errors as JSON on stderr.")]
ServerUrl = Annotated[
    str,
    typer.Option(
        "--server", envvar="MILKGLASS_SERVER", help="The server's address, such as https://gpu.example:8420.",
        show_default=False,
    ),
]  # fmt: skip
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help=f"A file with the server's token (else ${TOKEN_VARIABLE}).")
]
Certificate = Annotated[
    Path | None, typer.Option("--certificate", help="The server's certificate (PEM), if it signed its own.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Don't ask before deleting.")]
AllowHttp = Annotated[bool, typer.Option("--allow-http", help="Send the token over a network without encryption.")]


def require_file(path: Path, hint: str) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a file", hint)
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint)


def open_key(path: Path, passphrase_file: Path | None) -> UnlockedKey:
    from milkglass.client.key.file import UnlockedKey
    from milkglass.errors import KeyFileError

    if not path.is_file():  # before anyone is asked for a passphrase
        raise KeyFileError(f"there is no key file at {path}", "give the file that `milkglass obfuscate` wrote")
    return UnlockedKey.open(path, passphrase(passphrase_file))


@dataclass(frozen=True)
class ServerOptions:
    """How a command reaches its server; as text, the options that lead the next command there."""

    url: str
    token_file: Path | None
    certificate: Path | None
    allow_http: bool

    def open(self) -> Remote:
        from milkglass.cli.ui.terminal import note
        from milkglass.client.remote.connection import RetryPolicy
        from milkglass.client.remote.remote import Remote

        token = read_token(self.token_file)
        return Remote(self.url, token, self.allow_http, self.certificate, patience=RetryPolicy(progress=note))

    def __str__(self) -> str:
        words = ["--server", self.url]
        words += ["--token-file", str(self.token_file)] if self.token_file else []
        words += ["--certificate", str(self.certificate)] if self.certificate else []
        return shlex.join(words + (["--allow-http"] if self.allow_http else []))


def key_options(key: Path, passphrase_file: Path | None, model: str | None = None) -> str:
    """The options that open the same key in the next command."""
    words = ["--key", str(key)]
    words += ["--passphrase-file", str(passphrase_file)] if passphrase_file else []
    return shlex.join(words + (["--model", model] if model else []))


def open_session(unlocked: UnlockedKey, model: str | None, server: ServerOptions) -> Session:
    """The session of a command: warnings go to stderr."""
    from milkglass.cli.ui.terminal import note
    from milkglass.client.session import Session, codec_of

    return Session(unlocked, codec_of(unlocked, model), server.open(), note)


def read_token(token_file: Path | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    if not token_file.is_file():
        raise UsageError(f"there is no token file {token_file}", "give the file `token` of the server's home folder")
    return token_file.read_text("utf-8").strip()


# What a command keeps of the model that it was given, and says of it.
def kept_name(model: str, folder: Path) -> str:
    """The absolute folder, the embedded model, or the hub id with its commit, reported where it was not given."""
    from milkglass.models.resolve import recorded

    name = recorded(model, folder)
    if "@" in name and name != model and not Path(model).expanduser().is_dir():
        note(f"{model} is {name}")
    return name

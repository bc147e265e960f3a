"""Options that several commands share, and what they open: the key, the codec, the server."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.ui.passphrase import passphrase
from milkglass.errors import UsageError

if TYPE_CHECKING:
    from milkglass.client.codec.codec import Codec
    from milkglass.client.data.label_scale import Scale
    from milkglass.client.key.key import Key
    from milkglass.client.remote.remote import Remote

TOKEN_VARIABLE = "MILKGLASS_TOKEN"

KeyFile = Annotated[Path, typer.Option("--key", help="The key file.", show_default=False)]
PassphraseFile = Annotated[
    Path | None, typer.Option("--passphrase-file", help="A file with the key's passphrase on its first line.")
]
ModelRef = Annotated[
    str | None, typer.Option("--model", help="The original model, if it moved since the key was made.")
]
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
AllowHttp = Annotated[bool, typer.Option("--allow-http", help="Let the token cross a network in the clear.")]


def require_file(path: Path, hint: str) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a file", hint)
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint)


@dataclass(frozen=True)
class UnlockedKey:
    """A key file that was opened: enough to write it again."""

    path: Path
    key: Key
    passphrase: str

    def __repr__(self) -> str:
        return f"Opened({self.path})"

    def remember(self, labels: Mapping[str, int], job: str | None = None) -> UnlockedKey:
        """The key with these label names in its sealed `about`, as the newest ones and as the job's."""

        def noted(about: Mapping[str, Any]) -> dict[str, Any]:
            fine_tunes = {**(about.get("fine_tunes") or {}), **({} if job is None else {job: dict(labels)})}
            return {**about, "labels": dict(labels), **({"fine_tunes": fine_tunes} if fine_tunes else {})}

        return self._noted(noted)

    def remember_scale(self, scale: Scale, job: str | None = None) -> UnlockedKey:
        """The same for the scale of a regression's scores."""

        def noted(about: Mapping[str, Any]) -> dict[str, Any]:
            scales = {**(about.get("scales") or {}), **({} if job is None else {job: scale.told()})}
            return {**about, "scale": scale.told(), **({"scales": scales} if scales else {})}

        return self._noted(noted)

    def _noted(self, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> UnlockedKey:
        """The file is read again and written under a lock, so that what another command noted meanwhile stays."""
        from dataclasses import replace

        from milkglass.client.key.file import read_key, write_key
        from milkglass.client.key.usage import locked

        with locked(self.path):
            key = read_key(self.path, self.passphrase)
            about = change(key.about)
            if about != key.about:
                key = replace(key, about=about)
                write_key(self.path, key, self.passphrase, replace=True, weak=True)  # the one that opened it
        return UnlockedKey(self.path, key, self.passphrase)

    def labels_of(self, model: str) -> Mapping[str, int] | None:
        """The label names of a fine-tuned model; None where the model is not known."""
        for job, labels in (self.key.about.get("fine_tunes") or {}).items():
            if job.removeprefix("ftjob-") in model:  # a job's number is part of its model's name
                return labels
        return None

    def scale_of(self, model: str, job: str, newest: bool = False) -> Scale | None:
        """The scale of a fine-tuned model, by its name or by its job, or that of the last data sent."""
        from milkglass.client.data.label_scale import Scale

        scales: Mapping[str, list[float]] = self.key.about.get("scales") or {}
        named = (info for one, info in scales.items() if one.removeprefix("ftjob-") in model)
        return Scale.kept(self.key.about.get("scale") if newest else next(named, scales.get(job)))


def open_key(path: Path, passphrase_file: Path | None) -> UnlockedKey:
    from milkglass.client.key.file import read_key
    from milkglass.errors import KeyFileError

    if not path.is_file():  # before anybody is asked for a passphrase
        raise KeyFileError(f"there is no key file at {path}", "give the file that `milkglass obfuscate` wrote")
    secret = passphrase(passphrase_file)
    return UnlockedKey(path, read_key(path, secret), secret)


def open_codec(key: Key, model: str | None) -> Codec:
    from milkglass.client.codec.codec import Codec
    from milkglass.models.resolve import resolve

    return Codec.open(key, resolve(model or str(key.about["model"])))


def spend(opened: UnlockedKey, texts: int, tokens: int) -> None:
    """Count what is encoded under a key, and say so when that passes a threshold of its audits."""
    from milkglass.cli.ui.terminal import note
    from milkglass.client.key import usage

    before = usage.read(opened.path).passed()
    for who, share, at in usage.add(opened.path, texts, tokens).passed():
        if (who, share, at) not in before:
            note(
                f"warning: more than {at:,} tokens are encoded under this key: the attacker with {who} of its last "
                f"audit reads {share} of what carries content by then; see `milkglass key status {opened.path}`"
            )


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


def described(remote: Remote, opened: UnlockedKey, model_id: str) -> dict[str, Any]:
    """What the server says of a model, which must be the key's. Raises KeyForOtherModel: no id has left then."""
    from milkglass.cli.ui.terminal import note
    from milkglass.client.remote.key_match import require_key

    info = remote.model(model_id)
    if warning := require_key(info, opened.key, model_id):
        note(warning)
    return info


def read_token(token_file: Path | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    if not token_file.is_file():
        raise UsageError(f"there is no token file {token_file}", "give the file `token` of the server's home folder")
    return token_file.read_text("utf-8").strip()

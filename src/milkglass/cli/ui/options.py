"""Options that several commands share, and what they open: the key, the codec, the server.

@with_options
def command(*, key: KeyOptions, server: ServerOptions, as_json: AsJson = False) -> None: ...
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of
from functools import wraps
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from milkglass.cli.ui.columns import ROWS, ColumnOptions
from milkglass.cli.ui.passphrase import open_with_passphrase
from milkglass.cli.ui.terminal import note
from milkglass.errors import KeyFileError, UsageError
from milkglass.files import sha256

if TYPE_CHECKING:
    from milkglass.audit.key_scene import AuditFiles
    from milkglass.client.key.file import UnlockedKey
    from milkglass.client.remote.remote import Remote
    from milkglass.client.session import Session
    from milkglass.models.checkpoint import Checkpoint

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
Texts = Annotated[list[str] | None, typer.Argument(help="Texts; none: each line of stdin or of --in.")]
Pairs = Annotated[list[str] | None, typer.Option("--pair", help="The second text of each pair, in order.")]
Yes = Annotated[bool, typer.Option("--yes", help="Don't ask before deleting.")]
AllowHttp = Annotated[bool, typer.Option("--allow-http", help="Send the token over a network without encryption.")]


def parameters(help: str) -> Any:  # noqa: A002 - as typer calls it
    """Returns the option --set NAME=VALUE, for parameters of a scheme or a method."""
    return typer.Option("--set", metavar="NAME=VALUE", help=f"{help} Repeatable; an unknown name lists them all.")


SET_ALONE = (  # hyperparameters that only --set sets
    "warmup_ratio", "weight_decay", "adam_beta2", "lora_rank", "lora_alpha", "full_first", "full_last", "train_tables",
    "dtype", "seed", "save_steps", "logging_steps",
)  # fmt: skip


def option_of(hyperparameter: str) -> str:
    """Returns the option that sets a hyperparameter, for messages."""
    if hyperparameter in SET_ALONE:
        return f"--set {hyperparameter}"
    return "--epochs" if hyperparameter == "n_epochs" else f"--{hyperparameter.replace('_', '-')}"


def training_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Returns hyperparameters by name from words such as "lora_rank=64", their types as JSON has them.

    Raises:
        UsageError: a name that `--set` does not set, or one that is set twice.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or name not in SET_ALONE:
            from milkglass.server.spec import Hyperparameters

            defaults = {setting: Hyperparameters.model_fields[setting].default for setting in SET_ALONE}
            listing = ", ".join(f"{setting} ({json.dumps(default)})" for setting, default in defaults.items())
            raise UsageError(
                f"{name!r} is no setting of the training" if equals else f"{assignment!r} sets nothing",
                f"write NAME=VALUE; NAME is one of (with its default for classification) {listing}",
            )
        if name in values:
            raise UsageError(f"{name} is set twice", "set it once")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def refuse_unused(where: str, options: Mapping[str, Any]) -> None:
    """Raises UsageError for the first option that was set: not None, False or empty.

    Args:
        where: says where the options are not used, for the message.
    """
    for name, value in options.items():
        if value is not None and value is not False and value != [] and value != ():
            raise UsageError(f"{name} is not used {where}", "leave it out")


def given_options(context: typer.Context, besides: Collection[str]) -> dict[str, Any]:
    """Returns the options that were given on the command line, by their names, besides those of these parameters."""
    options = dict[str, Any]()
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in besides and source is not None and source.name == "COMMANDLINE":
            options[max(parameter.opts, key=len)] = context.params[name]
    return options


def changed_options(options: Any, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Returns the fields of an options dataclass that differ from their defaults, by the options' names."""
    changes = {}
    for field in fields_of(options):
        value = getattr(options, field.name)
        if value != field.default:
            changes[names.get(field.name, f"--{field.name.replace('_', '-')}")] = value
    return changes


def require_file(path: Path, hint: str) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a file", hint)
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint)


def require_folder(folder: Path, hint: str) -> None:
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", hint)


@dataclass(frozen=True)
class KeyOptions:
    """The key file of a command. As a string, the options that open the same key in the next command."""

    key: KeyFile
    model: ModelRef = None
    passphrase_file: PassphraseFile = None

    def require(self, instead: str = "") -> Path:
        """Returns the key file's path. Raises, before a passphrase is asked for, if there is none.

        Args:
            instead: what the command takes in place of a key, for the hint.
        """
        if self.key is None:
            raise UsageError("--key is missing", f"give the file that `milkglass obfuscate` wrote{instead}")
        if not self.key.is_file():
            raise KeyFileError(f"there is no key file at {self.key}", "give the file that `milkglass obfuscate` wrote")
        return self.key

    def open(self) -> UnlockedKey:
        return self.opened_with()[0]

    def opened_with(self) -> tuple[UnlockedKey, str]:
        """Returns the key, and its passphrase for a command that seals another file with it."""
        key = self.require()
        from milkglass.client.key.file import UnlockedKey

        unlocked, passphrase = open_with_passphrase(self.passphrase_file, lambda typed: UnlockedKey.open(key, typed))
        if reason := unlocked.key.spends_again:
            note(f"warning: {reason}; make it again from the whole key")
        return unlocked, passphrase

    def __str__(self) -> str:
        words = ["--key", str(self.key)]
        words += ["--passphrase-file", str(self.passphrase_file)] if self.passphrase_file else []
        return shlex.join(words + (["--model", self.model] if self.model else []))


@dataclass(frozen=True)
class ServerOptions:
    """The address and the credentials of a server. As a string, the options for the next command."""

    server: ServerUrl
    token_file: TokenFile = None
    certificate: Certificate = None
    allow_http: AllowHttp = False

    def require(self, instead: str = "") -> None:
        """Raises UsageError if there is no address. `instead`: what the command takes in its place, for the hint."""
        if self.server is None:
            raise UsageError("--server is missing", f"give its address, or set MILKGLASS_SERVER{instead}")

    def open(self) -> Remote:
        from milkglass.client.remote.connection import RetryPolicy
        from milkglass.client.remote.remote import Remote

        self.require()
        token = read_token(self.token_file)
        return Remote(self.server, token, self.allow_http, self.certificate, retry=RetryPolicy(progress=note))

    def __str__(self) -> str:
        words = ["--server", self.server]
        words += ["--token-file", str(self.token_file)] if self.token_file else []
        words += ["--certificate", str(self.certificate)] if self.certificate else []
        return shlex.join(words + (["--allow-http"] if self.allow_http else []))


@dataclass(frozen=True)
class CredentialOptions:
    """The credentials of a server whose address a command takes in another way than by --server."""

    token_file: TokenFile = None
    certificate: Certificate = None
    allow_http: AllowHttp = False

    def to(self, url: str) -> ServerOptions:
        return ServerOptions(url, self.token_file, self.certificate, self.allow_http)


@dataclass(frozen=True)
class SplitOptions:
    """A decoder whose embedding layer is in a local enclave, in place of a scrambled model and its key."""

    split: Annotated[
        str | None, typer.Option("--split", help="A split server's address, in place of --key and --server.")
    ] = None
    enclave: Annotated[Path | None, typer.Option(help="With --split: the folder that `split enclave build` wrote.")] = (
        None
    )
    engine_model: Annotated[
        str | None,
        typer.Option(help="With --split: the address is of vLLM with --enable-prompt-embeds, which has this model."),
    ] = None
    epsilon: Annotated[float, typer.Option(help="With --split: the sanitizer's budget of a token.")] = 3.0
    p: Annotated[
        float, typer.Option("--p", help="With --split: how often a token that is not sensitive is replaced.")
    ] = 0.3
    no_sanitize: Annotated[bool, typer.Option("--no-sanitize", help="With --split: send the text's own tokens.")] = (
        False
    )


@dataclass(frozen=True)
class AuditOptions:
    """The texts of an audit of a split model, and the time it may take."""

    text: Annotated[Path, typer.Option("--text", help=f"Your texts: {ROWS}, or .txt with one a line.")]
    out: Annotated[Path, typer.Option("--out", help="The folder for audit.html and audit.json.")] = Path("audit")
    public: Annotated[Path | None, typer.Option("--public", help="Text of another kind that an attacker may have.")] = (
        None
    )
    budget: Annotated[
        str, typer.Option(help="How long attacks may take, by the clock: 90s, 2m, 1h; a bare number is seconds.")
    ] = "15m"
    rows: Annotated[int | None, typer.Option(min=20, help="Read only this many texts.")] = None
    seed: Annotated[
        int, typer.Option(min=0, help="Decides which half of the texts is private, and every random draw.")
    ] = 1

    def files(self, columns: ColumnOptions) -> AuditFiles:
        from milkglass.audit.key_scene import AuditFiles

        text, public = columns.read_texts(self.text), columns.read_optional(self.public)
        return AuditFiles(text, public, rows=self.rows, seed=self.seed)

    def identity(self) -> dict[str, Any]:
        """Returns the values that must be unchanged when a stopped audit goes on."""
        public = None if self.public is None else sha256(self.public)
        return {"rows": self.rows, "text": sha256(self.text), "public": public, "seed": self.seed}


def same_command(context: typer.Context, **replaced: Any) -> str:
    """Returns the command line that was given, with other values of these parameters. None leaves an option out."""
    words, options = ["milkglass", *context.command_path.split()[1:]], list[str]()
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in replaced and (source is None or source.name != "COMMANDLINE"):
            continue
        value = replaced.get(name, context.params.get(name))
        if value is None:
            continue
        if parameter.param_type_name == "argument":
            words += [str(one) for one in _each(value)]
        elif isinstance(value, bool):
            options += [max(parameter.opts, key=len)] if value else parameter.secondary_opts[:1]
        else:
            options += [word for one in _each(value) for word in (max(parameter.opts, key=len), str(one))]
    return shlex.join([*words, *options])


def _each(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def with_options(command: Callable[..., None], required: bool = True) -> Callable[..., None]:
    """Returns a command with an option for each field of the dataclasses that it takes, those without defaults first.

    Args:
        required: False if --key and --server may be missing. A missing one is then refused when it is used.
    """
    signature = inspect.signature(command, eval_str=True)
    annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    groups = {name: group for name, group in annotations.items() if isinstance(group, type) and is_dataclass(group)}
    fields = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}

    @wraps(command)
    def run(**values: Any) -> None:
        filled = {name: group(**{field: values.pop(field) for field in fields[name]}) for name, group in groups.items()}
        command(**values, **filled)

    parts = (
        fields[name].values() if name in groups else [parameter] for name, parameter in signature.parameters.items()
    )
    flat = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in chain.from_iterable(parts)]
    if not required:
        flat = [_optional(parameter) if parameter.name in ("key", "server") else parameter for parameter in flat]
    flat.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)
    run.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]  # typer reads it
    return run


def _optional(parameter: inspect.Parameter) -> inspect.Parameter:
    value_type, *notes = get_args(parameter.annotation)
    return parameter.replace(default=None, annotation=Annotated[value_type | None, *notes])


def open_session(key: KeyOptions, server: ServerOptions, unlocked: UnlockedKey | None = None) -> Session:
    """Opens the session of a command, with warnings on stderr. `unlocked`: the key, if it is open already."""
    from milkglass.client.codec.codec import codec_of
    from milkglass.client.session import Session

    server.require()
    unlocked = unlocked or key.open()
    return Session(unlocked, codec_of(unlocked, key.model), server.open(), note)


def read_token(token_file: Path | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    if not token_file.is_file():
        raise UsageError(f"there is no token file {token_file}", "give the file `token` of the server's home folder")
    return token_file.read_text("utf-8").strip()


def original(ref: str) -> Checkpoint:
    """Opens a model that was not scrambled: a folder, a hub id, or an embedded one."""
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.resolve import resolve

    return Checkpoint.open(resolve(ref))


def kept_name(model: str, folder: Path) -> str:
    """Returns the name that a command stores for a model, and reports a commit that was not given.

    It is the model's absolute folder, the embedded model, or the hub id and commit.
    """
    from milkglass.models.resolve import name_to_store

    name = name_to_store(model, folder)
    if "@" in name and name != model and not Path(model).expanduser().is_dir():
        note(f"{model} is {name}")
    return name

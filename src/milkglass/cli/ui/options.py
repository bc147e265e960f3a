"""Options that several commands share, and what they open: the key, the server, a session, the original model.

A command takes groups of options as dataclasses:

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
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from milkglass.cli.ui.columns import ROW_FORMATS, ColumnOptions
from milkglass.cli.ui.passphrase import open_with_passphrase
from milkglass.cli.ui.terminal import note
from milkglass.errors import UsageError, missing_file_hint, missing_key_error
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


def parameters_option(help: str) -> Any:  # noqa: A002 - as typer calls it
    """Returns the option --set NAME=VALUE, for parameters of a scheme or a method."""
    return typer.Option("--set", metavar="NAME=VALUE", help=f"{help} Repeatable; an unknown name lists all parameters.")


SETTINGS_WITHOUT_OPTION = (  # hyperparameters that only --set sets
    "warmup_ratio", "weight_decay", "adam_beta2", "lora_rank", "lora_alpha", "full_first", "full_last", "train_tables",
    "dtype", "seed", "save_steps", "logging_steps",
)  # fmt: skip


def option_of(hyperparameter: str) -> str:
    """Returns the option that sets a hyperparameter, such as "--epochs" or "--set seed", for messages."""
    if hyperparameter in SETTINGS_WITHOUT_OPTION:
        return f"--set {hyperparameter}"
    return "--epochs" if hyperparameter == "n_epochs" else f"--{hyperparameter.replace('_', '-')}"


def training_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Returns the hyperparameters that `--set` sets, by name.

    Args:
        assignments: the values of `--set`, such as "lora_rank=64". What follows "=" is read as JSON, or else as text.

    Raises:
        UsageError: `--set` does not set such a name, or a name is set twice.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or name not in SETTINGS_WITHOUT_OPTION:
            from milkglass.server.spec import Hyperparameters

            defaults = {setting: Hyperparameters.model_fields[setting].default for setting in SETTINGS_WITHOUT_OPTION}
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
    """Raises UsageError for the first option that is set: that is not None, False or an empty list.

    Args:
        where: says where the options are not used, for the message.
        options: the values of the options by their names.
    """
    for name, value in options.items():
        if value is not None and value is not False and value != [] and value != ():
            raise UsageError(f"{name} is not used {where}", "leave it out")


def command_line_options(context: typer.Context, ignored_names: Collection[str]) -> dict[str, Any]:
    """Returns the values of the options that stand on the command line, by the options' names.

    Args:
        ignored_names: names of the command's parameters that are left out.
    """
    options = dict[str, Any]()
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in ignored_names and source is not None and source.name == "COMMANDLINE":
            options[max(parameter.opts, key=len)] = context.params[name]
    return options


def changed_options(options: Any) -> dict[str, Any]:
    """Returns the fields of an options dataclass that differ from their defaults, by the options' names."""
    changes = {}
    for field in fields_of(options):
        value = getattr(options, field.name)
        if value != field.default:
            changes[f"--{field.name.replace('_', '-')}"] = value
    return changes


def require_file(path: Path, hint: str) -> None:
    """Raises UsageError with this hint if there is no such file."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a file", hint)
    if not path.is_file():
        raise UsageError(f"there is no file {path}", missing_file_hint(path, hint))


def require_folder(folder: Path, hint: str) -> None:
    """Raises UsageError with this hint if there is no such folder."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", hint)


@dataclass(frozen=True)
class KeyOptions:
    """Opens a key by the options of a command. `str` gives the options as they are typed in another command."""

    key: KeyFile
    model: ModelRef = None
    passphrase_file: PassphraseFile = None

    def require(self, alternative: str = "") -> Path:
        """Returns the key file's path. Commands call it before a passphrase is asked for.

        Args:
            alternative: what the command takes in place of a key, for the hint.

        Raises:
            UsageError: --key is missing.
            KeyFileError: there is no such file.
        """
        if self.key is None:
            raise UsageError("--key is missing", f"give the file that `milkglass obfuscate` wrote{alternative}")
        if not self.key.is_file():
            raise missing_key_error(self.key)
        return self.key

    def open(self) -> UnlockedKey:
        """Returns the opened key. Raises what `require` and `open_with_passphrase` raise."""
        return self.open_key_and_passphrase()[0]

    def open_key_and_passphrase(self) -> tuple[UnlockedKey, str]:
        """Returns the opened key, and its passphrase, with which a command can seal another file.

        Warns if a text that is sent again under this key spends epsilon again.
        """
        key = self.require()
        from milkglass.client.key.file import UnlockedKey

        unlocked, passphrase = open_with_passphrase(self.passphrase_file, lambda typed: UnlockedKey.open(key, typed))
        if reason := unlocked.key.repeat_spending_reason:
            note(f"warning: {reason}; make it again from the whole key")
        return unlocked, passphrase

    def __str__(self) -> str:
        arguments = ["--key", str(self.key)]
        arguments += ["--passphrase-file", str(self.passphrase_file)] if self.passphrase_file else []
        return shlex.join(arguments + (["--model", self.model] if self.model else []))


@dataclass(frozen=True)
class ServerOptions:
    """Reaches a server by the options of a command. `str` gives the options as they are typed in another command."""

    server: ServerUrl
    token_file: TokenFile = None
    certificate: Certificate = None
    allow_http: AllowHttp = False

    def require(self, alternative: str = "") -> None:
        """Raises UsageError if there is no address. `alternative` says in the hint what takes its place."""
        if self.server is None:
            raise UsageError("--server is missing", f"give its address, or set MILKGLASS_SERVER{alternative}")

    def open(self) -> Remote:
        """Returns a client of the server, which prints when it tries again. Raises UsageError without an address."""
        from milkglass.client.remote.connection import RetryPolicy
        from milkglass.client.remote.remote import Remote

        self.require()
        token = read_token(self.token_file)
        return Remote(self.server, token, self.allow_http, self.certificate, retry=RetryPolicy(notice=note))

    def __str__(self) -> str:
        arguments = ["--server", self.server]
        arguments += ["--token-file", str(self.token_file)] if self.token_file else []
        arguments += ["--certificate", str(self.certificate)] if self.certificate else []
        return shlex.join(arguments + (["--allow-http"] if self.allow_http else []))


@dataclass(frozen=True)
class CredentialOptions:
    """Holds the options of a server besides its address, for a command without --server."""

    token_file: TokenFile = None
    certificate: Certificate = None
    allow_http: AllowHttp = False

    def for_server(self, url: str) -> ServerOptions:
        """Returns the options of the server at `url`."""
        return ServerOptions(url, self.token_file, self.certificate, self.allow_http)


@dataclass(frozen=True)
class SplitOptions:
    """Holds the options that name a split decoder and its local enclave, in place of a scrambled model and its key."""

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
    epsilon: Annotated[float, typer.Option(help="With --split: the sanitizer's epsilon per token.")] = 3.0
    p: Annotated[
        float, typer.Option("--p", help="With --split: how often a token that is not sensitive is replaced.")
    ] = 0.3
    no_sanitize: Annotated[bool, typer.Option("--no-sanitize", help="With --split: send the text's own tokens.")] = (
        False
    )


@dataclass(frozen=True)
class AuditOptions:
    """Holds the options of an audit of a split model: its texts, its folder, its time and its draws."""

    text: Annotated[Path, typer.Option("--text", help=f"Your texts: {ROW_FORMATS}, or .txt with one a line.")]
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

    def read_files(self, columns: ColumnOptions) -> AuditFiles:
        """Reads the texts once, and returns their files. Raises what `ColumnOptions.read_texts` raises."""
        from milkglass.audit.key_scene import AuditFiles

        text, public = columns.read_texts(self.text), columns.read_optional(self.public)
        return AuditFiles(text, public, max_rows=self.rows, seed=self.seed)

    def identity(self) -> dict[str, Any]:
        """Returns the values that must be the same when a stopped audit goes on."""
        public = None if self.public is None else sha256(self.public)
        return {"rows": self.rows, "text": sha256(self.text), "public": public, "seed": self.seed}


def same_command(context: typer.Context, **replacements: Any) -> str:
    """Returns the running command's line, as it can be typed again, with other values of some parameters.

    Args:
        replacements: values by the parameters' names. None leaves an option out.
    """
    arguments, options = _given_words(context, replacements)
    return shlex.join(["milkglass", *context.command_path.split()[1:], *arguments, *options])


def options_of(context: typer.Context, names: Collection[str]) -> str:
    """Returns those of the running command's options that set the parameters of these names, as they can be typed."""
    left_out = {str(parameter.name): None for parameter in context.command.params if parameter.name not in names}
    return shlex.join(_given_words(context, left_out)[1])


def _given_words(context: typer.Context, replacements: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the arguments and the options of the running command that were given. See `same_command`."""
    arguments, options = list[str](), list[str]()
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in replacements and (source is None or source.name != "COMMANDLINE"):
            continue
        value = replacements.get(name, context.params.get(name))
        if value is None:
            continue
        if parameter.param_type_name == "argument":
            arguments += [str(element) for element in _as_list(value)]
        elif isinstance(value, bool):
            options += [max(parameter.opts, key=len)] if value else parameter.secondary_opts[:1]
        else:
            for element in _as_list(value):
                options += [max(parameter.opts, key=len), str(element)]
    return arguments, options


def _as_list(value: Any) -> list[Any]:
    """Returns the elements of a list or tuple, or any other value as the only element."""
    return [*value] if isinstance(value, list | tuple) else [value]


def with_options(command: Callable[..., None], needs_key_and_server: bool = True) -> Callable[..., None]:
    """Returns a command with an option for each field of the dataclasses that it takes, those without defaults first.

    Args:
        command: a function with typer's annotations, some of whose parameters are dataclasses of options.
        needs_key_and_server: whether --key and --server must be set. If not, the command refuses a missing one itself.
    """
    signature = inspect.signature(command, eval_str=True)
    annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    groups = {name: group for name, group in annotations.items() if isinstance(group, type) and is_dataclass(group)}
    fields = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}

    @wraps(command)
    def run(**values: Any) -> None:
        option_groups = {
            name: group(**{field: values.pop(field) for field in fields[name]}) for name, group in groups.items()
        }
        command(**values, **option_groups)

    parts = (
        fields[name].values() if name in groups else [parameter] for name, parameter in signature.parameters.items()
    )
    options = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in chain.from_iterable(parts)]
    if not needs_key_and_server:
        options = [_without_requirement(option) if option.name in ("key", "server") else option for option in options]
    options.sort(key=lambda option: option.default is not inspect.Parameter.empty)
    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]  # typer reads it
    return run


with_optional_key_and_server = partial(with_options, needs_key_and_server=False)


def _without_requirement(parameter: inspect.Parameter) -> inspect.Parameter:
    """Returns an annotated parameter that may be missing, and is None then."""
    value_type, *metadata = get_args(parameter.annotation)
    return parameter.replace(default=None, annotation=Annotated[value_type | None, *metadata])


def open_session(key: KeyOptions, server: ServerOptions, unlocked: UnlockedKey | None = None) -> Session:
    """Opens the session of a command, whose warnings are printed to stderr. `unlocked` is the key if it is open."""
    from milkglass.client.codec.codec import codec_of
    from milkglass.client.session import Session

    server.require()
    unlocked = unlocked or key.open()
    return Session(unlocked, codec_of(unlocked, key.model), server.open(), note)


def read_token(token_file: Path | None) -> str | None:
    """Returns the token of the file, without a file that of the environment, or None. Raises UsageError for no file."""
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    if not token_file.is_file():
        raise UsageError(f"there is no token file {token_file}", "give the file `token` of the server's home folder")
    return token_file.read_text("utf-8").strip()


def open_original(ref: str) -> Checkpoint:
    """Opens an original model, which is not scrambled: a folder, a hub id, or an embedded model."""
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.resolve import resolve_model

    return Checkpoint.open(resolve_model(ref))


def kept_name(model: str, folder: Path) -> str:
    """Returns the name that a command stores for a model: its absolute folder, or the embedded model, or the hub id.

    A hub id gets the commit, which is printed if the user did not name it.
    """
    from milkglass.models.resolve import name_to_store

    name = name_to_store(model, folder)
    if "@" in name and name != model and not Path(model).expanduser().is_dir():
        note(f"{model} is {name}")
    return name

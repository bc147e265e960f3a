"""`milkglass proxy` and `ui`: OpenAI's API on this machine, in front of any engine that serves a scrambled model.

`ui` is the proxy with a page that shows who sees what.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from milkglass.cli.ui.columns import ROW_FORMATS, ColumnOptions
from milkglass.cli.ui.options import (
    KeyOptions,
    ServerOptions,
    changed_options,
    open_original,
    read_token,
    refuse_unused,
    require_file,
    with_optional_key_and_server,
    with_options,
)
from milkglass.cli.ui.passphrase import open_with_passphrase
from milkglass.cli.ui.terminal import INTERRUPT_EXIT_CODE, note, note_after_interrupt, report_activity, say
from milkglass.cli.ui.tls import TlsCertificate, TlsKey, check_tls_files, client_url, require_tls_or_loopback
from milkglass.errors import UsageError
from milkglass.system import is_loopback

if TYPE_CHECKING:
    from milkglass.attest.channel import AttestedChannel
    from milkglass.client.key.file import UnlockedKey
    from milkglass.engines.upstream import Upstream
    from milkglass.proxy.run import ProxyAddress


API_KEY_BYTES = 24  # random bytes of a drawn API key
DEFAULT_BUDGET = "2m"  # the CPU time for which `ui` attacks the model


@dataclass(frozen=True)
class EndpointOptions:
    """Holds the options of `proxy` and `ui`: the engine, its models, and the address, API key and TLS of the proxy."""

    engine: Annotated[
        str, typer.Option("--engine", help="What serves the model: milkglass, vllm, sglang or llamacpp.")
    ] = "milkglass"
    serves: Annotated[
        list[str] | None,
        typer.Option(
            "--serves",
            metavar="NAME[=KEYFILE]",
            help="A model's name at the engine, and the key file of it where there are several; repeatable.  "
            "[default: all that this key made]",
        ),
    ] = None
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 8422
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="A file with what applications must give as their API key.  [default: one is drawn, and printed]",
        ),
    ] = None

    cert: TlsCertificate = None
    tls_key: TlsKey = None
    insecure_http: Annotated[
        bool,
        typer.Option(
            "--insecure-http", help="Listen on a network without TLS: anyone there can read texts and the API key."
        ),
    ] = False

    def address(self, any_key: bool = False) -> ProxyAddress:
        """Returns where the proxy listens, and the API key that applications must give: none with `any_key`.

        Raises:
            UsageError: a network could read or use the proxy, the API key's file is missing or empty, `any_key` and
                such a file are both set, or the TLS files are not a certificate and its key.
        """
        if any_key and self.api_key_file is not None:
            raise UsageError("--open and --api-key-file exclude each other", "leave one out")
        if any_key and not is_loopback(self.host):
            raise UsageError(
                f"listening on {self.host} without an API key would let anyone there use your key", "leave --open out"
            )
        require_tls_or_loopback(self.host, self.cert, self.insecure_http, "texts, answers and the API key")
        check_tls_files(self.cert, self.tls_key)
        token = None if any_key else secrets.token_urlsafe(API_KEY_BYTES)
        if self.api_key_file is not None:
            require_file(self.api_key_file, "write a long random word into it")
            token = read_token(self.api_key_file)
            if not token:
                raise UsageError(f"{self.api_key_file} is empty", "write a long random word into it")
        from milkglass.proxy.run import ProxyAddress

        return ProxyAddress(self.host, self.port, token, self.cert, self.tls_key)

    def client_line(self, url: str, address: ProxyAddress) -> str:
        """Returns the line of Python that opens OpenAI's client. An API key from a file is not repeated."""
        api_key = "..." if self.api_key_file is not None else f'"{address.token or "any"}"'
        key_note = "" if self.api_key_file is None else f"; the API key is in {self.api_key_file}"
        return f'OpenAI(base_url="{client_url(url, self.cert)}/v1", api_key={api_key}){key_note}'

    def upstream(self, server: ServerOptions, channel: AttestedChannel | None = None) -> Upstream:
        """Returns the engine at --server, whose requests go through the channel of an attested server, if there is one.

        Raises UsageError if the address is missing, or ends with /v1.
        """
        from milkglass.engines.catalogue import ENGINES
        from milkglass.engines.upstream import Upstream

        if server.server is None:
            raise UsageError("--server is missing", "give the address of what serves the model")
        if server.server.rstrip("/").endswith("/v1"):
            raise UsageError(
                f"--server {server.server} ends with /v1", "give the address alone: /v1 is the proxy's own"
            )
        token = read_token(server.token_file)
        engine = ENGINES[self.engine]
        return Upstream(engine, server.server, token, server.allow_http, server.certificate, None, channel)


@with_optional_key_and_server
def proxy(
    any_key: Annotated[
        bool, typer.Option("--open", help="Take any API key, or none: every user of this machine may use your key.")
    ] = False,
    attested: Annotated[
        Path | None,
        typer.Option("--attested", metavar="POLICY", help="Send only where the hardware proves what POLICY demands."),
    ] = None,
    quiet: Annotated[
        Literal["whole", "slots"] | None,
        typer.Option(help="With --attested: answers whole, or in slots of one size, so that sizes tell less."),
    ] = None,
    collateral: Annotated[
        Path | None, typer.Option(help="With --attested: the makers' signed files that `milkglass attest fetch` wrote.")
    ] = None,
    *,
    endpoint: EndpointOptions,
    key: KeyOptions,
    server: ServerOptions,
) -> None:
    """Answer OpenAI's API on this machine: text in front, scrambled ids behind.

    Point an application's base URL at it, such as http://127.0.0.1:8422/v1. What cannot be kept private is refused.
    --key FOLDER takes every key file (*.mgkey) in it, under one passphrase: each model is asked with the key that
    notes its name (`upload --key` and `finetune` note it), or that --serves NAME=KEYFILE says. The engine's word does
    not choose a key. Applications give an API key, a random one unless --api-key-file holds one; with --open any key
    is taken, from this machine alone. A network's address needs --cert and --tls-key, or --insecure-http.

    With --attested POLICY nothing leaves before the evidence of the server's hardware was verified on the connection
    that is used. Without --key the text then goes to that server as it is, and to nobody else.
    """
    address = endpoint.address(any_key)
    if attested is None:
        refuse_unused("without --attested", {"--quiet": quiet, "--collateral": collateral})
        channel = None
    else:
        channel = _open_channel(attested, collateral, server)
        if server.server is not None and server.server.rstrip("/") != channel.policy.server:
            raise UsageError(
                f"--server is {server.server}, and the policy is for {channel.policy.server}", "leave one out"
            )
        if key.key is None:
            only_keyed = {
                "--serves": endpoint.serves, "--model": key.model, "--passphrase-file": key.passphrase_file,
                "--engine": None if endpoint.engine == EndpointOptions.engine else endpoint.engine,
                "--allow-http": server.allow_http,
            }  # fmt: skip
            refuse_unused("with --attested and without --key", only_keyed)
            _run_plain(channel, address, endpoint, server, quiet)
            return
        refuse_unused("with --key", {"--quiet": quiet})
        server, address = (
            replace(server, server=channel.policy.server),
            replace(address, attested=_attested_header(channel)),
        )
    upstream = endpoint.upstream(server, channel)
    names, files = parse_serves(endpoint.serves or ())
    unlocked = _open_keys(key, files)
    from milkglass.client.codec.codec import codec_of
    from milkglass.proxy.run import run

    startup = ExitStack()

    def report_ready(url: str, models: list[str]) -> None:
        startup.close()
        state = "" if channel is None or not channel.policy.accepts_software else f" {_attested_header(channel)};"
        say(f"milkglass proxy: listening on {url}/v1;{state} models: {', '.join(models)}")
        note(f"next: {endpoint.client_line(url, address)}")

    with startup:
        startup.enter_context(report_activity(activity="start the proxy"))
        keys = [(unlocked_key, codec_of(unlocked_key, key.model)) for unlocked_key in unlocked]
        key_of_path = {unlocked_key.path.resolve(): unlocked_key for unlocked_key in unlocked}
        key_of_model = {name: key_of_path[file.resolve()] for name, file in files.items()}
        run(keys, upstream, names, address, report_ready, note, key_of_model=key_of_model)


def _open_channel(path: Path, collateral: Path | None, server: ServerOptions) -> AttestedChannel:
    """Returns the channel to the server of a policy. A verdict is printed when it differs from the last one."""
    from milkglass.attest import policy as policies
    from milkglass.attest.channel import AttestedChannel, make_verifier
    from milkglass.attest.claims import Verdict
    from milkglass.attest.sources import collateral_reader

    policy, read_collateral = policies.read_policy(path, policies.Policy), collateral_reader(collateral)
    pinned = policies.read_lock(path)
    last_lines = list[str]()

    def say_verdict(verdict: Verdict) -> None:
        nonlocal last_lines
        if verdict.lines() != last_lines:
            last_lines = verdict.lines()
            note("\n".join(last_lines))

    return AttestedChannel(policy, make_verifier(policy, pinned, read_collateral), server.certificate, say_verdict)


def _attested_header(channel: AttestedChannel) -> str:
    """Returns the value of STATE_HEADER in answers of the channel's server."""
    from milkglass.attest.passthrough import BY_POLICY, NOT_ATTESTED

    return NOT_ATTESTED if channel.policy.accepts_software else BY_POLICY


def _run_plain(
    channel: AttestedChannel, address: ProxyAddress, endpoint: EndpointOptions, server: ServerOptions,
    quiet: Literal["whole", "slots"] | None,
) -> None:  # fmt: skip
    """Runs a proxy without a key: it forwards text as it is to an attested server, through the channel alone."""
    from milkglass.proxy.attested import AttestedProxy
    from milkglass.proxy.run import DEFAULT_LIMITS
    from milkglass.server import logs, process

    if channel.policy.accepts_software:
        note("NOT ATTESTED: the policy takes software, which proves nothing")
    logs.configure(logging.WARNING)
    attested_proxy = AttestedProxy(
        channel, address.token, read_token(server.token_file), quiet, _attested_header(channel), DEFAULT_LIMITS
    )
    suffix = f" ({_attested_header(channel)})" if channel.policy.accepts_software else ""
    command = f"proxy --attested to {channel.policy.server}{suffix}"
    process.run(attested_proxy.app(), address, command, on_ready=lambda: note(f"API key: {address.token or 'any'}"))


def parse_serves(serves: Sequence[str]) -> tuple[list[str], dict[str, Path]]:
    """Returns the models' names of --serves NAME or NAME=KEYFILE, and the key files by name.

    Raises UsageError for a name that occurs twice, KeyFileError for a key file that does not exist.
    """
    names, files = list[str](), dict[str, Path]()
    for option in serves:
        name, separator, file = option.rpartition("=")
        if not separator or not (file.endswith(".mgkey") or Path(file).is_file()):
            name, file = option, ""  # "=" may be part of a model's name
        if name in names:
            raise UsageError(f"--serves names {name} twice", "name each model once")
        names.append(name)
        if file:
            files[name] = KeyOptions(Path(file)).require()
    return names, files


def _open_keys(key: KeyOptions, files: Mapping[str, Path]) -> list[UnlockedKey]:
    """Opens the key file, or the key files of a folder, and those of --serves, all with one passphrase.

    Raises:
        UsageError: no key file is named, the folder has none, or --model is set and there are several keys.
        KeyFileError: a key file does not exist or cannot be opened.
    """
    is_folder = key.key is not None and key.key.is_dir()
    if not is_folder and {file.resolve() for file in files.values()} <= {key.require().resolve()}:
        return [key.open()]
    key_files = sorted(key.key.glob("*.mgkey")) if is_folder else [key.require()]
    if is_folder and not key_files:
        raise UsageError(f"{key.key} holds no key file", "give a key file, or a folder of files *.mgkey")
    if key.model is not None:
        raise UsageError("--model is of one key, and there are several", "give one key file")
    from milkglass.client.key.file import UnlockedKey

    paths = {file.resolve(): file for file in (*key_files, *files.values())}

    def open_all(passphrase: str) -> list[UnlockedKey]:
        return [UnlockedKey.open(file, passphrase) for file in paths.values()]

    return open_with_passphrase(key.passphrase_file, open_all)[0]


@with_options
def ui(
    public: Annotated[
        Path | None,
        typer.Option(
            help=f"Text that an attacker has, {ROW_FORMATS} or a text a line: what crosses is deciphered with it as "
            "well."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="How long the prepared model is attacked, in CPU seconds: 90, 90s, 2m, 1h.")
    ] = DEFAULT_BUDGET,
    attack: Annotated[bool, typer.Option("--attack/--no-attack", help="Whether anything is attacked here.")] = True,
    *,
    columns: ColumnOptions,
    endpoint: EndpointOptions,
    key: KeyOptions,
    server: ServerOptions,
) -> None:
    """Like `proxy`, with a page: what you see, what the provider sees, and what an attack reads of it, as it happens.

    The address opens one tab, and the next address is printed then. Applications give an API key, a random one unless
    --api-key-file names it. Nothing is kept: what crossed is in memory until the command ends.
    """
    from milkglass.threat.budget import Budget

    if not attack:
        refuse_unused(
            "with --no-attack", {"--public": public, "--budget": None if budget == DEFAULT_BUDGET else budget}
        )
    if public is None:
        refuse_unused("without --public", changed_options(columns))
    seconds = Budget.parse(budget).seconds
    address = endpoint.address()
    public_file = columns.read_optional(public)
    upstream = endpoint.upstream(server)
    names, files = parse_serves(endpoint.serves or ())
    if other_files := [file for file in files.values() if file.resolve() != key.require().resolve()]:
        raise UsageError(f"the page shows one key, and --serves names {other_files[0]} besides", "give one, with --key")
    unlocked = key.open()
    from milkglass.client.codec.codec import codec_of
    from milkglass.client.key.scheme import scheme_of
    from milkglass.monitor.app import MonitorPage
    from milkglass.monitor.attacker import LiveAttacker
    from milkglass.proxy.run import run

    startup = ExitStack()
    startup.enter_context(report_activity(activity="start the page"))
    codec = codec_of(unlocked, key.model)
    attacker = None
    if attack:
        attacker = LiveAttacker(
            open_original(key.model or unlocked.key.info.model), unlocked.key, codec, public_file, seconds
        )
    page = MonitorPage(key.key, attacker, scheme_of(unlocked.key).broken or "")

    def report_ready(url: str, models: list[str]) -> None:
        startup.close()
        base = client_url(url, endpoint.cert)
        page.access.report_code = lambda code: say(f"milkglass ui: it is open; for another tab open {base}/#{code}")
        say(f"milkglass ui: open {base}/#{page.access.one_time_code}")
        note(f"applications: {endpoint.client_line(url, address)}; models: {', '.join(models)}")

    try:
        with startup:
            run([(unlocked, codec)], upstream, names, address, report_ready, note, page)
    except KeyboardInterrupt:
        note_after_interrupt("interrupted")
        exit_command(INTERRUPT_EXIT_CODE)
    exit_command(0)  # reached after Ctrl-C, too, where this process ignores SIGINT and only its server handles it


def exit_command(exit_code: int) -> None:
    """Ends the command without waiting for an attack, one step of which can take minutes."""
    from milkglass.monitor.attacker import is_attacking

    if is_attacking():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    raise typer.Exit(exit_code)

"""`milkglass ui`: the proxy with a page that shows who sees what."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from milkglass.cli.proxy.commands import EndpointOptions, named_keys
from milkglass.cli.ui.columns import ROWS, ColumnOptions
from milkglass.cli.ui.options import KeyOptions, ServerOptions, changed, original, refuse_unused, with_options
from milkglass.cli.ui.terminal import INTERRUPTED, note, note_apart, say
from milkglass.cli.ui.tls import reached
from milkglass.errors import UsageError

BUDGET = "2m"


@with_options
def ui(
    public: Annotated[
        Path | None,
        typer.Option(
            help=f"Text that an attacker has, {ROWS} or a text a line: what crosses is deciphered with it as well."
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(help="How long the prepared model is attacked, in seconds of the processor: 90, 90s, 2m, 1h."),
    ] = BUDGET,
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
        refuse_unused("with --no-attack", {"--public": public, "--budget": None if budget == BUDGET else budget})
    if public is None:
        refuse_unused("without --public", changed(columns))
    seconds = Budget.parse(budget).seconds
    address = endpoint.address()
    text = columns.others(public)
    upstream = endpoint.upstream(server)
    names, files = named_keys(endpoint.serves or ())
    if others := [file for file in files.values() if file.resolve() != key.require().resolve()]:
        raise UsageError(f"the page shows one key, and --serves names {others[0]} besides", "give one, with --key")
    unlocked = key.open()
    from milkglass.client.codec.codec import codec_of
    from milkglass.client.key.generate import scheme_of
    from milkglass.monitor.app import MonitorPage
    from milkglass.monitor.attacker import LiveAttacker
    from milkglass.proxy.run import run

    codec = codec_of(unlocked, key.model)
    attacker = None
    if attack:
        attacker = LiveAttacker(original(key.model or unlocked.key.info.model), unlocked.key, codec, text, seconds)
    page = MonitorPage(key.key, attacker, scheme_of(unlocked.key).broken or "")

    def ready(url: str, models: list[str]) -> None:
        base = reached(url, endpoint.cert)
        page.opening.renewed = lambda code: say(f"milkglass ui: it is open; for another tab open {base}/#{code}")
        say(f"milkglass ui: open {base}/#{page.opening.code}")
        note(f"applications: {endpoint.client(url, address)}; models: {', '.join(models)}")

    try:
        run([(unlocked, codec)], upstream, names, address, ready, note, page)
    except KeyboardInterrupt:
        note_apart("interrupted")
        leave(INTERRUPTED)
    leave(0)  # where Ctrl-C is ignored, the server alone has heard it


def leave(code: int) -> None:
    """End the command without waiting for an attack, one step of which can take minutes."""
    from milkglass.monitor.attacker import attacking

    if attacking():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)

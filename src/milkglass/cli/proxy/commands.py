"""`milkglass proxy`: any program that speaks OpenAI's API, in front of any engine that serves a scrambled model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milkglass.cli.ui.options import KeyOptions, ServerOptions, read_token, require_file, with_options
from milkglass.cli.ui.terminal import note, say
from milkglass.errors import UsageError
from milkglass.system import is_loopback


@with_options
def proxy(
    engine: Annotated[
        str, typer.Option("--engine", help="What serves the model: milkglass, vllm, sglang or llamacpp.")
    ] = "milkglass",
    serves: Annotated[
        list[str] | None,
        typer.Option("--serves", help="A model's name at the engine; repeatable.  [default: all that are of this key]"),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 8422,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="A file with what applications must give as their API key.  [default: any, from this machine alone]",
        ),
    ] = None,
    *,
    key: KeyOptions,
    server: ServerOptions,
) -> None:
    """Answer OpenAI's API on this machine: text in front, scrambled ids behind.

    Point an application's base URL at it, such as http://127.0.0.1:8422/v1. What cannot be kept private is refused.
    """
    if not is_loopback(host) and api_key_file is None:
        raise UsageError(
            f"listening on {host} without an API key would let anyone there use your key", "give --api-key-file"
        )
    if api_key_file is not None:
        require_file(api_key_file, "write a long random word into it")
    token = None if api_key_file is None else read_token(api_key_file)
    if token == "":
        raise UsageError(f"{api_key_file} is empty", "write a long random word into it")
    from milkglass.engines.catalogue import ENGINES
    from milkglass.engines.upstream import Upstream

    upstream = Upstream(
        ENGINES[engine], server.server, read_token(server.token_file), server.allow_http, server.certificate
    )
    unlocked = key.open()
    from milkglass.client.session import codec_of
    from milkglass.proxy.run import run

    def ready(url: str, models: list[str]) -> None:
        say(f"milkglass proxy: listening on {url}/v1; models: {', '.join(models)}")
        note('next: OpenAI(base_url="' + url + '/v1", api_key="any")')

    run(unlocked, codec_of(unlocked, key.model), upstream, serves or (), host, port, token, ready, note)

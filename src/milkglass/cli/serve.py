"""`milkglass serve`: train and serve scrambled models. Needs no key and no tokenizer, and must never have them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from milkglass.cli.ui.options import read_token
from milkglass.cli.ui.terminal import note
from milkglass.cli.ui.tls import TlsCertificate, TlsKey, require_private, require_tls
from milkglass.errors import UsageError


def serve(
    home: Annotated[Path, typer.Option(help="The folder that holds everything the server keeps.")] = Path(
        "milkglass-server"
    ),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 8420,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the token  [default: made in HOME/token]")
    ] = None,
    cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    base_models: Annotated[
        list[str] | None,
        typer.Option(
            "--base-models",
            help="Original models that deltas are assembled with: folders, hub ids (hf:owner/name), demo:minilm or "
            "demo:smollm2; repeatable.",
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Keep all that the server sees there, as transcripts for `milkglass audit`.")
    ] = None,
    insecure_http: Annotated[
        bool, typer.Option("--insecure-http", help="Listen on a network without TLS: anyone there can read the token.")
    ] = False,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The largest number of tokens that a request may ask for.")
    ] = None,
    max_loaded_models: Annotated[int | None, typer.Option(min=1, help="Models kept in memory.")] = None,
    max_batch: Annotated[int | None, typer.Option(min=1, help="Requests that share a forward pass.")] = None,
    prefix_cache_mb: Annotated[
        int | None,
        typer.Option(
            "--prefix-cache-mb",
            min=0,
            help="Memory for what the next turn of a chat begins with, in MiB; 0: off  [default: 512]",
        ),
    ] = None,
    quota_gb: Annotated[
        float | None, typer.Option("--quota-gb", help="Disk that HOME may take, in GB  [default: what its disk has]")
    ] = None,
    training_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of a training job.")] = None,
) -> None:
    """Start the server. It prints its address when it is ready; the token is in HOME/token, or in --token-file."""
    require_private(host, cert, insecure_http, "the token")
    require_tls(cert, tls_key)
    bases = tuple(map(_base_of, base_models or ()))
    limits: dict[str, Any] = {
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "max_loaded_models": max_loaded_models,
        "max_batch": max_batch,
        "quota": None if quota_gb is None else int(quota_gb * 1e9),
        "training_threads": training_threads,
        "prefix_cache": None if prefix_cache_mb is None else prefix_cache_mb << 20,
    }
    from milkglass.server.app import serve as run
    from milkglass.server.settings import ServerSettings

    settings = ServerSettings(
        home=home.resolve(),
        host=host,
        port=port,
        token=None if token_file is None else read_token(token_file),
        tls_certificate=cert,
        tls_key=tls_key,
        record=None if record is None else record.resolve(),
        base_models=bases,
        **{name: value for name, value in limits.items() if value is not None},
    )
    token = token_file or home.resolve() / "token"
    run(settings, lambda: note(f"home: {home.resolve()} (the token is in {token})"))


def _base_of(ref: str) -> Path:
    """The folder of a base model, or of several. Raises UsageError, ModelNotFound."""
    from milkglass.models.resolve import HUB, resolve

    if (folder := Path(ref)).is_dir():
        return folder.resolve()
    if ref.startswith(("demo:", HUB)):
        return resolve(ref)
    raise UsageError(
        f"there is no folder {ref}", "give folders of original models, hub ids (hf:owner/name), or demo:minilm"
    )

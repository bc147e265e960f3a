"""`milkglass serve`: train and serve scrambled models. Needs no key and no tokenizer, and must never have them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from milkglass.cli.ui.options import command_line_options, read_token, refuse_unused
from milkglass.cli.ui.terminal import note
from milkglass.cli.ui.tls import TlsCertificate, TlsKey, check_tls_files, require_tls_or_loopback
from milkglass.errors import UsageError
from milkglass.server.settings import Limits, require_token
from milkglass.system import is_loopback

ATTESTED_OPTIONS = frozenset({
    "attested", "host", "port", "token_file", "cert", "tls_key", "in_front_of", "software", "gpus", "collateral",
    "receive", "receive_from",
})  # fmt: skip


def serve(
    context: typer.Context,
    home: Annotated[Path, typer.Option(help="The folder that holds everything the server keeps.")] = Path(
        "milkglass-server"
    ),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 8420,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="A file with the token  [default: made in HOME/token; with --attested: no token]"
        ),
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
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of a prompt.")] = None,
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
    attested: Annotated[
        bool, typer.Option("--attested", help="Give evidence of this confidential machine for the TLS key.")
    ] = False,
    in_front_of: Annotated[
        str | None,
        typer.Option(
            "--in-front-of", help="With --attested: hand requests to this engine, such as http://127.0.0.1:8000."
        ),
    ] = None,
    software: Annotated[
        bool, typer.Option("--software", help="With --attested: use simulated evidence, which proves nothing.")
    ] = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="With --attested: evidence of NVIDIA GPUs, too.")] = False,
    collateral: Annotated[
        Path | None,
        typer.Option(help="With --attested: the hardware makers' signed files, handed out with the evidence."),
    ] = None,
    receive: Annotated[
        Path | None,
        typer.Option(
            help="With --attested: a folder for files that a client releases to this machine, sealed to it. At most 64 "
            "files of 256 MiB; none is replaced."
        ),
    ] = None,
    receive_from: Annotated[
        str | None,
        typer.Option(
            metavar="SHA256",
            help="With --receive: SHA-256 of the token of who may release files. The host may know this "
            "digest, but not the token.",
        ),
    ] = None,
) -> None:
    """Start the server. It prints its address when it is ready; the token is in HOME/token, or in --token-file."""
    if attested:
        refuse_unused("with --attested", command_line_options(context, ignored_names=ATTESTED_OPTIONS))
        if (receive is None) != (receive_from is None):
            raise UsageError(
                "--receive and --receive-from belong together: anybody can seal a file to this machine",
                "give the folder, and the digest that `sha256sum release.token` prints",
            )
        release_settings = None if receive is None or receive_from is None else (receive, receive_from)
        _serve_attested(
            FrontAddress(host, port, cert, tls_key),
            in_front_of,
            software,
            gpus,
            collateral,
            release_settings,
            token_file,
        )
        return
    attested_options = {
        "--in-front-of": in_front_of, "--software": software, "--gpus": gpus, "--collateral": collateral,
        "--receive": receive, "--receive-from": receive_from,
    }  # fmt: skip
    refuse_unused("without --attested", attested_options)
    require_tls_or_loopback(host, cert, insecure_http, "the token")
    check_tls_files(cert, tls_key)
    base_folders = tuple(map(_base_folder, base_models or ()))
    optional_limits: dict[str, Any] = {
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "max_loaded_models": max_loaded_models,
        "max_batch": max_batch,
        "quota": None if quota_gb is None else int(quota_gb * 1e9),
        "training_threads": training_threads,
        "prefix_cache": None if prefix_cache_mb is None else prefix_cache_mb << 20,
    }
    from milkglass.server.app import serve as run_server
    from milkglass.server.settings import ServerSettings

    settings = ServerSettings(
        home=home.resolve(),
        host=host,
        port=port,
        token=None if token_file is None else read_token(token_file),
        tls_certificate=cert,
        tls_key=tls_key,
        record=None if record is None else record.resolve(),
        base_models=base_folders,
        **{name: value for name, value in optional_limits.items() if value is not None},
    )
    token_path = token_file or home.resolve() / "token"
    run_server(settings, lambda: note(f"home: {home.resolve()} (the token is in {token_path})"))


def _base_folder(ref: str) -> Path:
    """Returns the folder that holds one base model or several. Raises UsageError or ModelNotFound if there is none."""
    from milkglass.models.resolve import HUB_PREFIX, resolve_model

    if (folder := Path(ref)).is_dir():
        return folder.resolve()
    if ref.startswith(("demo:", HUB_PREFIX)):
        return resolve_model(ref)
    raise UsageError(
        f"there is no folder {ref}", "give folders of original models, hub ids (hf:owner/name), or demo:minilm"
    )


@dataclass(frozen=True)
class FrontAddress:
    """Says where an attested server listens, and with which certificate and limits.

    Attributes:
        host: the name or address of the interface to listen on.
        port: 0 takes any free port.
        tls_certificate: a PEM file. None: none was given, which `_serve_attested` refuses.
        tls_key: the certificate's key.
        connections: limits of connections and requests.
    """

    host: str
    port: int
    tls_certificate: Path | None
    tls_key: Path | None
    connections: Limits = Limits()


def _serve_attested(
    address: FrontAddress, engine: str | None, is_simulated: bool, with_gpus: bool, collateral: Path | None,
    release_settings: tuple[Path, str] | None, token_file: Path | None,
) -> None:  # fmt: skip
    """Serves evidence for the TLS key, and forwards requests to an engine on this machine.

    Args:
        address: where the server listens, and its certificate.
        engine: the engine's address, on this machine. None: there is no engine.
        is_simulated: whether the evidence comes from software, which proves nothing.
        with_gpus: whether the evidence covers NVIDIA GPUs too.
        collateral: the folder of the hardware makers' signed files, which are handed out with the evidence.
        release_settings: the folder for released files, and the digest of their sender's token. None: no file is
            accepted.
        token_file: holds the token that requests to the engine need. None: they need none.

    Raises:
        UsageError: there is no certificate, or the engine is not on this machine.
    """
    if address.tls_certificate is None:
        raise UsageError(
            "--attested needs --cert and --tls-key: evidence is bound to the TLS key",
            "make them inside the machine, so that the key never leaves it",
        )
    check_tls_files(address.tls_certificate, address.tls_key)
    if engine is not None and not is_loopback(urlsplit(engine).hostname or ""):
        raise UsageError(f"{engine} is not on this machine", "the engine must listen on 127.0.0.1, inside the machine")
    token = None if token_file is None else require_token(read_token(token_file) or "")
    from milkglass.attest import passthrough
    from milkglass.attest.claims import NOT_ATTESTED
    from milkglass.attest.front import AttestationGateway, spki_digest_of_file
    from milkglass.attest.sealing import ReleaseInbox
    from milkglass.attest.sources import EvidenceSource, Software, Tsm, collateral_reader, read_nvml_evidence
    from milkglass.server import process

    hardware = Software() if is_simulated else Tsm()
    inbox = None if release_settings is None else ReleaseInbox.new(*release_settings)
    sealing_key = b"" if inbox is None else inbox.public_key
    source = EvidenceSource(
        hardware, read_nvml_evidence if with_gpus else None, sealing_key, collateral_reader(collateral)
    )
    spki_digest = spki_digest_of_file(address.tls_certificate)
    source.evidence(
        spki_digest, bytes(32)
    )  # fails here, and not at the first request, if the machine gives no evidence
    if is_simulated:
        note(NOT_ATTESTED)
    process.prepare()
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs each forwarded request
    front = AttestationGateway(source, spki_digest, engine, inbox, address.connections, token)
    process.run(
        front.app(),
        address,
        "serve --attested" if front.is_attested else f"serve --attested ({passthrough.NOT_ATTESTED})",
    )

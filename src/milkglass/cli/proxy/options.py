"""Options of `proxy` and `ui`: which engine stands behind, and where applications find it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass.cli.ui.options import ServerOptions, read_token, require_file
from milkglass.cli.ui.tls import TlsCertificate, TlsKey, require_private, require_tls
from milkglass.errors import UsageError
from milkglass.system import is_loopback

if TYPE_CHECKING:
    from milkglass.engines.upstream import Upstream
    from milkglass.proxy.run import Door


@dataclass(frozen=True)
class EndpointOptions:
    """What stands behind the proxy, and how it is reached."""

    engine: Annotated[
        str, typer.Option("--engine", help="What serves the model: milkglass, vllm, sglang or llamacpp.")
    ] = "milkglass"
    serves: Annotated[
        list[str] | None,
        typer.Option("--serves", help="A model's name at the engine; repeatable.  [default: all that this key made]"),
    ] = None
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 8422
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="A file with what applications must give as their API key.")
    ] = None

    cert: TlsCertificate = None
    tls_key: TlsKey = None
    insecure_http: Annotated[
        bool,
        typer.Option(
            "--insecure-http", help="Listen on a network without TLS: anyone there can read texts and the API key."
        ),
    ] = False

    def door(self, token: str | None = None) -> Door:
        """Where applications come in. token: the API key where --api-key-file names none. Raises UsageError for what
        would let a network read or use it, and for files that are not a certificate and its key."""
        if not is_loopback(self.host) and self.api_key_file is None:
            raise UsageError(
                f"listening on {self.host} without an API key would let anyone there use your key",
                "give --api-key-file",
            )
        require_private(self.host, self.cert, self.insecure_http, "texts, answers and the API key")
        require_tls(self.cert, self.tls_key)
        if self.api_key_file is not None:
            require_file(self.api_key_file, "write a long random word into it")
            token = read_token(self.api_key_file)
            if not token:
                raise UsageError(f"{self.api_key_file} is empty", "write a long random word into it")
        from milkglass.proxy.run import Door

        return Door(self.host, self.port, token, self.cert, self.tls_key)

    def upstream(self, server: ServerOptions) -> Upstream:
        from milkglass.engines.catalogue import ENGINES
        from milkglass.engines.upstream import Upstream

        if server.server.rstrip("/").endswith("/v1"):
            raise UsageError(
                f"--server {server.server} ends with /v1", "give the address alone: /v1 is the proxy's own"
            )
        token = read_token(server.token_file)
        return Upstream(ENGINES[self.engine], server.server, token, server.allow_http, server.certificate)

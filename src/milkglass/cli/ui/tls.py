"""The TLS options of a server or a proxy, and checks of its certificate and key before it listens."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from milkglass.cli.ui.options import require_file
from milkglass.errors import UsageError
from milkglass.system import is_loopback

CERTIFICATE_HINT = (
    "`openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=HOST -addext subjectAltName=DNS:HOST -keyout "
    "key.pem -out cert.pem` makes them"
)
TlsCertificate = Annotated[Path | None, typer.Option("--cert", help=f"The TLS certificate (PEM). {CERTIFICATE_HINT}.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="The TLS key (PEM).")]


def require_tls_or_loopback(host: str, cert: Path | None, accepts_http: bool, secrets_text: str) -> None:
    """Raises UsageError for a network address without TLS, unless the user accepted that.

    Args:
        secrets_text: names what others could read, for the message.
    """
    if not is_loopback(host) and cert is None and not accepts_http:
        raise UsageError(
            f"listening on {host} without TLS would let anyone on the way read {secrets_text}",
            f"give --cert and --tls-key ({CERTIFICATE_HINT}), listen on 127.0.0.1 behind an ssh tunnel, or accept it "
            "with --insecure-http",
        )


def check_tls_files(cert: Path | None, key: Path | None) -> None:
    """Raises UsageError if the files are not a certificate and its key, or only one of them is set."""
    for file in (cert, key):
        if file is not None:
            require_file(file, "give the TLS certificate and key as PEM files")
    if cert is not None and key is not None:
        _require_pair(cert, key)
    elif cert is not None or key is not None:
        raise UsageError("TLS needs both a certificate and a key", f"give both files, or neither; {CERTIFICATE_HINT}")


def _require_pair(cert: Path, key: Path) -> None:
    """Raises UsageError if the files are not a certificate and its key.

    A key under a passphrase is accepted without a check: OpenSSL asks for the passphrase when the server starts.
    """
    import ssl

    def refuse_passphrase() -> str:
        raise PermissionError  # without an errno, by which it differs from a file that may not be read

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cert)
    except ssl.SSLError:
        raise UsageError(f"{cert} holds no certificate", "give the server's certificate, as PEM") from None
    try:
        context.load_cert_chain(cert, key, refuse_passphrase)
    except PermissionError as error:
        if error.errno is not None:
            raise
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"{key} is not the key of {cert}", "give the key that the certificate is for") from None
        raise UsageError(f"{key} holds no key", "give the certificate's private key, as PEM") from None


def client_url(url: str, cert: Path | None) -> str:
    """Returns the address at which clients reach a server that listens at `url`.

    If the server listens on all addresses, the host is the name in its certificate, or else this machine's name.
    """
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    name = (None if cert is None else _certificate_host(cert)) or socket.gethostname()
    return f"{parts.scheme}://{f'[{name}]' if ':' in name else name}:{parts.port}"


def _certificate_host(cert: Path) -> str | None:
    """Returns the first host name of a certificate that has no wildcard, else its first IP address, else None."""
    from cryptography import x509

    try:
        extensions = x509.load_pem_x509_certificates(cert.read_bytes())[0].extensions
        alternatives = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return None
    host_names = [name for name in alternatives.get_values_for_type(x509.DNSName) if "*" not in name]
    return next(iter([*host_names, *map(str, alternatives.get_values_for_type(x509.IPAddress))]), None)

"""`attest release` to a job, by the commands as they are, and to servers whose evidence covers no sealing key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from milkglass.attest import sealing
from milkglass.attest.channel import RELEASE_PATH
from milkglass.attest.evidence import SOFTWARE_PREFIX, HardwareEvidence
from milkglass.attest.front import spki_digest_of_file
from milkglass.attest.providers import EVIDENCE_PATH
from milkglass.attest.sealing import ReleaseInbox
from tests.attest.programs import command, serving
from tests.attest.test_channel import Authority
from tests.cli.kit import call

TOKEN = "f" * 64
SENDER = hashlib.sha256(TOKEN.encode()).hexdigest()


def policy_of(folder: Path, port: str, more: str = "") -> Path:
    path = folder / "policy.toml"
    path.write_text(f'version = 1\nserver = "https://localhost:{port}"\nkinds = ["software"]\n{more}')
    return path


def test_a_file_is_released_once_by_its_sender_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issued("server")
    (tmp_path / "release.token").write_text(TOKEN + "\n")
    (tmp_path / "other.token").write_text("e" * 64)
    (tmp_path / "short.token").write_text("e" * 31)
    (tmp_path / "my.mgkey").write_bytes(b"the owner's")
    serve = ("serve", "--attested", "--software", "--cert", certificate, "--tls-key", key, "--port", 0)
    with command(tmp_path, "serve", *serve, "--receive", "got", "--receive-from", SENDER) as front:
        port = front.listening().rpartition(":")[2]
        policy = policy_of(tmp_path, port)

        def release(token: str, *more: object) -> Any:
            words = ("attest", "release", tmp_path / "my.mgkey", "--to", f"https://localhost:{port}")
            token_file = tmp_path / f"{token}.token"
            return call(
                *words, "--policy", policy, "--certificate", authority.file, "--token-file", token_file, *more
            )  # fmt: skip

        refused = release("other")
        assert (
            refused.exit_code == 6
            and "token" in refused.output
            and hashlib.sha256(b"e" * 64).hexdigest() in (refused.output.replace("\n", ""))
        )
        assert release("short").exit_code == 2 and not [*(tmp_path / "got").iterdir()]
        assert release("release").exit_code == 0
        assert (tmp_path / "got" / "my.mgkey").read_bytes() == b"the owner's"
        (tmp_path / "my.mgkey").write_bytes(b"another")
        again = release("release")
        assert again.exit_code == 7 and "--name" in again.output
        assert (tmp_path / "got" / "my.mgkey").read_bytes() == b"the owner's"
        second = release("release", "--name", "second")
        assert second.exit_code == 0 and "second is released to" in second.output, second.output
        assert "NOT ATTESTED" in second.stdout, "also in the line of the result"
        assert (tmp_path / "got" / "second").read_bytes() == b"another"
        assert TOKEN not in front.said


def test_receiving_needs_a_sender(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issued("server")
    serve = ("serve", "--attested", "--software", "--cert", certificate, "--tls-key", key, "--port", 0)
    for words in (("--receive", tmp_path / "got"), ("--receive-from", SENDER),
                  ("--receive", tmp_path / "got", "--receive-from", TOKEN[1:])):  # fmt: skip
        found = call(*serve, *words)
        assert found.exit_code == 2, found.output
    assert call("serve", "--receive-from", SENDER).exit_code == 2


@contextmanager
def impostor(certificate: Path, key: Path, sealing_key: bytes, form: str, sent: list[bytes]) -> Iterator[str]:
    """A server whose evidence binds its TLS key in another form, which covers nothing of the sealing key it names."""
    spki = spki_digest_of_file(certificate)

    async def evidence(request: Request) -> Response:
        nonce = bytes.fromhex(request.query_params["nonce"])
        found = HardwareEvidence(
            "software", SOFTWARE_PREFIX + spki + bytes(32), {}, form, spki, nonce, sealing_key=sealing_key
        )  # type: ignore[arg-type]
        return Response(found.document())

    async def taken(request: Request) -> Response:
        sent.append(await request.body())
        return Response()

    app = Starlette(routes=[Route(EVIDENCE_PATH, evidence), Route(RELEASE_PATH, taken, methods=["POST"])])
    with serving(app, ssl_certfile=certificate, ssl_keyfile=key) as port:
        yield str(port)


@pytest.mark.parametrize("form", ["tinfoil", "aci", "none"])
@pytest.mark.parametrize("command_name", ["check", "pin"])
def test_a_server_does_not_choose_the_form_by_which_it_is_judged(command_name: str, form: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issued("server")
    with impostor(certificate, key, b"", form, []) as port:
        policy = policy_of(tmp_path, port)
        words = ("--policy", policy, "--certificate", authority.file)
        found = call("attest", command_name, f"https://localhost:{port}", *words)
        assert found.exit_code == 8 and form in found.output and "is asked for" in " ".join(found.output.split())
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize("form", ["tinfoil", "aci", "none"])
def test_nothing_is_sealed_to_a_key_that_the_hardware_did_not_sign(form: str, tmp_path: Path) -> None:
    """The policy holds for the machine, and any key could stand beside this evidence."""
    authority = Authority(tmp_path)
    certificate, key = authority.issued("server")
    (tmp_path / "release.token").write_text(TOKEN)
    (tmp_path / "my.mgkey").write_bytes(b"the owner's")
    stranger, sent = ReleaseInbox.new(tmp_path / "stranger", SENDER), list[bytes]()
    with impostor(certificate, key, stranger.public_key, form, sent) as port:
        accepted = "".join(f'{name} = "a trial"\n' for name in ("not-fresh", "unbound"))
        policy = policy_of(tmp_path, port, f"[accept]\n{accepted}")
        words = ("--to", f"https://localhost:{port}", "--certificate", authority.file, "--token-file")
        words = ("attest", "release", tmp_path / "my.mgkey", "--policy", policy, *words, tmp_path / "release.token")
        found = call(*words)
        assert found.exit_code == 8 and not sent
        assert "form" in found.output, found.output
        policy.write_text(policy.read_text().replace("kinds", 'evidence = "tinfoil"\nkinds'))
        found = call(*words)
        assert found.exit_code == 2 and "no sealing key" in " ".join(found.output.split())
    assert sealing.MAX_FILE_BYTES == 256 << 20, "docs/attested.md and the help say so"

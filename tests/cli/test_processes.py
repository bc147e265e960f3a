"""The command line and the real server as processes of their own, killed and interrupted as people do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import write_key
from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.remote.remote import Remote, Sampling
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny, warm

MILKGLASS = (sys.executable, "-m", "milkglass.cli.main")
PASSPHRASE = "correct horse battery"
SECRET = "zanzibar"
READY = "milkglass serve: listening on "
SERVER = """
import sys
from pathlib import Path
from milkglass.server.app import serve
from milkglass.server.settings import ServerSettings
serve(ServerSettings(home=Path(sys.argv[1]), port=int(sys.argv[2]), chunk_bytes=4096))
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MILKGLASS_PASSPHRASE": PASSPHRASE, **more}


def of_a_server() -> dict[str, str]:
    """The environment without the client's passphrase."""
    return {name: value for name, value in environment().items() if name != "MILKGLASS_PASSPHRASE"}


class Server:
    """One server process at a time on one home and port. Without a command of its own it is forked."""

    def __init__(self, home: Path, command: tuple[str, ...] = (), scheme: str = "http") -> None:
        self.home, self.command = home, command
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = self.command or (sys.executable, "-c", SERVER, str(self.home), str(self.port))
        if self.command:
            command = (*self.command, "--home", str(self.home), "--port", str(self.port))
        log = self.home.with_suffix(".log").open("ab")
        start: Any = subprocess.Popen if self.command else warm.Popen
        self.process = start(command, stdout=subprocess.PIPE, stderr=log, text=True, env=of_a_server())
        log.close()
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(READY), self.home.with_suffix(".log").read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()


def run(*words: object, stdin: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """A command, forked: what only a new interpreter shows does not matter here."""
    return warm.run([*MILKGLASS, *map(str, words)], input=stdin, timeout=600, env=environment(**more))


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Codec]:
    """A folder with model/, scrambled/ and owner.mgkey, and the key's codec."""
    folder = tmp_path_factory.mktemp("owner")
    base = Checkpoint.open(tiny.save("llama-tied", folder / "model"))
    key = new_key(base, str(folder / "model"), ObfusLM(k=4, beta=0.9), base.digest())
    write_key(folder / "owner.mgkey", key, PASSPHRASE, scrypt_n=2)
    scramble(base, key, folder / "scrambled")
    return folder, Codec.open(key, folder / "model")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    made = Server(tmp_path / "server")
    yield made
    if made.process.poll() is None:
        made.stop()


def test_help_and_version_load_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['milkglass', {!r}]\nfrom milkglass.cli.main import main\ntry: main()\nfinally: "
    code += "print([m for m in ('torch', 'numpy', 'transformers', 'rich', 'httpx2', 'pydantic') if m in sys.modules])"
    for word, expected in (("--help", "obfuscate"), ("--version", "milkglass 0.")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(word)], capture_output=True, text=True, timeout=600, check=False
        )
        assert expected in done.stdout and done.stdout.rstrip().endswith("[]"), done


@pytest.mark.parametrize("module", ["milkglass.client.remote.remote", "milkglass.client.key.file"])
def test_what_needs_no_model_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "[]"


def test_commands_without_a_model_load_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """`job --key` opens the key, and finds no server."""
    key = tmp_path / "k"
    base = Checkpoint.open(tiny.save("bert", tmp_path / "model"))
    write_key(key, new_key(base, "x", ObfusLM(k=4, beta=0.9), base.digest()), PASSPHRASE, scrypt_n=2)
    (tmp_path / "t.csv").write_text("text,label\nfine,a\nbad,b\n")
    nowhere = ("--server", "http://127.0.0.1:9")
    for words, expected in (
        (("key", "status", key), "no measured budget yet"),
        (("data", tmp_path / "t.csv", "--out", tmp_path / "t.jsonl"), "2 rows"),
        (("job", "ftjob-1", "--follow", "--key", key, *nowhere), "does not answer"),
        (("models", *nowhere), "does not answer"),
    ):
        code = f"import sys; sys.argv = {['milkglass', *map(str, words)]!r}\nfrom milkglass.cli.main import main\n"
        code += "try: main()\nfinally: print([m for m in ('torch', 'transformers') if m in sys.modules])"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False,
            env=environment(MILKGLASS_PASSPHRASE=PASSPHRASE),
        )  # fmt: skip
        assert expected in done.stdout + done.stderr and done.stdout.rstrip().endswith("[]"), done


def test_a_reader_that_has_enough_is_no_error(owner: tuple[Path, Codec]) -> None:
    """In a new interpreter: what a pipe holds back is written when it ends."""
    folder, _ = owner
    lines = "the nurse called\n" * 20_000
    command = f"{sys.executable} -m milkglass.cli.main encode --key {folder / 'owner.mgkey'} | head -1"
    done = subprocess.run(
        ["bash", "-c", command], input=lines, capture_output=True, text=True, timeout=600, env=environment(), check=True
    )
    assert len(done.stdout.splitlines()) == 1 and "Traceback" not in done.stderr


def test_ctrl_c_ends_with_130(owner: tuple[Path, Codec]) -> None:
    """While it reads: the first line is answered, so it is surely at work."""
    folder, _ = owner
    command = [*MILKGLASS, "decode", "--key", str(folder / "owner.mgkey")]
    pipe = subprocess.PIPE
    with warm.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment()) as process:
        process.stdin.write("[5]\n")
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == "interrupted\n"


def test_a_server_refuses_to_hold_a_passphrase(tmp_path: Path) -> None:
    done = run("serve", "--home", tmp_path / "home", "--port", 0)
    assert done.returncode == 2 and not (tmp_path / "home").exists()
    assert "the server must not hold a passphrase" in done.stderr
    assert "env -u MILKGLASS_PASSPHRASE milkglass serve" in done.stderr
    assert PASSPHRASE not in done.stderr and READY not in done.stdout


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "milkglass test")])
    now, day = datetime.now(UTC), timedelta(days=1)
    here = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    made = made.add_extension(here, critical=False).add_extension(x509.BasicConstraints(True, None), critical=True)
    certificate, secret = folder / "cert.pem", folder / "tls.key"
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate, secret


def test_tls_with_a_certificate_that_the_server_signed_itself(tmp_path: Path) -> None:
    certificate, secret = self_signed(tmp_path)
    command = (*MILKGLASS, "serve", "--cert", str(certificate), "--tls-key", str(secret))
    server = Server(tmp_path / "server", command, "https")
    try:
        ask = ("models", "--server", server.url, "--token-file", server.home / "token")
        trusted = run(*ask, "--certificate", certificate, "--json")
        assert trusted.returncode == 0, trusted.stderr
        assert json.loads(trusted.stdout)
        refused = run(*ask)
        assert refused.returncode == 6 and "its certificate is not trusted here" in refused.stderr
    finally:
        server.stop()


def test_an_upload_outlives_a_killed_server(server: Server, owner: tuple[Path, Codec]) -> None:
    folder, codec = owner
    killed: list[int] = []

    def progress(name: str, total: int) -> object:
        sent = 0

        def tell(done: int) -> None:
            nonlocal sent
            sent += done
            if sent > total // 2 and not killed:
                killed.append(sent)
                server.stop(signal.SIGKILL)
                server.start()

        return tell

    with Remote(server.url, server.token) as remote:
        assert remote.upload_model(folder / "scrambled", "mine", progress) == "mine"  # type: ignore[arg-type]
        assert killed
        stored = server.home / "models" / "mine" / "model.safetensors"
        assert stored.read_bytes() == (folder / "scrambled" / "model.safetensors").read_bytes()
        assert len(list((server.home / "files").iterdir())) == 1
        prompt = codec.encode_chat([{"role": "user", "content": "hello"}])
        sampling = Sampling(max_tokens=6)
        streamed = [one for part in remote.generate("mine", prompt, sampling) for one in part]
        assert streamed == remote.complete("mine", [prompt], sampling)[0] and 1 <= len(streamed) <= 6

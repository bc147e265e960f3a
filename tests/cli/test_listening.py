"""Every command that listens, with more connections before it than it may open files: it answers, and its log stays
small."""

from __future__ import annotations

import ast
import re
import resource
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from milkglass.client.key.file import write_key
from milkglass.schemes.orthogonal import Orthogonal
from tests import tiny, warm
from tests.cli.test_processes import PASSPHRASE, environment, of_a_server, self_signed
from tests.hidden_states.kit import base
from tests.proxy.kit import Scrambled
from tests.server.kit import TOKEN, register
from tests.server.real import Server
from tests.server.test_connections import HEAD, closed
from tests.split.kit import made

SOURCE = Path(__file__).parents[2] / "src" / "milkglass"
STARTED = """
import resource, sys
from milkglass.cli.main import main
soft, hard = int(sys.argv.pop(1)), int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
main()
"""
MANY = 1100
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@dataclass(frozen=True)
class Way:
    """A command that listens.

    Attributes:
        words: of its command line, without the port.
        open: an address that needs no key.
        owner: whether it holds a key, and so takes the passphrase.
        certificate: where it speaks TLS.
    """

    words: tuple[str, ...]
    open: str = "/health"
    owner: bool = False
    certificate: Path | None = None

    def over_tls(self, folder: Path) -> Way:
        certificate, secret = self_signed(folder)
        words = (*self.words, "--cert", str(certificate), "--tls-key", str(secret))
        return replace(self, words=words, certificate=certificate)


@dataclass
class Door:
    """A command that runs, and the connections that are held before it."""

    way: Way
    port: int
    log: Path
    held: list[socket.socket] = field(default_factory=list)

    @property
    def context(self) -> ssl.SSLContext | None:
        found = self.way.certificate
        return None if found is None else ssl.create_default_context(cafile=str(found))

    def hold(self, count: int) -> None:
        """So many more connections: every second one says nothing, the others half a request."""
        for number in range(count):
            one = socket.create_connection(("127.0.0.1", self.port), timeout=30)
            try:
                if self.context is not None and number % 4:
                    one = self.context.wrap_socket(one, server_hostname="127.0.0.1")
                if number % 2:
                    one.sendall(HEAD)
            except OSError:  # it was closed for a newer one
                pass
            self.held.append(one)

    def answers(self, patience: float = 60.0) -> float:
        """Seconds until the open address was answered."""
        began = time.monotonic()
        scheme, verify = ("http", True) if self.context is None else ("https", self.context)
        with httpx2.Client(timeout=patience, verify=verify, trust_env=False) as client:
            answer = client.get(f"{scheme}://127.0.0.1:{self.port}{self.way.open}")
        assert answer.status_code == 200, answer.text
        return time.monotonic() - began


@contextmanager
def started(way: Way, files: tuple[int, int], log: Path) -> Iterator[Door]:
    """The command as a process that may open so many files, by the soft and by the hard limit."""
    command = [sys.executable, "-c", STARTED, *map(str, files), *way.words, "--port", "0"]
    variables = {**(environment() if way.owner else of_a_server()), "MILKGLASS_TOKEN": TOKEN}
    with (
        log.open("wb") as err,
        warm.Popen(command, stdout=-1, stderr=err, text=True, env=variables) as process,
        ExitStack() as stack,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"https?://127\.0\.0\.1:([0-9]+)", line)
            assert found, log.read_text()
            door = Door(way, int(found[1]), log)
            yield door
            for one in door.held:
                stack.enter_context(one)
        finally:
            process.terminate()
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Way]]:
    root = tmp_path_factory.mktemp("ways")
    model = Scrambled.of(root / "model", scheme=Orthogonal())
    write_key(root / "k.mgkey", model.key, PASSPHRASE, scrypt_n=2)
    half = made("dp-forward", base(root / "bert"), root / "halves")
    (root / "token").write_text(TOKEN)
    with Server(root / "home", in_thread=True) as engine, engine.client() as client:
        register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        endpoint = ("--key", str(root / "k.mgkey"), "--server", engine.url)
        split = ("split", "serve", "--home", str(root / "split-home"))
        yield {
            "serve": Way(("serve", "--home", str(root / "serve-home"))),
            "split serve": Way((*split, str(half.server), "--token-file", str(root / "token"))),
            "split serve, a decoder": Way((*split, str(tiny.save("llama-tied", root / "tied")))),
            "proxy": Way(("proxy", *endpoint), owner=True),
            "ui": Way(("ui", *endpoint, "--no-attack"), open="/", owner=True),
        }


EVERY = ["serve", "split serve", "split serve, a decoder", "proxy", "ui"]


@pytest.mark.parametrize("name", EVERY)
def test_more_connections_than_files_lock_nobody_out(name: str, ways: dict[str, Way], tmp_path: Path) -> None:
    """The hard limit, too, is below what is held: those that do nothing are closed for others."""
    with started(ways[name], (256, 256), tmp_path / "log") as door:
        for _ in range(3):
            door.hold(120)
            door.answers()
        assert closed(door.held[1]) and closed(door.held[2])
        assert door.log.stat().st_size < 100_000
        assert "Traceback" not in door.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("hard", [HARD, 1024], ids=["soft", "hard"])
@pytest.mark.parametrize(
    ("name", "tls"),
    [(name, tls) for name in EVERY for tls in (False, True) if not (tls and name.startswith("split"))],  # split: no TLS
)
def test_1100_connections_that_do_nothing(
    name: str, tls: bool, hard: int, ways: dict[str, Way], tmp_path: Path
) -> None:
    """For 45 seconds, with `ulimit -n 1024`, each answer comes within 2 s, or on a busy machine within ten times what
    it took before. All of the connections are closed after the deadline."""
    way = ways[name].over_tls(tmp_path) if tls else ways[name]
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if most == resource.RLIM_INFINITY else min(most, 4096), most))
    try:
        with started(way, (1024, hard), tmp_path / "log") as door:
            before = max(door.answers() for _ in range(5))
            door.hold(MANY)
            end, slowest = time.monotonic() + 45, 0.0
            while time.monotonic() < end:
                slowest = max(slowest, door.answers())
                time.sleep(0.5)
            assert all(closed(one) for one in door.held)
            assert slowest < max(2.0, 10 * before), f"{slowest:.2f} s; before the connections came {before:.2f} s"
            assert door.log.stat().st_size < 1 << 20
            assert "Traceback" not in door.log.read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def test_one_file_listens_and_every_command_uses_it() -> None:
    """A further command that listens belongs into `ways`, above."""
    binds, users = set(), set()
    for path in SOURCE.rglob("*.py"):
        tree, name = ast.parse(path.read_text("utf-8")), path.relative_to(SOURCE).as_posix()
        called = {_last(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        binds |= {name} if called & {"create_server", "start_server", "bind", "HTTPServer", "TCPServer"} else set()
        users |= {name} if "milkglass.server.process" in _modules(tree) else set()
    assert binds == {"server/process.py"}
    assert users == {
        *("server/app.py", "split/server.py", "split/decoder/app.py", "proxy/run.py"),
        "cli/split.py",  # what must hold before a server starts
    }


def _last(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _modules(tree: ast.AST) -> set[Any]:
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

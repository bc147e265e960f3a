from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from milkglass import system
from milkglass.system import is_loopback

SOURCE = Path(__file__).parents[2] / "src" / "milkglass"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["127.evil.example", "localhost.evil.example", "0.0.0.0", "::", "10.0.0.1", ""])
def test_another_machine(host: str) -> None:
    """The server's own test once took every name that begins with 127. for this machine."""
    assert not is_loopback(host)


STARTED = """
import ctypes, resource, sys
from milkglass.cli import main
main.app = lambda **_: print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE))
main.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_GET_DUMPABLE is Linux's")
@pytest.mark.parametrize(("allowed", "limit"), [("", "0 (0, 0)"), ("0", "0 (0, 0)"), ("1", "1")])
def test_no_command_leaves_a_core_dump_or_is_read_by_another_process(allowed: str, limit: str) -> None:
    """Every command begins in `main`; it says so before any of them runs."""
    environment = {**os.environ, "MILKGLASS_ALLOW_DEBUGGER": allowed}
    done = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, check=True, timeout=300, env=environment
    )
    assert done.stdout.startswith(limit)


def test_the_command_is_that_main() -> None:
    (command,) = entry_points(group="console_scripts", name="milkglass")
    assert command.value == "milkglass.cli.main:main"


NO_TEXT = {  # programs of the server, which has no text, no key and no passphrase; one that writes public data
    *("server/training.py", "demo/data/make.py"),
}
CLOSES = {"close_memory_unless_debugged", "close_memory", "lock_down"}  # `lock_down` is the enclave's, which is more


def test_every_program_and_worker_that_holds_text_is_closed() -> None:
    begun = set()
    for path in SOURCE.rglob("*.py"):
        text, name = path.read_text("utf-8"), path.relative_to(SOURCE).as_posix()
        if '__name__ == "__main__"' in text or "ProcessPoolExecutor(" in text:
            called = {node.func.id for node in ast.walk(ast.parse(text)) if is_call_by_name(node)}
            assert name in NO_TEXT or called & CLOSES, name
            begun.add(name)
    assert begun >= {*NO_TEXT, "cli/main.py", "models/template_worker.py", "enclave/program.py", "sanitizers/files.py"}


def is_call_by_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_threads_give_their_results_in_order_and_begin_nothing_more_after_a_failure() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError("the third")
        time.sleep(0.01 / (1 + number))  # later ones end sooner
        return number

    assert list(system.in_threads(work, [5, 0, 9, 1])) == [5, 0, 9, 1]
    begun.clear()
    with pytest.raises(ValueError, match="the third"):
        list(system.in_threads(work, [3, *range(4, 2000)]))
    assert len(begun) < 1000


def test_memory_that_is_free_goes_back_to_the_system() -> None:
    """In a process of its own: small pieces lie between others, so that the C library keeps them by itself."""
    program = """
import resource
from milkglass.system import release_memory

def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

pieces = [bytes(60_000) for _ in range(4000)]
kept = pieces[::64]
del pieces
before = resident()
release_memory()
print(before - resident(), len(kept))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    freed = int(done.stdout.split()[0])
    assert freed > 50_000_000

"""Python programs as processes that are forked from one which has imported torch and transformers: the imports take
seconds of processor time, a fork takes none. The code is the product's own, in a process of its own: it has an id, a
session, descriptors and an exit code, and is signalled and killed as any other.

What only a new interpreter shows is tested by `subprocess`: how it starts and ends, what it holds back before it writes
to a pipe (here lines are written at once), and variables that libraries read when they are imported (here they are
those of the tests)."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO, NoReturn

import pytest

from milkglass.cli.commands import COMMANDS
from milkglass.enclave import enclave
from milkglass.experiments import runs
from milkglass.server.jobs import worker as jobs
from milkglass.server.spec import ATTACHED_ARGUMENT

WORKER = "milkglass.server.training"
PRELOADED = [WORKER, "milkglass.cli.main", "milkglass.sanitizers.files", "milkglass.server.app", "milkglass.proxy.run"]
PRELOADED += [
    "milkglass.enclave.handler",
    "tests.warm",
    *sorted({f"milkglass.cli.{one.module}" for one in COMMANDS.values()}),
]
CONTEXT = multiprocessing.get_context
STARTED = runs.start_worker  # as the product starts a worker
COMMAND = str(Path(sys.executable).with_name("milkglass"))
SOURCES = Path(__file__).parents[1] / "src"
EXECV = os.execv
EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` of `python -m MODULE`, `python -c PROGRAM` or `python SCRIPT`, forked.

    pid_file: the process writes its id there before anything else, as the shell does with which the server starts one.
    """

    def __init__(self, command: Sequence[str], *, pid_file: str = "", **more: Any) -> None:
        self._pid_file = pid_file
        super().__init__(command, **more)

    def _execute_child(self, *given: Any) -> None:
        asked = _Asked.of(self, given, self._pid_file)
        begun, begins = CONTEXT("spawn").Pipe(duplex=False)
        self._process = _forks().Process(target=_inside, args=(asked, begins))
        try:
            self._process.start()
        finally:
            begins.close()
            asked.close(self)
        self.pid, self._child_created = self._process.pid or 0, True
        with begun, suppress(EOFError):
            begun.recv()  # it has its session and has written its id: whoever signals it reaches it

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with self._waitpid_lock:  # two threads that read the exit code at once would get half each
            if self.returncode is None:
                self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        connection.wait([self._process.sentinel], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return int(self.returncode)


def run(
    command: Sequence[str], *, input: str | None = None, timeout: float | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with text, of which both outputs are kept."""
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def milkglass(words: Sequence[str], environment: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """`milkglass WORDS` with this environment and no other, and without a terminal."""
    return run([sys.executable, "-m", "milkglass.cli.main", *words], env=environment, timeout=timeout)


# --- fixtures ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", autouse=True)
def warm_workers() -> Iterator[None]:
    """For a module or a conftest.py whose recipes train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "start_worker", _started)
        yield


@pytest.fixture(scope="module", autouse=True)
def warm_jobs() -> Iterator[None]:
    """For a module whose servers, in threads of the test, start the real worker."""
    with _forked_by(jobs):
        yield


@pytest.fixture(scope="module", autouse=True)
def warm_enclaves() -> Iterator[None]:
    """For a module of which no test asks what a new interpreter would hold or could not find behind a locked door."""
    with _forked_by(enclave):
        yield


@pytest.fixture(autouse=True)
def warm_enclaves_of_tests() -> Iterator[None]:
    """For a module whose fixture starts an enclave in a new interpreter; those of its tests are forked."""
    with _forked_by(enclave):
        yield


@pytest.fixture(scope="module", autouse=True)
def warm_pools() -> Iterator[None]:
    """For a module whose pools of workers do as much when they are forked as when they are spawned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda name: _forks() if name == "spawn" else CONTEXT(name))
        yield


def _started(job: Path, log: BinaryIO) -> Popen:
    command = [sys.executable, "-m", WORKER, str(job), ATTACHED_ARGUMENT]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)


@contextmanager
def _forked_by(module: ModuleType) -> Iterator[None]:
    """What this module of the product starts with `subprocess.Popen` is forked, where it is one of our programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": _popen}))
        yield


def _popen(command: Sequence[str], **more: Any) -> Any:
    own, name = [*command], ""
    if own[:3] == ["/bin/sh", "-c", jobs._SHELL_SCRIPT]:
        own, name = own[4:], "worker.pid"
    if _ours(own):
        return Popen(own, pid_file=name, **more)
    return subprocess.Popen(command, **more)


# --- the process that forks, and its forks ----------------------------------------------------------------------------
class _Handed:
    """A descriptor that goes along when a process is started."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, handed: Any) -> None:
        self.fd = handed.detach()


@dataclass(frozen=True)
class _Asked:
    """What `subprocess.Popen` was asked for.

    Attributes:
        words: of the command, behind the interpreter.
        streams: the three that the process gets.
        kept: descriptors that it holds until it ends, such as a lock's.
        session: whether it begins one.
        pid_file: where it writes its id.
    """

    words: list[str]
    environment: dict[str, str]
    cwd: str
    streams: list[_Handed]
    kept: list[_Handed]
    session: bool
    pid_file: str

    @staticmethod
    def of(process: Any, given: Sequence[Any], pid_file: str = "") -> _Asked:
        """given: arguments of Popen's own method that starts a process."""
        arguments = EXECUTE.bind(process, *given).arguments
        ends = (arguments["p2cread"], arguments["c2pwrite"], arguments["errwrite"])
        process._ends = [
            arguments[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        return _Asked(
            _words(arguments["args"]),
            dict(os.environ if arguments["env"] is None else arguments["env"]),
            str(arguments["cwd"] or Path.cwd()),
            [_Handed(number if fd == -1 else fd) for number, fd in enumerate(ends)],
            [_Handed(fd) for fd in arguments["pass_fds"]],
            arguments["start_new_session"],
            pid_file,
        )

    def close(self, process: Any) -> None:
        """Here, the ends of pipes that are the process's."""
        process._close_pipe_fds(*process._ends)

    def become(self) -> None:
        """In the process: all but the program."""
        if self.session:
            os.setsid()
        os.chdir(self.cwd)
        if self.pid_file:
            Path(self.pid_file).write_text(f"{os.getpid()}\n")
        os.environ.clear()
        os.environ.update(self.environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, one in enumerate(self.streams):
            os.dup2(one.fd, number)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, "w" if number else "r", 1, "utf-8", closefd=False) for number in range(3)
        )
        _import_from(self.environment.get("PYTHONPATH", ""))


class _Again(subprocess.Popen):  # type: ignore[type-arg]
    """Where a forked process starts another program of ours: a fork of itself, if no other thread can hold a lock.

    Threads of OpenMP count: a fork has none of them, and waits for them forever in its first loop."""

    def _execute_child(self, *given: Any) -> None:
        command = EXECUTE.bind(self, *given).arguments["args"]
        if not _ours(command) or len([*Path("/proc/self/task").iterdir()]) > 1:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        asked = _Asked.of(self, given)
        self.pid, self._child_created = os.fork(), True
        if not self.pid:
            _end_with(asked)
        asked.close(self)


def _end_with(asked: _Asked) -> NoReturn:
    """As a process of `multiprocessing` ends, in one that `os.fork` has made."""
    code = 1
    try:
        asked.become()
        held = {0, 1, 2, *(one.fd for one in asked.kept)}
        for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if fd not in held:
                with suppress(OSError):
                    os.close(fd)
        _run(asked.words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def _ours(command: Sequence[str]) -> bool:
    program, *words = command
    return program == COMMAND or (program == sys.executable and any(one.startswith("milkglass.") for one in words))


def _words(command: Sequence[str]) -> list[str]:
    """-m, -c or a script, and what follows."""
    program, *words = command
    if program == COMMAND:
        return ["-m", "milkglass.cli.main", *words]
    assert program == sys.executable, command
    return words[words[0] == "-P" :]


def _forks() -> ForkServerContext:
    found = CONTEXT("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def _inside(asked: _Asked, begins: connection.Connection) -> None:
    gc.freeze()  # what was imported stays, and is not looked through and copied
    asked.become()
    for one in asked.streams:
        os.close(one.fd)
    begins.close()
    os.execv = _goes_on  # type: ignore[assignment]
    subprocess.Popen = _Again  # type: ignore[misc]
    _run(asked.words)


def _import_from(path: str) -> None:
    """Where a copy of the sources is meant, ours are forgotten."""
    first = path.split(os.pathsep)[0]
    if first and Path(first).resolve() != SOURCES:
        sys.path.insert(0, first)
        for name in [one for one in sys.modules if one.split(".")[0] in ("milkglass", "tests")]:
            del sys.modules[name]


def _goes_on(program: str, command: Sequence[str]) -> None:
    """A process that becomes another program: ours is imported already."""
    if not _ours(command):
        EXECV(program, command)
    _run(_words(command))
    sys.exit(0)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # it is run as a new Python runs it, not taken as it was imported
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [*words]
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")

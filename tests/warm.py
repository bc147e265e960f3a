"""Processes that are forked from one which has imported torch and transformers: the imports take some seconds of
processor time, a fork takes none. The code is the product's own, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from milkglass.experiments import runs

WORKER = "milkglass.server.training"
PRELOADED = [WORKER, "milkglass.cli.main", "milkglass.sanitizers.files"]
CONTEXT = multiprocessing.get_context
STARTED = runs.started  # as the product starts a worker


class WarmWorker:
    """A training worker: what `runs.started` returns, as far as a run uses it."""

    def __init__(self, job: Path, log: BinaryIO) -> None:
        self._process = _forked(_work, str(job), log.name, os.environ | {"HF_HUB_OFFLINE": "1"})

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(WORKER, timeout or 0)
        return self.returncode

    def __enter__(self) -> WarmWorker:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.join()
        self._process.close()


@pytest.fixture(scope="module", autouse=True)
def warm_workers() -> Iterator[None]:
    """For a module or a conftest.py whose recipes train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "started", WarmWorker)
        yield


@pytest.fixture(scope="module", autouse=True)
def warm_pools() -> Iterator[None]:
    """For a module whose pools of workers do as much when they are forked as when they are spawned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda name: _forks() if name == "spawn" else CONTEXT(name))
        yield


def milkglass(words: Sequence[str], environment: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """`milkglass WORDS` with this environment and no other, and without a terminal."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _forked(_command, words, str(out), str(err), dict(environment))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["milkglass", *words], timeout)
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(["milkglass", *words], code, out.read_text("utf-8"), err.read_text("utf-8"))


# --- inside -----------------------------------------------------------------------------------------------------------
def _forks() -> ForkServerContext:
    found = CONTEXT("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def _forked(target: Any, *arguments: Any) -> ForkServerProcess:
    process = _forks().Process(target=target, args=arguments)
    process.start()
    return process


def _become(out: str, err: str, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), number)


def _work(job: str, log: str, environment: Mapping[str, str]) -> None:
    from milkglass.server.training import main

    _become(log, log, environment)
    sys.exit(main(Path(job)))


def _command(words: Sequence[str], out: str, err: str, environment: Mapping[str, str]) -> None:
    from milkglass.cli.main import main

    _become(out, err, environment)
    sys.argv = ["milkglass", *words]
    main()

"""Commands of Milkglass as programs of their own, and servers in a thread."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from tests.cli.kit import PASSPHRASE
from tests.server.kit import until

ROOT = Path(__file__).parents[2]


@dataclass
class Program:
    """A command that runs, and what it printed."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8")

    def listening(self) -> str:
        """Its address, once it listens."""
        until(lambda: "listening on" in self.said or self.process.poll() is not None)
        found = re.search(r"listening on (https?://\S+?)(/v1)?[;\s]", self.said)
        assert found, self.said
        return found[1]


@contextmanager
def command(folder: Path, name: str, *words: object) -> Iterator[Program]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    if "--key" in words:
        environment["MILKGLASS_PASSPHRASE"] = PASSPHRASE
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "milkglass.cli.main", *map(str, words)], stdout=out, stderr=out, env=environment,
            cwd=folder,
        )  # fmt: skip
    try:
        yield Program(process, log)
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[int]:
    """Serves an application on a port of this machine. `options`: uvicorn's, such as a certificate."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()

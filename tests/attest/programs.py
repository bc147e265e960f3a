"""Commands of Milkglass as programs of their own, and servers in a thread."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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


async def leave(
    app: Any, path: str, when: Callable[[], bool], headers: dict[str, str] | None = None,
    method: str = "POST", query: str = "",
) -> list[Any]:  # fmt: skip
    """Sends a request to an ASGI application, reads nothing, and leaves at a moment. Returns what was on its way."""
    named = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {
        "type": "http", "method": method, "path": path, "query_string": query.encode(), "scheme": "https",
        "server": None, "client": ("127.0.0.1", 1), "headers": [(b"host", b"127.0.0.1"), *named],
    }  # fmt: skip
    body, sent = [{"type": "http.request", "body": b"{}", "more_body": False}], list[Any]()

    async def receive() -> Any:
        if body:
            return body.pop()
        while not when() and not sent:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.start" and message["status"] == 200:
            await asyncio.Event().wait()

    await asyncio.wait_for(app(scope, receive, send), 5)
    return sent


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

"""A real server on a free loopback port: in a thread, or as a process of its own that can be killed, forked from a
warm one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from milkglass.server.app import create_app
from milkglass.server.process import WebServer as WebServer
from milkglass.server.process import url_of
from tests import warm
from tests.server.kit import TOKEN, settings, until

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import json, sys
from pathlib import Path
from milkglass.server.app import serve
from milkglass.server.settings import ServerSettings
given = json.loads(sys.argv[1])
worker = tuple(given.pop("worker"))
serve(ServerSettings(Path(given.pop("home")), worker=worker, **given))
"""


class Server:
    def __init__(self, home: Path, in_thread: bool = False, send_buffer: int = 0, **more: Any) -> None:
        """`send_buffer`: bytes that the kernel keeps of an answer; 0: the system's choice."""
        self.home, self.more, self.in_thread, self.send_buffer = home, more, in_thread, send_buffer
        self.steps = 0

    def __enter__(self) -> Server:
        if self.in_thread:
            self._start_thread()
        else:
            self._start_process()
        return self

    def __exit__(self, *_: object) -> None:
        if self.in_thread:
            self._uvicorn.should_exit = True
            self._thread.join(120)
            self._socket.close()
        else:
            self.stop()

    def _start_thread(self) -> None:
        chosen = settings(self.home, **self.more)
        self.app = create_app(chosen)
        self._socket = socket.create_server(("127.0.0.1", 0))
        if self.send_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer)
        self.url = url_of(self._socket, chosen)
        self._uvicorn = WebServer(self.app, chosen, chosen.connections)
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        until(lambda: self._uvicorn.started)

    def _start_process(self) -> None:
        chosen = settings(self.home, **self.more)
        options = {
            "home": str(self.home),
            "port": 0,
            "token": TOKEN,
            "worker": chosen.worker,
            "spare_disk": 1,
        } | self.more
        self.log = (self.home.parent / "server.log").open("ab")
        self.process = warm.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(options)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        line = self.process.stdout.readline()
        found = re.fullmatch(r"milkglass serve: listening on (http://127\.0\.0\.1:\d+)\n", line)
        assert found, f"{line!r}; {(self.home.parent / 'server.log').read_text()}"
        self.url = found[1]

    def app_tasks(self) -> list[Any]:
        """The requests that a server in a thread is at work on."""
        return list(self._uvicorn.server_state.tasks)

    @property
    def acceptor(self) -> Any:
        """Of a server in a thread."""
        return self._uvicorn.servers[0]

    def answered(self) -> int:
        """How many requests a server in a thread has answered."""
        return self._uvicorn.server_state.total_requests

    def kill(self) -> None:
        """As a power cut would."""
        self.process.kill()
        self._gone()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self._gone()

    def _gone(self) -> None:
        self.process.wait(30)
        self.process.stdout.close()
        self.log.close()

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=300)

    def ask_and_leave(self, path: str, body: dict[str, Any]) -> None:
        """Send a request on a bare connection; close it when the model is at work on it."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + data)
            self.wait_until(lambda: self.steps >= 2)

    def slow_down(self, engine: Any) -> None:
        """Count an engine's steps, and make each last."""
        step = engine.step

        def slow() -> None:
            self.steps += 1
            time.sleep(0.02)
            step()

        engine.step = slow

    @staticmethod
    def wait_until(found: Callable[[], Any]) -> None:
        until(found)

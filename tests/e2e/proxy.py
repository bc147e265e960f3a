"""A wire tap: relays TCP to a server on loopback and keeps every byte that crosses, in both directions."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class Tap:
    def __init__(self, url: str, port: int = 0) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.settimeout(0.1)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sockets = [self._listener]
        self.heard = bytearray()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Tap:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in list(self._threads):
            thread.join(10)
        for one in self._sockets:
            one.close()

    def _start(self, work, *arguments) -> None:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            self._start(self._relay, near, far)
            self._start(self._relay, far, near)

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(0.1)
        with contextlib.suppress(OSError):
            while not self._stop.is_set():
                try:
                    data = source.recv(1 << 16)
                except TimeoutError:
                    continue
                if not data:
                    break
                with self._lock:
                    self.heard += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

"""A server for tests of the client: small, literal, and it can fail at a chosen call in a chosen way.

It shares no code with milkglass.server: what is tested is the contract.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from safetensors.numpy import load

from tests.serving import in_thread

TOKEN = "stub-token-of-the-tests"
Fault = Callable[["Handler"], bool]  # True: the call was dealt with


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        call = f"{self.command} {self.path}"
        with self.server.lock:
            self.server.calls.append((call, dict(self.headers), self.body))
            faults = self.server.faults.get(call.split("?")[0]) or self.server.faults.get(self.command) or []
            fault = faults.pop(0) if faults else None
        if fault is not None and fault(self):
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": {"message": "wrong token", "type": "x", "code": "x", "hint": "look again"}})
            return
        self.server.route(self)

    do_GET = do_POST = do_PUT = do_DELETE = do

    def answer(self, status: int, value: Any, **headers: str) -> None:
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(raw)

    def cut(self) -> None:
        """Hang up without an answer."""
        self.close_connection = True
        self.connection.shutdown(2)

    def events(self, lines: list[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write("".join(lines).encode())
        self.close_connection = True


def hang_up(handler: Handler) -> bool:
    """Before anything was done."""
    handler.cut()
    return True


def lose_answer(handler: Handler) -> bool:
    """Do it, and hang up before telling."""
    handler.answer = lambda *a, **k: handler.cut()  # type: ignore[method-assign]
    handler.server.route(handler)
    return True


def busy(handler: Handler) -> bool:
    handler.answer(503, {"error": {"message": "busy", "hint": ""}}, Retry_After="0")
    return True


def fine(handler: Handler) -> bool:
    return False


class Stub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.calls: list[tuple[str, dict[str, str], bytes]] = []
        self.faults: dict[str, list[Fault]] = {}
        self.uploads: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self.content: dict[str, bytes] = {}
        self.models: dict[str, Any] = {}
        self.described: dict[str, Any] = {"kind": "encoder", "vocab_size": 300}
        self.replies: dict[str, Callable[[Handler], None]] = {}
        self.chunk_bytes = 1000

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def count(self, call: str) -> int:
        return sum(one.split("?")[0] == call for one, _, _ in self.calls)

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # a client that hung up is part of the tests

    def route(self, handler: Handler) -> None:
        call = f"{handler.command} {handler.path.split('?')[0]}"
        if call in self.replies:
            self.replies[call](handler)
        elif call == "GET /v1/files":
            handler.answer(200, {"data": list(self.files.values())})
        elif call == "POST /v1/uploads":
            self.start(handler)
        elif handler.path.startswith("/v1/uploads/"):
            self.upload(handler)
        elif call.startswith("GET /v1/models/") and call.count("/") == 3:
            handler.answer(200, {"id": call.rpartition("/")[2], **self.described})
        elif call == "POST /v1/models":
            asked = json.loads(handler.body)
            if self.models.setdefault(asked["id"], asked) != asked:
                handler.answer(409, {"error": {"message": "another model has this name", "hint": ""}})
            else:
                handler.answer(200, {"id": asked["id"]})
        else:
            handler.answer(404, {"error": {"message": "nothing here", "hint": ""}})

    def start(self, handler: Handler) -> None:
        key = f"upload-{len(self.uploads)}"
        self.uploads[key] = {**json.loads(handler.body), "data": b""}
        handler.answer(200, {"id": key, "received": 0, "chunk_bytes": self.chunk_bytes})

    def upload(self, handler: Handler) -> None:
        key = handler.path.split("/")[3]
        upload = self.uploads.get(key)
        if upload is None:
            handler.answer(404, {"error": {"message": "no such upload", "hint": ""}})
        elif handler.command == "GET":
            handler.answer(200, {"id": key, "received": len(upload["data"]), "chunk_bytes": self.chunk_bytes})
        elif handler.command == "PUT":
            self.write(handler, upload)
        else:
            self.complete(handler, key, upload)

    def write(self, handler: Handler, upload: dict[str, Any]) -> None:
        assert hashlib.sha256(handler.body).hexdigest() == handler.headers["Chunk-SHA256"]
        if int(handler.headers["Upload-Offset"]) != len(upload["data"]):
            handler.answer(409, {"error": {"message": "wrong offset", "hint": "", "received": len(upload["data"])}})
            return
        upload["data"] += handler.body
        handler.answer(200, {"received": len(upload["data"])})

    def complete(self, handler: Handler, key: str, upload: dict[str, Any]) -> None:
        del self.uploads[key]
        if hashlib.sha256(upload["data"]).hexdigest() != upload["sha256"] or len(upload["data"]) != upload["bytes"]:
            handler.answer(400, {"error": {"message": "checksum is wrong", "hint": "start anew"}})
            return
        file = f"file-{len(self.files)}"
        self.files[file] = {"id": file, "sha256": upload["sha256"], "purpose": upload["purpose"]}
        self.content[file] = upload["data"]
        handler.answer(200, self.files[file])


def rows_of(data: bytes) -> dict[str, list[Any]]:
    """What a file of rows/1 holds of each row: input_ids, labels or scores, token_type_ids."""
    tensors = load(data)
    ends = np.cumsum(tensors.pop("lengths"))[:-1]
    rows: dict[str, list[Any]] = {name: tensors[name].tolist() for name in ("labels", "scores") if name in tensors}
    for name, column in (("input_ids", "input_ids"), ("token_labels", "labels"), ("token_type_ids", "token_type_ids")):
        if name in tensors:
            rows[column] = [one.tolist() for one in np.split(tensors[name], ends)]
    return rows


@contextmanager
def running() -> Iterator[Stub]:
    with Stub() as stub, in_thread(stub, poll_interval=0.02):
        yield stub

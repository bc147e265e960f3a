"""A split decoder served in this process, and a client that holds its table in the clear."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from milkglass.client.remote.connection import RetryPolicy
from milkglass.enclave.budget import RowPolicy
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import family_of
from milkglass.server.process import WebServer, listen
from milkglass.server.settings import Limits, ServerSettings
from milkglass.split.decoder import app
from milkglass.split.decoder.client import DecoderClient, SplitSampling, SplitStream
from milkglass.split.decoder.gate import TableGate
from milkglass.split.decoder.server import SessionTable, open_decoder
from milkglass.split.spec import DecoderInfo

TOKEN = "token-of-the-split-tests"
PATIENCE = RetryPolicy(max_attempts=4, first_limit=0.01, last_limit=0.05)
PROMPT = [5, 40, 41, 42, 7]


@dataclass(frozen=True)
class Served:
    """A running server, and the model's table (n, d)."""

    server: DecoderClient
    port: int
    sessions: SessionTable
    gate: TableGate
    table: torch.Tensor
    web: WebServer

    @property
    def info(self) -> DecoderInfo:
        return self.sessions.info

    def stream(self, max_tokens: int = 12, dtype: str | None = None, **sampling: float) -> SplitStream:
        chosen = SplitSampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        return SplitStream(self.server, self.info, chosen, dtype or self.info.dtype)

    def answer(self, prompt: list[int], max_tokens: int = 12, dtype: str = "float32", **sampling: float) -> list[int]:
        kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
        stream = self.stream(max_tokens, dtype, **sampling)
        rows = self.table.to(kind)
        return [*stream.ids(rows[prompt], lambda one: rows[[one]])]

    def settled(self, sessions: int = 0, seconds: float = 20.0) -> bool:
        """Whether the table comes to hold so many sessions."""
        until = time.monotonic() + seconds
        while len(self.sessions) != sessions and time.monotonic() < until:
            time.sleep(0.02)
        return len(self.sessions) == sessions


@contextmanager
def serving(
    folder: Path,
    home: Path,
    sessions: int = 16,
    idle: float = 30.0,
    unattested: bool = True,
    policy: RowPolicy | None = None,
    limits: Limits | None = None,
    send_buffer: int = 0,
) -> Iterator[Served]:
    checkpoint = Checkpoint.open(folder)
    session_table, package = open_decoder(checkpoint, "tiny", policy or RowPolicy(), sessions)
    gate = TableGate(package, allow_unattested=unattested)
    settings = ServerSettings(home, port=0, token=TOKEN)
    listener = listen(settings, settings.connections)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    limit = app.max_message_bytes(session_table.info)
    split = app.create_app(session_table, gate, TOKEN, idle)
    web = WebServer(split, settings, limits or Limits(), max_message_bytes=limit)
    thread = threading.Thread(target=lambda: web.run(sockets=[listener]), daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    table = checkpoint.read(family_of(checkpoint.config).locate(checkpoint).table)
    server = DecoderClient(f"http://127.0.0.1:{port}", TOKEN, retry=PATIENCE)
    try:
        until = time.monotonic() + 60
        while not web.started and time.monotonic() < until:
            time.sleep(0.01)
        yield Served(server, port, session_table, gate, table, web)
    finally:
        web.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()

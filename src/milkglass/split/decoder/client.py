"""The client's side of a stream: vectors out, ids back, and a connection that is made anew when it is lost.

It reads no text and knows no table: `rows` gives the vectors of ids, which an enclave computes. The server is not
trusted: each of its frames is checked, and counted: an answer ends after `max_tokens` of them, or before.
"""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.client.remote import strict_json
from milkglass.client.remote.connection import CONNECT, Connection, RetryPolicy, check_url, tls_context
from milkglass.enclave.attestation.release import NONCE
from milkglass.enclave.enclave import Enclave
from milkglass.errors import RemoteError, Unauthorized, Unreachable, UsageError
from milkglass.split.decoder import frames
from milkglass.split.decoder.frames import IdsFrame
from milkglass.split.decoder.gate import CHALLENGE, RELEASE
from milkglass.split.decoder.spec import HINT, MAX_BEAMS, PATH, PENALTY, STREAM, DecoderInfo, refused_beams

if TYPE_CHECKING:
    import torch
    from websockets.sync.client import ClientConnection

SILENCE = 120.0  # seconds that an answer may take
LARGEST = 1 << 20  # bytes of a server's message: the answer of a beam search comes in one
MAX_PACKAGE = 8 << 30
BEAMS = "a beam search takes --beams 2 or more with --temperature 0, and --length-penalty"
Rows = Callable[[tuple[int, ...]], "torch.Tensor"]  # ids (n,) to vectors (n, d)


@dataclass(frozen=True)
class SplitSampling:
    """How the server chooses tokens: the fields of `spec.OpenRequest` of the same names."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def require(self, info: DecoderInfo) -> None:
        """Raises UsageError for what the server does not do, before anything is sent."""
        most = min(info.max_new_tokens, info.max_length - 1)
        if not 1 <= self.max_tokens <= most:
            raise UsageError(f"max_tokens is {self.max_tokens}, 1 to {most} are made here", "lower --max-tokens")
        self.require_search()
        if self.beams > info.max_beams:
            raise UsageError(f"beams is {self.beams}, 1 to {info.max_beams} are offered here", "lower --beams")

    def require_search(self) -> None:
        """Raises UsageError for a beam search that no server does."""
        if not 1 <= self.beams <= MAX_BEAMS:
            raise UsageError(f"beams is {self.beams}, 1 to {MAX_BEAMS} are possible", BEAMS)
        if self.beams > 1 and self.max_tokens > LARGEST // 32:
            raise UsageError(f"max_tokens is {self.max_tokens}, of a beam search at most {LARGEST // 32}", "lower it")
        if not abs(self.length_penalty) <= PENALTY:
            raise UsageError(f"length_penalty is {self.length_penalty:g}", f"-{PENALTY:g} to {PENALTY:g} are allowed")
        wrong = refused_beams(self.beams, self.temperature, self.length_penalty, self.early_stopping)
        if wrong:
            raise UsageError(wrong, BEAMS)


@dataclass(frozen=True)
class DecoderServer:
    """Where a split decoder is served.

    Attributes:
        url: of the server, http(s)://host:port.
        token: its bearer token.
        allow_http: whether the token may cross in the clear to another machine.
        authority: a certificate file, for a server that signed its own.
        patience: when a lost connection is made again.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    allow_http: bool = False
    authority: Path | None = None
    patience: RetryPolicy = RetryPolicy()

    def info(self) -> DecoderInfo:
        """What it takes. Raises RemoteError or one of its kinds."""
        with self._connection() as connection:
            return DecoderInfo.of(connection.json("GET", PATH))

    def package(self, enclave: Enclave) -> bytes:
        """The provider's table, encrypted for this enclave. Raises RemoteError where the provider refuses it."""
        with self._connection() as connection:
            nonce = str(connection.json("POST", CHALLENGE, {}).get("nonce"))
            if len(nonce) != 2 * NONCE or not set(nonce) <= set("0123456789abcdef"):
                raise RemoteError("the server's challenge is not a nonce", HINT)
            public, quote = enclave.challenge(bytes.fromhex(nonce))
            body = {"nonce": nonce, "public": public.hex(), "quote": base64.b64encode(quote).decode()}
            parts, size = [], 0
            with connection.stream("POST", RELEASE, body) as stream:
                for chunk in stream.answer.iter_raw():
                    stream.watch.extend(stream.silence)
                    parts.append(chunk)
                    size += len(chunk)
                    if size > MAX_PACKAGE:
                        raise RemoteError(f"the package has more than {MAX_PACKAGE} bytes", "don't trust this server")
            return b"".join(parts)

    def _connection(self) -> closing[Connection]:
        return closing(Connection(self.url, self.token, self.allow_http, self.authority, patience=self.patience))

    def stream(self, info: DecoderInfo, sampling: SplitSampling, dtype: str) -> SplitStream:
        """What answers one prompt. dtype: of its vectors."""
        return SplitStream(self, info, sampling, dtype)

    def connect(self) -> ClientConnection:
        """A WebSocket. Raises Unauthorized, RemoteError; OSError and TimeoutError where there is no connection."""
        from websockets.exceptions import InvalidHandshake, InvalidStatus
        from websockets.sync.client import connect

        local = check_url(self.url.rstrip("/"), self.allow_http)
        secure: Any = tls_context(self.authority) if self.url.startswith("https") else None
        options: dict[str, Any] = {"proxy": None} if local else {}
        try:
            return connect(
                "ws" + self.url.rstrip("/").removeprefix("http") + STREAM,
                additional_headers={"Authorization": f"Bearer {self.token}"} if self.token else {},
                ssl=ssl.create_default_context() if secure is True else secure,
                compression=None,
                user_agent_header=None,
                open_timeout=CONNECT,
                max_size=LARGEST,
                ping_interval=None,
                **options,
            ).__enter__()  # it is closed by `SplitStream.close`
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403):
                raise Unauthorized(
                    "the server refuses the token", "give the server's token with --token-file"
                ) from None
            raise RemoteError(f"the server answered {status} to a stream", HINT) from None
        except InvalidHandshake:
            raise RemoteError("the server does not speak the stream's protocol", HINT) from None


class SplitStream:
    """One prompt and its answer. `answer`, or `ids`, is called once.

    Attributes:
        sent: bytes of frames that were sent.
        received: bytes of frames that came.
        reconnects: how often the connection was made anew.
    """

    def __init__(self, server: DecoderServer, info: DecoderInfo, sampling: SplitSampling, dtype: str) -> None:
        """dtype: of the vectors that `answer` gets."""
        self._server, self._info, self._sampling, self._dtype = server, info, sampling, dtype
        self._socket: ClientConnection | None = None
        self._name: str | None = None
        self._number = 0  # of the next frame of vectors
        self.sent = self.received = self.reconnects = 0

    def ids(self, prompt: torch.Tensor, rows: Rows) -> Iterator[int]:
        """The ids of the answer, as they come; all at the end in a beam search. prompt: (t, d). Raises RemoteError."""
        for frame in self.answer(prompt, rows):
            if self._sampling.beams == 1 or frame.ended:
                yield from frame.ids

    def answer(self, prompt: torch.Tensor, rows: Rows) -> Iterator[IdsFrame]:
        """A frame of ids for each token, as it comes. prompt: (t, d). Raises RemoteError."""
        try:
            result = self._exchange(prompt)
            yield result
            while not result.ended:
                result = self._exchange(rows(result.ids))
                yield result
        finally:
            self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _drop(self) -> None:
        """Close the socket without WebSocket's closing handshake, which would end the session."""
        if self._socket is not None:
            self._socket.close_socket()
            self._socket = None

    def _exchange(self, vectors: torch.Tensor) -> IdsFrame:
        """Send a frame and wait for its answer, over as many connections as it takes."""
        from websockets.exceptions import ConnectionClosed

        frame = frames.encode_vectors(self._number, vectors)
        for attempt in range(self._server.patience.attempts):
            try:
                return self._tried(frame)
            except (ConnectionClosed, OSError, TimeoutError) as error:
                self._drop()
                if attempt == self._server.patience.attempts - 1:
                    fault = f"{self._server.url} does not answer ({type(error).__name__})"
                    raise Unreachable(fault, HINT) from error
                self.reconnects += 1
                self._server.patience.wait(attempt)
        raise AssertionError("the last attempt returns or raises")

    def _tried(self, frame: bytes) -> IdsFrame:
        due = self._number  # the server's next frame has the same number as the one that it answers
        expected = self._number
        if self._socket is None:
            expected = self._connected()
        assert self._socket is not None
        if expected == due:
            self._socket.send(frame)
            self.sent += len(frame)
        elif expected != due + 1:  # it had the frame when the connection was lost: its answer comes by itself
            raise RemoteError(f"the server waits for frame {expected}, where {due} is next", "don't trust this server")
        result = self._received(due)
        self._number += 1
        return result

    def _connected(self) -> int:
        """The number of the frame that the server waits for."""
        fields = {name: value for name, value in asdict(self._sampling).items() if value is not None}
        fields |= {"dtype": self._dtype}
        if self._name is not None:
            fields |= {"resume": self._name, "received": self._number}
        self._socket = self._server.connect()
        self._socket.send(json.dumps(fields))
        head = self._message(self._socket.recv(timeout=SILENCE))
        name, expected = head.get("session"), head.get("expected")
        if not isinstance(name, str) or type(expected) is not int:
            raise RemoteError("the server's answer names no session", HINT)
        self._name = name
        return expected

    def _received(self, number: int) -> IdsFrame:
        assert self._socket is not None
        message = self._socket.recv(timeout=SILENCE)
        if isinstance(message, str):
            self._message(message)
            raise RemoteError("the server sent words where a frame is due", HINT)
        self.received += len(message)
        sampling = self._sampling
        longest = 1 if sampling.beams == 1 else sampling.max_tokens
        result = frames.decode_ids(message, self._info.vocabulary, sampling.beams, longest)
        if result.number != number:
            raise RemoteError(
                f"the server's frame {result.number} came where {number} is due", "don't trust this server"
            )
        if number + 1 >= sampling.max_tokens and not result.ended:
            raise RemoteError(
                f"the server's answer goes on after {number + 1} ids, {sampling.max_tokens} were asked for",
                "don't trust this server",
            )
        return result

    @staticmethod
    def _message(raw: str | bytes) -> dict[str, Any]:
        """Raises RemoteError for the server's own errors, with its words."""
        value = strict_json.document(raw)
        error = value.get("error")
        if isinstance(error, dict):
            raise RemoteError(
                f"the server refused: {error.get('message', 'no reason given')}", str(error.get("hint", ""))
            )
        return value

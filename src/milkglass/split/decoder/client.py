"""Sends vectors to a split decoder's server, and receives ids. A lost connection ends the answer.

This module reads no text and has no embedding table: an enclave computes the vector of each id. The server is not
trusted: each of its messages is checked and counted, and an answer has at most `max_tokens` of them.
"""

from __future__ import annotations

import base64
import itertools
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.client.remote import strict_json
from milkglass.client.remote.connection import CONNECT_SECONDS, Connection, RetryPolicy, check_url, tls_context
from milkglass.enclave.enclave import Enclave
from milkglass.enclave.release import NONCE_BYTES
from milkglass.errors import RemoteError, Unauthorized, Unreachable, UsageError
from milkglass.split.decoder import frames
from milkglass.split.decoder.frames import NextToken
from milkglass.split.decoder.gate import CHALLENGE_PATH, RELEASE_PATH
from milkglass.split.spec import DECODER_HINT, SPLIT_PATH, STREAM_PATH, DecoderInfo

if TYPE_CHECKING:
    import torch
    from websockets.sync.client import ClientConnection

TOKEN_TIMEOUT_SECONDS = 120.0  # how long the next token may take
MAX_MESSAGE_BYTES = 64 << 10  # of a server's message
MAX_PACKAGE_BYTES = 8 << 30  # of the provider's encrypted package
VectorOf = Callable[[int], "torch.Tensor"]  # returns the vector (1, d) of an id


@dataclass(frozen=True)
class SplitSampling:
    """Says how the server chooses tokens. `OpenRequest` has the same fields.

    Attributes:
        max_tokens: the most ids of an answer.
        temperature: 0 takes the likeliest token.
        top_p: draws from the fewest tokens whose probabilities reach this.
        top_k: draws from this many of the likeliest tokens; 0: all.
        seed: the seed of the draws. None: the server's own.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def require_supported(self, info: DecoderInfo) -> None:
        """Raises UsageError if the server does not generate so many tokens. Nothing is sent before."""
        max_new_tokens = min(info.max_new_tokens, info.max_length - 1)
        if not 1 <= self.max_tokens <= max_new_tokens:
            raise UsageError(
                f"max_tokens is {self.max_tokens}, 1 to {max_new_tokens} are made here", "lower --max-tokens"
            )


@dataclass(frozen=True)
class DecoderClient:
    """Talks to the server of a split decoder over HTTP and WebSocket.

    Attributes:
        url: the server's address.
        bearer_token: the server's token. None: none is sent.
        allow_http: whether the token may cross a network unencrypted.
        authority: a PEM file with the server's certificate or its authority. None: the system's authorities.
        retry: when an unanswered HTTP request is sent again.
    """

    url: str
    bearer_token: str | None = field(default=None, repr=False)
    allow_http: bool = False
    authority: Path | None = None
    retry: RetryPolicy = RetryPolicy()

    def info(self) -> DecoderInfo:
        """Asks the server what it takes. Raises RemoteError."""
        with self._connection() as connection:
            return DecoderInfo.of(connection.json("GET", SPLIT_PATH))

    def fetch_package(self, enclave: Enclave) -> bytes:
        """Asks for the provider's package, encrypted for an enclave. Raises RemoteError if the provider refuses it."""
        with self._connection() as connection:
            nonce = str(connection.json("POST", CHALLENGE_PATH, {}).get("nonce"))
            if len(nonce) != 2 * NONCE_BYTES or not set(nonce) <= set("0123456789abcdef"):
                raise RemoteError("the server's challenge is not a nonce", DECODER_HINT)
            public_key, quote = enclave.challenge(bytes.fromhex(nonce))
            body = {"nonce": nonce, "public": public_key.hex(), "quote": base64.b64encode(quote).decode()}
            if collateral := enclave.collateral:
                body["collateral"] = base64.b64encode(collateral).decode()
            chunks, size = [], 0
            with connection.stream("POST", RELEASE_PATH, body) as stream:
                for chunk in stream.response.iter_raw():
                    stream.deadline.extend(stream.max_silence)
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > MAX_PACKAGE_BYTES:
                        raise RemoteError(
                            f"the package has more than {MAX_PACKAGE_BYTES} bytes", "don't trust this server"
                        )
            return b"".join(chunks)

    def _connection(self) -> closing[Connection]:
        return closing(Connection(self.url, self.bearer_token, self.allow_http, self.authority, retry=self.retry))

    def stream(self, info: DecoderInfo, sampling: SplitSampling, dtype: str) -> SplitStream:
        """Returns a stream for one prompt whose vectors have type `dtype`."""
        return SplitStream(self, info, sampling, dtype)

    def connect(self) -> ClientConnection:
        """Opens a WebSocket.

        Raises:
            Unauthorized: the server refuses the token, or needs one.
            RemoteError: the server refuses the stream, or does not speak its protocol.
            OSError, TimeoutError: there is no connection.
        """
        from websockets.exceptions import InvalidHandshake, InvalidStatus
        from websockets.sync.client import connect

        is_local = check_url(self.url.rstrip("/"), self.allow_http)
        tls: Any = tls_context(self.authority) if self.url.startswith("https") else None
        options: dict[str, Any] = {"proxy": None} if is_local else {}
        try:
            return connect(
                "ws" + self.url.rstrip("/").removeprefix("http") + STREAM_PATH,
                additional_headers={"Authorization": f"Bearer {self.bearer_token}"} if self.bearer_token else {},
                ssl=ssl.create_default_context() if tls is True else tls,
                compression=None,
                user_agent_header=None,
                open_timeout=CONNECT_SECONDS,
                max_size=MAX_MESSAGE_BYTES,
                ping_interval=None,
                **options,
            ).__enter__()  # `SplitStream.ids` closes it
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403):
                fault = (
                    "the server refuses the token"
                    if self.bearer_token
                    else "the server asks for a token, none was given"
                )
                raise Unauthorized(fault, "give the server's token with --token-file") from None
            raise RemoteError(f"the server answered {status} to a stream", DECODER_HINT) from None
        except InvalidHandshake:
            raise RemoteError("the server does not speak the stream's protocol", DECODER_HINT) from None


class SplitStream:
    """Sends one prompt and reads its answer. `ids` can be called once.

    Attributes:
        sent_bytes: bytes of messages with vectors that were sent.
        received_bytes: bytes of messages with ids that were received.
    """

    def __init__(self, client: DecoderClient, info: DecoderInfo, sampling: SplitSampling, dtype: str) -> None:
        """Prepares a stream. `dtype` is the type of the vectors that `ids` gets."""
        self._client, self._info, self._sampling, self._dtype = client, info, sampling, dtype
        self.sent_bytes = self.received_bytes = 0

    def ids(self, prompt: torch.Tensor, vector_of: VectorOf) -> Iterator[int]:
        """Yields the ids of the answer to a prompt (t, d). `vector_of` returns an id's vector.

        Raises RemoteError if the server breaks the protocol or the limit, and Unreachable if the connection is lost.
        """
        with closing(self._connect()) as socket:
            token = self._exchange(socket, prompt)
            for count in itertools.count(1):
                if token.reason is None and count >= self._sampling.max_tokens:
                    raise RemoteError(
                        f"the server's answer goes on after {count} ids, {self._sampling.max_tokens} were asked for",
                        "don't trust this server",
                    )
                yield token.id
                if token.reason is not None:
                    return
                token = self._exchange(socket, vector_of(token.id))

    def _connect(self) -> ClientConnection:
        """Returns a connection on which the sampling settings are sent."""
        with self._as_unreachable():
            socket = self._client.connect()
            fields = {name: value for name, value in asdict(self._sampling).items() if value is not None}
            socket.send(json.dumps({**fields, "dtype": self._dtype}))
            return socket

    def _exchange(self, socket: ClientConnection, vectors: torch.Tensor) -> NextToken:
        """Sends vectors, and returns the token that follows them. Raises RemoteError, Unreachable."""
        message = frames.encode_vectors(vectors)
        with self._as_unreachable(socket):
            socket.send(message)
            self.sent_bytes += len(message)
            answer = socket.recv(timeout=TOKEN_TIMEOUT_SECONDS)
        if isinstance(answer, str):
            raise _refusal(answer)
        self.received_bytes += len(answer)
        return frames.decode_token(answer, self._info.vocabulary)

    @contextmanager
    def _as_unreachable(self, socket: ClientConnection | None = None) -> Iterator[None]:
        """Turns each error of a lost connection into Unreachable."""
        from websockets.exceptions import ConnectionClosed

        try:
            yield
        except (ConnectionClosed, OSError) as error:
            if socket is not None:
                socket.close_socket()  # no closing handshake: nobody may be there
            fault = f"{self._client.url} does not answer ({type(error).__name__})"
            raise Unreachable(fault, f"ask again; {DECODER_HINT}") from error


def _refusal(message: str) -> RemoteError:
    """Returns the error that a server's message states."""
    error = strict_json.parse_object(message).get("error")
    if not isinstance(error, dict):
        return RemoteError("the server sent words where an id is due", DECODER_HINT)
    return RemoteError(f"the server refused: {error.get('message', 'no reason given')}", str(error.get("hint", "")))

"""A connection to one server over HTTP. All that a session, or a client of two halves, sends leaves this machine here.

This file decides who receives the token, which calls are tried again, and what an error answer becomes. It sends
scrambled ids (remote.py) and frames (split/client.py), and reads neither. The server is not trusted: strict_json.py
reads all of its JSON, every exchange has a deadline, and redirects are not followed.

When the time of an exchange is up, its connection is cut. httpx2's timeouts are of silence: a server that sends a byte
now and then never meets them. A thread therefore watches the clock and shuts the socket down, which ends every read and
write on it, of headers and of a body.

Other connections are made by split/decoder/client.py, engines/upstream.py, Flower, and downloads from a hub.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final
from weakref import WeakSet

import httpx2

from milkglass.client.remote import strict_json
from milkglass.client.remote.strict_json import SERVER_HINT
from milkglass.errors import RemoteError, Unauthorized, Unreachable, UsageError
from milkglass.progress import Log, no_log
from milkglass.system import is_loopback

MAX_EVENT_BYTES = 4 << 20  # bytes of an event
MAX_COMMENT_BYTES = 256 << 10  # bytes before an event that are not data
EVENT_ID_PATTERN = re.compile(r"[A-Za-z0-9_.-]{0,128}")
BUSY_STATUSES = frozenset({429, 503})  # the server asks to try later, and did nothing
LOST_STATUSES = frozenset({502, 504})  # a proxy has no answer; the server may have carried out the call
NEVER_SENT_ERRORS = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
MAX_ANSWER_BYTES = 64 << 20  # bytes of one JSON answer
MAX_ERROR_BYTES = 64 << 10  # bytes read of an error's body
ANSWER_SECONDS = 30.0  # how much longer an exchange may take than the silence that is allowed
MIN_BYTES_PER_SECOND = 16 << 10  # the slowest that a request's body may be sent
MAX_SHOWN_CHARACTERS = 200  # characters of an address in a message
EXAMPLE_URL = "https://gpu.example:8420"
CONNECT_SECONDS = 10.0  # seconds for making a connection
FIRST_CONNECT_SECONDS = 3.0  # seconds for making a connection to a server that never answered
FIRST_SILENCE_SECONDS = 20.0  # seconds to wait for the first answer of a server
FIRST_ATTEMPTS = 3  # tries of a server that never answered: it is more likely down than restarting
MIN_REPORTED_SECONDS = 1.0  # seconds from which a wait is reported
TOKEN_PLACE = "it is the line in the file `token` of the server's home folder"


@final
class Sockets:
    """Collects the open sockets of one client, which httpcore2's `trace` extension reports, and shuts them.

    Attributes:
        given_up: is set when the client must send nothing more.
    """

    def __init__(self) -> None:
        self._open: WeakSet[socket.socket] = WeakSet()
        self.given_up = threading.Event()

    def trace(self, event: str, details: dict[str, Any]) -> None:
        """Adds the socket of an event that opened one, for httpcore2's `trace` extension."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._open.add(details["return_value"].get_extra_info("socket"))
            if self.given_up.is_set():  # while this one was being opened
                self.shut()

    def shut(self) -> None:
        """Shuts all open sockets down, which ends every read and write on them."""
        for open_socket in list(self._open):
            with contextlib.suppress(OSError):  # closed already
                # Not SSLSocket.shutdown, which drops the TLS state that a thread still reads with
                socket.socket.shutdown(open_socket, socket.SHUT_RDWR)

    def give_up(self) -> None:
        """Shuts all sockets, and any that is opened from now on. Another thread may be using them."""
        self.given_up.set()
        self.shut()


@final
class Deadline:
    """Cuts connections when their time is up. The deadline can be moved while a thread waits for it.

    Attributes:
        seconds: the time that was last allowed.
        has_expired: whether the connections were cut.
    """

    def __init__(self, sockets: Sockets, seconds: float) -> None:
        self._sockets, self._changed = sockets, threading.Condition()
        self._due: float | None = None  # None: the clock is stopped
        self._is_over = self.has_expired = False
        self.extend(seconds)

    def extend(self, seconds: float) -> None:
        """Allows this many seconds from now on."""
        with self._changed:
            self.seconds, self._due = seconds, time.monotonic() + seconds
            self._changed.notify()

    def pause(self) -> None:
        """Stops the clock until `extend`."""
        with self._changed:
            self._due = None

    def end(self) -> None:
        """Ends `run` without cutting anything."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def run(self) -> None:
        """Waits until the time is up and cuts the connections, or returns when `end` is called."""
        with self._changed:
            while not self._is_over:
                seconds_left = None if self._due is None else self._due - time.monotonic()
                if seconds_left is not None and seconds_left <= 0:
                    self.has_expired = True
                    self._sockets.shut()
                    return
                self._changed.wait(seconds_left)


@contextmanager
def cut_after(sockets: Sockets, seconds: float) -> Iterator[Deadline]:
    """Cuts the connections of `sockets` after `seconds`, unless the block ends or extends the time before."""
    deadline = Deadline(sockets, seconds)
    threading.Thread(target=deadline.run, name="milkglass-deadline", daemon=True).start()
    try:
        yield deadline
    finally:
        deadline.end()


@final
@dataclass(frozen=True)
class OpenStream:
    """Holds a response whose body is being read.

    Attributes:
        response: the response, whose body is not read yet.
        deadline: cuts the connection when the reader's time is up.
        max_silence: seconds without an event after which the connection is cut, unless the reader sets others.
    """

    response: httpx2.Response
    deadline: Deadline
    max_silence: float


def server_events(stream: OpenStream, max_silence: float | None = None) -> Iterator[tuple[str | None, str, str]]:
    """Yields (id, type, data) of each server-sent event. The id is None until an event has one.

    Args:
        stream: the answer.
        max_silence: seconds without an event after which the connection is cut. Comments are not events. The caller's
            time for an event does not count. None: those of `stream`.

    Raises:
        RemoteError: an event has more than MAX_EVENT_BYTES bytes, comments before one have more than MAX_COMMENT_BYTES,
            or an id cannot be sent back in a header.
    """
    max_silence = stream.max_silence if max_silence is None else max_silence
    event_id: str | None = None
    event_type, data_lines, size, comment_bytes = "message", list[str](), 0, 0
    stream.deadline.extend(max_silence)
    for line in _lines_of(stream.response):
        size += len(line) + 1
        if size > MAX_EVENT_BYTES:
            raise RemoteError(f"an event of the answer has more than {MAX_EVENT_BYTES} bytes", SERVER_HINT)
        comment_bytes += 0 if line.startswith("data") else len(line) + 1
        if comment_bytes > MAX_COMMENT_BYTES:
            raise RemoteError(
                f"the answer has more than {MAX_COMMENT_BYTES} bytes of comments before an event", SERVER_HINT
            )
        if not line:
            if data_lines:
                stream.deadline.pause()
                yield event_id, event_type, "\n".join(data_lines)
                stream.deadline.extend(max_silence)
                size = comment_bytes = 0
            event_type, data_lines = "message", []
            continue
        field_name, _, field = line.partition(":")
        field = field.removeprefix(" ")
        if field_name == "data":
            data_lines.append(field)
        elif field_name == "event":
            event_type = field
        elif field_name == "id":
            if not EVENT_ID_PATTERN.fullmatch(field):
                raise RemoteError("an event of the answer has no proper id", SERVER_HINT)
            event_id = field


def _lines_of(answer: httpx2.Response) -> Iterator[str]:
    remainder = b""
    for chunk in answer.iter_raw():
        *lines, remainder = (remainder + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r").decode("utf-8", "replace") for line in lines)
        if len(remainder) > MAX_EVENT_BYTES:
            raise RemoteError(f"a line of the answer has more than {MAX_EVENT_BYTES} bytes", SERVER_HINT)
    if remainder:
        yield remainder.decode("utf-8", "replace")


@dataclass(frozen=True)
class RetryPolicy:
    """Decides how often, and after how many seconds, a call is tried again.

    A wait is drawn from half of its limit to the limit, which doubles each time. The server can ask for up to 60 s.

    Attributes:
        max_attempts: how often a call is tried in all.
        first_limit: the limit of the first wait, in seconds.
        last_limit: the seconds beyond which the limit does not grow.
        pause: sleeps for some seconds, or ends early when the connection is given up.
        notice: receives the reason of a wait of MIN_REPORTED_SECONDS or more.
    """

    max_attempts: int = 7
    first_limit: float = 0.25
    last_limit: float = 8.0
    pause: Callable[[float], object] = field(default=time.sleep, repr=False)
    notice: Log = field(default=no_log, repr=False)

    def wait(self, attempt: int, answer: httpx2.Response | None = None) -> None:
        """Waits before a call is tried again.

        Args:
            attempt: the number of the attempt that failed, from 0 on.
            answer: the server's answer, which may ask for a longer wait. None: there was none.
        """
        requested = (answer.headers.get("Retry-After") or "") if answer is not None else ""
        seconds = min(self.last_limit, self.first_limit * 2**attempt) * (
            0.5 + random.random() / 2
        )  # not all clients at once
        seconds = max(seconds, min(60.0, float(requested))) if re.fullmatch("[0-9]{1,9}", requested) else seconds
        if seconds >= MIN_REPORTED_SECONDS:
            event = "does not answer" if answer is None else f"answers {answer.status_code}"
            self.notice(f"the server {event}; trying again in {seconds:.0f} s")
        self.pause(seconds)


class Connection:
    """Sends requests to one server. Every call can raise Unreachable, Unauthorized or another RemoteError.

    A server may be silent for `timeout` seconds. A whole exchange may take ANSWER_SECONDS more, and a request's body as
    long as it takes at MIN_BYTES_PER_SECOND bytes a second.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        allow_http: bool = False,
        authority: Path | None = None,
        timeout: float = 120.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        if not isinstance(url, str):
            raise UsageError("no server's address was given", f"give for example {EXAMPLE_URL}")
        self.url = url.rstrip("/")
        self._has_answered = self._is_closed = False
        self._sockets = Sockets()
        self.retry = retry or RetryPolicy(pause=self._sockets.given_up.wait)
        self._max_silence = timeout
        self._client = httpx2.Client(**client_options(self.url, token, allow_http, authority))
        remove_user_agent(self._client.headers)

    def close(self) -> None:
        self._is_closed = True
        self._client.close()

    @property
    def is_given_up(self) -> bool:
        """Returns whether the connection was given up, and sends nothing more."""
        return self._sockets.given_up.is_set()

    def give_up(self) -> None:
        """Ends the exchange of another thread, which gets a RemoteError, and sends nothing more."""
        self._sockets.give_up()

    def json(
        self,
        method: str,
        path: str,
        body: Any = None,
        may_repeat: bool | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Sends a request, and returns the JSON object that the server answers.

        Args:
            method: the HTTP method.
            path: the path of the URL, after the server's address.
            body: is sent as JSON. None: nothing is.
            may_repeat: whether the call may be repeated though the server may have carried it out. None: a GET may. A
                call that never reached the server is always tried again.
            content: is sent as it is, in place of a JSON body.
            headers: further headers.
            timeout: how many seconds the server may be silent. None: as long as the connection allows, but for a first
                GET no longer than FIRST_SILENCE_SECONDS.
        """
        may_repeat = method == "GET" if may_repeat is None else may_repeat
        arguments = {name: value for name, value in (("json", body), ("content", content)) if value is not None}
        if timeout is None and method == "GET" and not self._has_answered:
            timeout = min(FIRST_SILENCE_SECONDS, self._max_silence)
        total = (
            (self._max_silence if timeout is None else timeout)
            + ANSWER_SECONDS
            + len(content or b"") / MIN_BYTES_PER_SECOND
        )
        for attempt in range(self.retry.max_attempts):
            is_last = attempt == self.retry.max_attempts - 1
            try:
                with self._within(total, RemoteError), self._send(method, path, headers, timeout, arguments) as answer:
                    status = answer.status_code
                    if is_last or not (status in BUSY_STATUSES or (may_repeat and status in LOST_STATUSES)):
                        return _read_object(answer)
            except httpx2.TransportError as error:
                if is_last or not (may_repeat or isinstance(error, NEVER_SENT_ERRORS)) or self._is_down(error, attempt):
                    raise self._unreachable(error) from error
                self.retry.wait(attempt)
                continue
            self.retry.wait(attempt, answer)
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def stream(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[OpenStream]:
        """Sends a request once, for an answer whose body is read as it arrives.

        Raises:
            Unreachable: the answer did not begin in time, or reading it failed or took longer than the reader allows.
        """
        arguments: dict[str, Any] = {} if body is None else {"json": body}
        try:
            with (
                self._within(self._max_silence + ANSWER_SECONDS, Unreachable) as deadline,
                self._send(method, path, headers, None, arguments) as answer,
            ):
                if answer.status_code >= 300:
                    raise error_from(answer)
                require_plain(answer)
                yield OpenStream(answer, deadline, self._max_silence)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    @contextmanager
    def _within(self, seconds: float, error_type: type[RemoteError]) -> Iterator[Deadline]:
        """Raises `error_type` if the exchange was cut, even if it seems to have succeeded: a part can look whole."""
        with cut_after(self._sockets, seconds) as deadline:
            try:
                yield deadline
            except (httpx2.TransportError, RemoteError) as error:
                if deadline.has_expired:
                    raise _overdue_error(deadline, error_type) from error
                raise
            if deadline.has_expired:
                raise _overdue_error(deadline, error_type)

    @contextmanager
    def _send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None,
        timeout: float | None,
        arguments: Mapping[str, Any],
    ) -> Iterator[httpx2.Response]:
        if self.is_given_up:
            raise RemoteError("the call was given up", "ask again in a session that is open")
        if self._is_closed:
            raise UsageError("the session is closed", "open another")
        connect = CONNECT_SECONDS if self._has_answered else FIRST_CONNECT_SECONDS
        limits = httpx2.Timeout(self._max_silence if timeout is None else timeout, connect=connect)
        extensions = {"trace": self._sockets.trace}
        with self._client.stream(
            method, path, headers=headers, timeout=limits, extensions=extensions, **arguments
        ) as answer:
            self._has_answered = True
            yield answer

    def _is_down(self, error: Exception, attempt: int) -> bool:
        """Returns whether the call should fail now: a server that never answered is given up soon.

        A wrong address therefore fails fast.
        """
        if self._has_answered:
            return False
        if isinstance(error, httpx2.ConnectTimeout | httpx2.ReadTimeout):
            return True
        return isinstance(error, NEVER_SENT_ERRORS) and attempt >= FIRST_ATTEMPTS - 1

    def _unreachable(self, error: Exception) -> Unreachable:
        hint = "is `milkglass serve` (or `milkglass split serve`) running there, and is the address right?"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            hint = "its certificate is not trusted here: give it with --certificate if the server signed its own"
        return Unreachable(f"{self.url} does not answer ({type(error).__name__})", hint)


def _overdue_error(deadline: Deadline, error_type: type[RemoteError]) -> RemoteError:
    return error_type(
        f"the answer was cut off: what was waited for did not come within {deadline.seconds:.0f} s",
        "try again; if it goes on like this, don't trust the server",
    )


def client_options(url: str, token: str | None, allow_http: bool, authority: Path | None) -> dict[str, Any]:
    """Returns the options of an httpx2 client for a server.

    Args:
        url: the server's address.
        token: the server's bearer token. None: it needs none.
        allow_http: whether the token may cross a network unencrypted.
        authority: a PEM file with the certificate that the server is verified by. None: the system's authorities.

    Raises:
        UsageError: the token would be sent unencrypted, is invalid, or the file is not a certificate.
    """
    is_local = check_url(url, allow_http)
    require_token(token)
    return {
        "base_url": url,
        # Never compressed: a small answer must not become a large one here.
        "headers": {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
        "verify": tls_context(authority) if url.startswith("https") else False,  # certificates take 0.1 s to load
        "trust_env": not is_local,  # a proxy from the environment has no business between a machine and itself
    }


def remove_user_agent(headers: MutableMapping[str, str]) -> None:
    """Deletes the header that tells a server which library sends the request, and its version."""
    del headers["User-Agent"]


def require_token(token: str | None) -> None:
    """Raises UsageError for a token that cannot be part of a header."""
    if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
        raise UsageError(
            "the token has a space or a line end in it, or is not plain ASCII",
            "give it alone, without what stands before or after it in its file",
        )


def require_plain(answer: httpx2.Response) -> None:
    """Raises RemoteError for a compressed answer."""
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise RemoteError("the answer is compressed, which was not asked for", "is there a proxy before the server?")


def _read_limited(answer: httpx2.Response, limit: int) -> bytes:
    """Returns the body, or a little more than `limit` bytes of a longer one."""
    body = bytearray()
    for chunk in answer.iter_raw():
        body += chunk
        if len(body) > limit:
            break
    return bytes(body)


def error_from(answer: httpx2.Response) -> RemoteError:
    """Returns the message and hint of an error answer as an error of this package, with the HTTP status."""
    error_fields = strict_json.error_in(_read_limited(answer, MAX_ERROR_BYTES))
    texts = (error_fields.get(name) for name in ("message", "hint"))
    message, hint = (text if isinstance(text, str) else "" for text in texts)
    error_type = Unauthorized if answer.status_code in (401, 403) else RemoteError
    if error_type is Unauthorized:  # the server's own hint is for those who speak HTTP
        hint = f"give the server's token with --token-file FILE or MILKGLASS_TOKEN; {TOKEN_PLACE}"
        if answer.status_code == 401:
            message = "the token is wrong" if "Authorization" in answer.request.headers else "no token was given"
    error = error_type(f"the server answered {answer.status_code}: {message or 'no reason given'}", hint)
    error.status = answer.status_code
    return error


def _read_object(answer: httpx2.Response) -> dict[str, Any]:
    if answer.status_code >= 300:
        raise error_from(answer)
    require_plain(answer)
    body = _read_limited(answer, MAX_ANSWER_BYTES)
    if len(body) > MAX_ANSWER_BYTES:
        raise RemoteError(f"the answer has more than {MAX_ANSWER_BYTES} bytes", "ask for less at a time")
    return strict_json.parse_object(body)


def check_url(url: str, allow_http: bool) -> bool:
    """Returns whether the host is this machine. Raises UsageError for a URL that would send the token unencrypted."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):
        parsed = httpx2.URL()
    if parsed.userinfo:  # it may be a password: it is not repeated
        raise UsageError("the server's address has a user's name in it", "give the token with --token-file")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        shown_url = "(not shown: it has an @)" if "@" in str(url) else repr(str(url)[:MAX_SHOWN_CHARACTERS])
        raise UsageError(
            f"the server's address {shown_url} is not a plain http(s) URL", f"give for example {EXAMPLE_URL}"
        )
    is_local = is_loopback(parsed.host)
    if parsed.scheme == "http" and not is_local and not allow_http:
        raise UsageError(
            f"http://{parsed.host} would carry the token in the clear",
            "use https, an ssh tunnel to 127.0.0.1, or --allow-http where the network is yours",
        )
    return is_local


def tls_context(authority: Path | None) -> Any:
    """Returns the context that verifies a server by a certificate, or True for the system's authorities.

    Raises:
        UsageError: the file is missing, or has no certificate.
    """
    if authority is None:
        return True
    if not authority.is_file():
        raise UsageError(f"there is no certificate file {authority}", "give the server's certificate, as PEM")
    import ssl

    try:
        return ssl.create_default_context(cafile=str(authority))
    except ssl.SSLError:
        raise UsageError(f"{authority} holds no certificate", "give the server's certificate, as PEM") from None

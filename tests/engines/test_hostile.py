"""Engines that stall, flood, lie or die: each ends in a clear error, none hangs, none is read without a bound."""

from __future__ import annotations

import asyncio
import gzip
import json
import time

import pytest

from milkglass.client.remote.connection import MAX_COMMENT_BYTES, MAX_EVENT_BYTES
from milkglass.engines.engine import IdsRequest
from milkglass.engines.events import MAX_EMPTY_EVENTS
from milkglass.engines.upstream import MAX_EVENTS_AFTER_END, Timeouts
from milkglass.errors import EngineBusy, RemoteError, Unreachable
from tests.engines.kit import ASKED, HASTY, HEAD, Script, answer_to, collect, event, sending, wire

OK = b"HTTP/1.1 200 OK\r\n"


def dripping(first: bytes, drop: bytes, every: float = 0.05) -> Script:
    """Sends something and then a little, again and again, without an end."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        while not writer.is_closing():
            writer.write(drop)
            await writer.drain()
            await asyncio.sleep(every)

    return script


def flooding(first: bytes, part: bytes) -> Script:
    return dripping(first, part, 0)


def resetting(first: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    return script


def json_event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


EMPTY = event([])
LISTS: dict[str, object] = {"choices": []}
for _ in range(40):
    LISTS = {"choices": [LISTS]}
Cases = dict[str, tuple[Script, type[RemoteError], str]]
SILENT: Cases = {
    "takes the request and says nothing": (sending(close=False), Unreachable, r"begin .*1\.5 s"),
    "sends its head byte by byte": (dripping(OK, b"X"), Unreachable, "did not begin"),
    "sends headers without an end": (dripping(OK, b"A: b\r\n"), Unreachable, "did not begin"),
    "begins and goes silent": (sending(HEAD, event([9]), close=False), Unreachable, r"silent for 1\.5 s"),
    "sends comments only": (dripping(HEAD, b": ping\n\n"), Unreachable, r"silent for 1\.5 s"),
    "sends half an event, slowly": (dripping(HEAD + b"data: ", b"x"), Unreachable, r"silent for 1\.5 s"),
    "refuses and goes silent": (
        sending(b"HTTP/1.1 500 X\r\nContent-Length: 9\r\n\r\n", close=False), Unreachable, "went silent",
    ),
}  # fmt: skip
HOSTILE: Cases = {
    # breaks
    "hangs up at once": (sending(), Unreachable, "broke off"),
    "resets": (resetting(b""), Unreachable, "broke off"),
    "resets in the middle": (resetting(HEAD + event([9])), Unreachable, "broke off"),
    "breaks off between events": (sending(HEAD, event([9])), Unreachable, "broke off before"),
    "breaks off in an event": (sending(HEAD, event([9]), event([8])[:40]), Unreachable, "broke off before"),
    "is done before its end": (sending(HEAD, event([9]), b"data: [DONE]\n\n"), Unreachable, "broke off before"),
    "ends a chunk early": (
        sending(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"ff\r\n" + event([9])), Unreachable, "broke off",
    ),
    # what is no answer
    "speaks another protocol": (sending(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), Unreachable, "not answer"),
    "has an endless header": (flooding(OK + b"A: ", b"b" * 65536), Unreachable, "not answer|not begin"),
    "redirects": (
        sending(b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
        RemoteError, "answered 307",
    ),
    "compresses": (
        sending(OK + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n", gzip.compress(event([9]))),
        RemoteError, "compressed",
    ),
    "has an endless error": (
        flooding(b"HTTP/1.1 500 X\r\nConnection: close\r\n\r\n", b"x" * 65536), RemoteError, "answered 500",
    ),
    # floods
    "has an event without an end": (
        flooding(HEAD + b"data: ", b"x" * 65536), RemoteError, f"more than {MAX_EVENT_BYTES}"
    ),
    "has comments without an end": (
        flooding(HEAD, b": x\n\n" * 9000), RemoteError, f"{MAX_COMMENT_BYTES} bytes of comments",
    ),
    "has empty events without an end": (flooding(HEAD, EMPTY * 100), RemoteError, f"{MAX_EMPTY_EVENTS} events"),
    "sends more tokens than asked": (flooding(HEAD, event([9])), RemoteError, "the 4 tokens"),
    "sends more in one event": (sending(HEAD, event([9] * 5, "length")), RemoteError, "the 4 tokens"),
    "goes on after its end": (sending(HEAD, event([9], "length"), event([8])), RemoteError, "the 4 tokens"),
    "goes on after its end and an empty event": (
        sending(HEAD, event([9], "length"), EMPTY, EMPTY, event([8])), RemoteError, "the 4 tokens",
    ),
    "ends twice": (sending(HEAD, event([9], "length"), event([], "stop")), RemoteError, "the 4 tokens"),
    # lies
    "sends no JSON": (sending(HEAD, b"data: 7\n\n"), RemoteError, "JSON object"),
    "sends deep JSON": (sending(HEAD, json_event(LISTS)), RemoteError, "nested"),
    "sends large numbers": (sending(HEAD, json_event({"choices": [{"token_ids": [1 << 70]}]})), RemoteError, "64 bits"),
    "has no choices": (sending(HEAD, json_event({"a": 1})), RemoteError, "choices"),
    "has two choices": (sending(HEAD, json_event({"choices": [{}, {}]})), RemoteError, "the one answer"),
    "has no ids": (sending(HEAD, json_event({"choices": [{"text": "x"}]})), RemoteError, "no token ids"),
    "sends ids that are none": (sending(HEAD, event([-1])), RemoteError, "no token ids"),
    "sends truths for ids": (sending(HEAD, event([True])), RemoteError, "no token ids"),
    "sends huge ids": (sending(HEAD, event([1 << 31])), RemoteError, "no token ids"),
    "ends for no known reason": (sending(HEAD, event([9], "abort")), RemoteError, "the answer off"),
    "stops with an error": (
        sending(HEAD, event([9]), json_event({"error": {"message": "id 4711"}})), RemoteError, "stopped",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", [*SILENT, *HOSTILE])
def test_an_engine_that(what: str) -> None:
    """Only silence is waited for a short time: on a busy machine all else may be slow."""
    script, kind, words = {**SILENT, **HOSTILE}[what]
    started = time.monotonic()
    with pytest.raises(kind, match=words) as found:
        answer_to(script, timeouts=HASTY if what in SILENT else Timeouts())
    assert found.value.hint and "id 4711" not in str(found.value)
    assert time.monotonic() - started < Timeouts().silence, "it must not hang, on a slow machine either"


@pytest.mark.parametrize("what", ["goes silent", "drips", "floods", "resets", "ends no chunk"])
def test_an_engine_that_does_not_end_after_the_end_does_not_hold_the_answer_up(what: str) -> None:
    last = event([9], "length")
    whole = HEAD + last
    script = {
        "goes silent": sending(whole, close=False),
        "drips": dripping(whole, b": x\n\n"),
        "floods": flooding(whole, EMPTY * (MAX_EVENTS_AFTER_END + 1)),
        "resets": resetting(whole),
        "ends no chunk": sending(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n" % (len(last), last)),
    }[what]
    (chunk,) = answer_to(script)
    assert chunk.ids == [9] and chunk.finish == "length"


def test_the_connection_of_a_liar_is_closed() -> None:
    async def run() -> None:
        async with wire(sending(HEAD, event([9] * 9), close=False)) as server:
            upstream = server.upstream(timeouts=Timeouts())
            with pytest.raises(RemoteError, match="more than the 4"):
                async for _ in upstream.generate("tiny", ASKED):
                    pass
            await asyncio.wait_for(server.left.wait(), 5)
            await upstream.close()

    asyncio.run(run())


def test_log_probabilities_that_do_not_fit() -> None:
    def probabilities(*content: object) -> dict[str, object]:
        return {"logprobs": {"content": list(content)}}

    right = {"token_id": 9, "logprob": -0.5, "top_logprobs": []}
    bad: list[dict[str, object]] = [
        {"logprobs": None}, probabilities(), probabilities(right, right), probabilities(7),
        probabilities({**right, "token_id": "9"}), probabilities({**right, "logprob": None}),
        probabilities({**right, "top_logprobs": None}), probabilities({**right, "top_logprobs": [{}]}),
    ]  # fmt: skip
    asked = IdsRequest([5], 2, logprobs=1)
    for more in bad:
        with pytest.raises(RemoteError):
            answer_to(sending(HEAD, event([9], "length", **more)), asked)
    (good,) = answer_to(sending(HEAD, event([9], "length", **probabilities(right))), asked)
    assert good.logprobs[0][0].logprob == -0.5


def test_a_busy_engine_holds_nobody_else_up() -> None:
    """One answer stalls while others go on: no conversation waits for another."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turns.append(1)
        writer.write(HEAD + event([9]))
        if len(turns) > 1:
            writer.write(event([8], "length"))
            writer.close()

    turns: list[int] = []

    async def run() -> None:
        async with wire(script) as server:
            upstream = server.upstream(timeouts=Timeouts())
            stalled = upstream.generate("tiny", ASKED)
            await anext(stalled)
            other = [chunk async for chunk in upstream.generate("tiny", ASKED)]
            assert [one for chunk in other for one in chunk.ids] == [9, 8]
            await stalled.aclose()
            await upstream.close()

    asyncio.run(run())


def test_more_conversations_than_connections_wait_their_turn() -> None:
    async def run() -> None:
        async with wire(sending(HEAD, event([9], "length"))) as server:
            upstream = server.upstream(timeouts=Timeouts(connections=2))

            async def one() -> list[int]:
                return [token async for chunk in upstream.generate("tiny", ASKED) for token in chunk.ids]

            assert await asyncio.gather(*(one() for _ in range(12))) == [[9]] * 12
            await upstream.close()
            assert server.connections == 12  # each was closed at its end, and none was lost

    asyncio.run(run())


def test_a_pool_that_stays_full_is_an_error_and_not_a_wait_without_end() -> None:
    async def run() -> None:
        async with wire(sending(HEAD, event([9]), close=False)) as server:
            upstream = server.upstream(timeouts=Timeouts(begin=0.2, connections=1))
            first = upstream.generate("tiny", ASKED)
            await anext(first)
            with pytest.raises(EngineBusy, match=r"\b1 connections\b.*\b0\.2 s") as found:
                await collect(upstream)
            assert found.value.status == 503 and found.value.hint
            assert len(server.calls) == 1  # nothing of the second one was sent
            await first.aclose()

    asyncio.run(run())


def test_whole_answers_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def models(script: Script) -> None:
        async def run() -> None:
            async with wire(script) as server:
                upstream = server.upstream()
                try:
                    await upstream.models()
                finally:
                    await upstream.close()

        asyncio.run(run())

    monkeypatch.setattr("milkglass.engines.upstream.MAX_ANSWER_BYTES", 1 << 20)
    cases: list[tuple[Script, str]] = [
        (flooding(HEAD, b" " * 65536), "1048576 bytes"),
        (dripping(HEAD, b" "), "went silent"),
        (sending(HEAD, b'{"data": 3}'), "list of data"),
        (sending(HEAD, b'{"data": [{"id": "a\\u001b[2Jb"}]}'), "no proper name"),
        (sending(HEAD, b'{"data": [{"id": "x", "max_model_len": -1}]}'), "max_model_len"),
    ]
    for script, words in cases:
        with pytest.raises(RemoteError, match=words):
            models(script)

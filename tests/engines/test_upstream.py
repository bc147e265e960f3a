"""One engine over HTTP: what is sent, what comes back, when it ends, and what a connection is used for."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from milkglass.engines.engine import IdsChunk, IdsRequest, ServedModel
from milkglass.engines.llamacpp import LlamaCpp
from milkglass.engines.upstream import Timeouts, Upstream
from milkglass.engines.vllm import VLLM
from milkglass.errors import RemoteError, Unauthorized, Unreachable, UnsupportedModel, UsageError
from tests.engines.kit import ASKED, HASTY, HEAD, Script, answer_to, collect, event, sending, wire

DONE = b"data: [DONE]\n\n"


def chunked(*parts: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def whole(value: object, status: str = "200 OK") -> bytes:
    raw = json.dumps(value).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(raw), raw)


def ids(found: list[IdsChunk]) -> list[int]:
    return [one for chunk in found for one in chunk.ids]


def test_an_answer_comes_as_it_is_made_and_says_why_it_ended() -> None:
    found = answer_to(sending(HEAD, event([9]), event([8, 7]), event([3], "length"), DONE))
    assert ids(found) == [9, 8, 7, 3] and [one.finish for one in found] == [None, None, "length"]


def test_the_id_that_ended_the_answer_is_left_out() -> None:
    found = answer_to(sending(HEAD, event([9]), event([2], "stop", stop_reason=2), DONE))
    assert ids(found) == [9] and found[-1].finish == "stop"


@pytest.mark.parametrize("cut", [1, 2, 7, 50])
def test_bytes_may_be_cut_anywhere(cut: int) -> None:
    raw = b": ping\n\n" + event([9]).replace(b"\n", b"\r\n") + b"event: x\n" + event([8]) + event([7], "length") + DONE
    parts = [raw[at : at + cut] for at in range(0, len(raw), cut)]
    assert ids(answer_to(sending(HEAD, *parts))) == [9, 8, 7]


def test_an_answer_without_done_is_whole_after_its_end() -> None:
    assert ids(answer_to(sending(HEAD, event([9]), event([8], "length")))) == [9, 8]


def test_nothing_but_the_call_and_fixed_headers_crosses() -> None:
    async def run() -> None:
        async with wire(sending(HEAD, event([9], "length"))) as server:
            await collect(server.upstream(token="k-1"))
            head, body = server.calls[0]
        lines = {line.split(":")[0].lower() for line in head.split("\r\n")[1:] if line}
        expected = {"host", "accept", "accept-encoding", "connection", "authorization", "content-length"}
        assert lines == expected | {"content-type"}
        assert "accept-encoding: identity" in head.lower() and "authorization: bearer k-1" in head.lower()
        assert head.startswith("POST /inference/v1/generate HTTP/1.1")
        assert json.loads(body)["token_ids"] == [5, 6, 7]

    asyncio.run(run())


def test_one_connection_serves_one_answer_after_another_and_several_serve_many() -> None:
    async def run() -> None:
        async with wire(sending(chunked(event([9]), event([8], "length"), DONE), close=False)) as server:
            upstream = server.upstream()
            for _ in range(3):
                assert ids([one async for one in upstream.generate("tiny", ASKED)]) == [9, 8]
            assert server.connections == 1
            many = [upstream.generate("tiny", ASKED) for _ in range(8)]
            assert [ids([one async for one in each]) for each in many] == [[9, 8]] * 8
            await upstream.close()

    asyncio.run(run())


def test_closing_the_iterator_closes_the_connection() -> None:
    async def run() -> None:
        async with wire(sending(HEAD, event([9]), close=False)) as server:
            upstream = server.upstream()
            answer = upstream.generate("tiny", ASKED)
            assert (await anext(answer)).ids == [9]
            await answer.aclose()
            await asyncio.wait_for(server.left.wait(), 5)
            await upstream.close()

    asyncio.run(run())


def test_a_cancelled_reader_closes_the_connection() -> None:
    async def run() -> None:
        async with wire(sending(HEAD, event([9]), close=False)) as server:
            upstream = server.upstream(timeouts=Timeouts())
            task = asyncio.ensure_future(collect(upstream))
            while not server.calls:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(server.left.wait(), 5)

    asyncio.run(run())


def test_what_an_engine_serves() -> None:
    listed = {"data": [{"id": "tiny", "object": "model", "max_model_len": 64}, {"id": "lora-1"}]}

    async def run() -> list[ServedModel]:
        async with wire(sending(whole(listed), close=False)) as server:
            upstream = server.upstream()
            try:
                return await upstream.models()
            finally:
                await upstream.close()

    assert asyncio.run(run()) == [ServedModel("tiny", 64), ServedModel("lora-1")]


def embedding(answer: object, rows: list[list[int]]) -> list[list[float]]:
    async def run() -> list[list[float]]:
        async with wire(sending(whole(answer), close=False)) as server:
            upstream = server.upstream()
            try:
                return await upstream.embed("tiny", rows)
            finally:
                await upstream.close()

    return asyncio.run(run())


def test_vectors_come_in_the_order_of_their_rows() -> None:
    data = [{"index": 1, "embedding": [3, 4.5]}, {"index": 0, "embedding": [1.0, 2.0]}]
    assert embedding({"data": data}, [[1], [2]]) == [[1.0, 2.0], [3.0, 4.5]]
    with pytest.raises(RemoteError, match=r"\b1 vectors\b.*\b2 rows"):
        embedding({"data": data[:1]}, [[1], [2]])
    with pytest.raises(RemoteError, match="not numbers"):
        embedding({"data": [{"index": 0, "embedding": "QUJD"}]}, [[1]])
    for rows in ([], [[1], []]):
        with pytest.raises(UsageError, match="nothing to embed"):
            embedding({}, rows)


def test_what_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"http://gpu\.example"):
        Upstream(LlamaCpp(), "http://gpu.example:8000")
    Upstream(LlamaCpp(), "http://gpu.example:8000", allow_http=True)
    with pytest.raises(UsageError, match=r"ftp://gpu\.example"):
        Upstream(LlamaCpp(), "ftp://gpu.example")
    with pytest.raises(UsageError, match="space"):
        Upstream(LlamaCpp(), "http://127.0.0.1:1", token="a b")
    with pytest.raises(UsageError, match=r"none\.pem"):
        Upstream(LlamaCpp(), "https://gpu.example", authority=tmp_path / "none.pem")

    async def run() -> None:
        async with wire(sending(HEAD)) as server:
            upstream = server.upstream(LlamaCpp())
            asked = IdsRequest(prompt=[1], max_tokens=2, presence_penalty=0.5)
            with pytest.raises(UsageError, match="presence_penalty .*llamacpp"):
                await anext(upstream.generate("tiny", asked))
            assert not server.calls
            await upstream.close()

    asyncio.run(run())


def test_an_engine_without_embeddings_says_so() -> None:
    from milkglass.engines.engine import IdsEngine

    class Bare(VLLM):
        embedding = IdsEngine.embedding

    async def run() -> None:
        upstream = Upstream(Bare(), "http://127.0.0.1:1")
        with pytest.raises(UnsupportedModel, match="embeddings"):
            await upstream.embed("tiny", [[1]])
        await upstream.close()

    asyncio.run(run())


def test_a_connection_that_was_not_made_is_tried_again() -> None:
    async def run() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        timeouts = Timeouts(pause=0.2, attempts=4)
        upstream = Upstream(LlamaCpp(), f"http://127.0.0.1:{port}", timeouts=timeouts)
        task = asyncio.ensure_future(upstream.models())
        await asyncio.sleep(0.1)  # the first try has failed, or its server is up: right in either case

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(whole({"data": [{"id": "tiny", "meta": {"n_ctx": 32}}]}))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", port)
        assert await task == [ServedModel("tiny", 32, kind="decoder")]
        server.close()
        await upstream.close()
        with pytest.raises(Unreachable, match=f"127.0.0.1:{port} does not"):
            await Upstream(LlamaCpp(), f"http://127.0.0.1:{port}", timeouts=HASTY).models()

    asyncio.run(run())


def test_what_may_have_been_done_is_not_asked_again() -> None:
    async def run() -> None:
        async with wire(sending()) as server:  # takes the request and hangs up
            with pytest.raises(Unreachable, match="broke off"):
                await collect(server.upstream())
            assert len(server.calls) == 1

    asyncio.run(run())


REFUSALS: dict[str, tuple[Script, type[RemoteError], str]] = {
    "400": (
        sending(whole({"error": {"message": "Token id 4711 is unknown", "type": "BadRequestError"}}, "400 X")),
        RemoteError,
        r"\b400 \(BadRequestError\)",
    ),
    "401": (sending(whole({"error": "Unauthorized"}, "401 X")), Unauthorized, "401"),
    "403": (sending(whole({"error": {"type": "a 4711"}}, "403 X")), Unauthorized, "403"),
    "404": (sending(b"HTTP/1.1 404 X\r\nContent-Length: 4\r\n\r\n4711"), RemoteError, "404"),
    "503": (sending(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"), RemoteError, "503"),
}


@pytest.mark.parametrize("status", REFUSALS)
def test_a_refusal_has_its_status_and_not_the_engines_words(status: str) -> None:
    script, kind, words = REFUSALS[status]
    with pytest.raises(kind, match=words) as found:
        answer_to(script)
    assert found.value.status == int(status) and found.value.hint and "4711" not in str(found.value)

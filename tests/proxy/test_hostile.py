"""A scripted engine behind the proxy: calls of tools, and every way in which an engine can fail."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from milkglass.engines.upstream import Timeouts, Upstream
from milkglass.proxy.app import create_app
from milkglass.proxy.backend import Backends, connect_backend
from tests import tiny
from tests.engines.kit import HASTY, HEAD, Script, Wire, event, sending
from tests.proxy.kit import Scrambled, listing, proxying, written

QUESTION = [{"role": "user", "content": tiny.TEXTS[0]}]
SHORT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Scrambled:
    return Scrambled.of(tmp_path_factory.mktemp("model"))


CALM = replace(HASTY, connect=60.0, begin=60.0, silence=60.0, body=60.0)
SILENT = ("stalls", "never answers")  # faults that nothing but a deadline ends


def asked(
    model: Scrambled,
    answer: Script,
    work: Callable[[httpx2.AsyncClient, Wire], Awaitable[Any]],
    patience: Timeouts = CALM,
) -> Any:
    """What comes of asking a proxy whose engine follows a script."""

    async def run() -> Any:
        async with listing(answer) as server:
            upstream = Upstream(server_engine(), server.url, timeouts=patience)
            backend, warnings = await connect_backend(model.codec, upstream)
            assert "does not say with which key" in warnings[0]
            transport = httpx2.ASGITransport(app=create_app(Backends([backend])))
            try:
                async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
                    return await work(client, server)
            finally:
                await upstream.close()

    return asyncio.run(run())


def server_engine() -> Any:
    from milkglass.engines.vllm import VLLM

    return VLLM()


def chatting(**more: Any) -> Callable[[httpx2.AsyncClient, Wire], Awaitable[Any]]:
    async def work(client: httpx2.AsyncClient, server: Wire) -> Any:
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 60, **more}
        return await client.post("/v1/chat/completions", json=body)

    return work


def writing(model: Scrambled, text: str, size: int = 3) -> Script:
    """An engine that answers this text, some tokens an event, and then its end."""
    ids = model.codec.sigma[model.codec.tokenizer(text, add_special_tokens=False)["input_ids"]].tolist()
    parts = [event(ids[at : at + size]) for at in range(0, len(ids), size)]
    return sending(HEAD, *parts, event([], "stop"), b"data: [DONE]\n\n")


def test_a_tool_is_called(model: Scrambled) -> None:
    script = writing(model, 'so <tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>')
    answer = asked(model, script, chatting(messages=SHORT, max_tokens=80, tools=[TOOL]))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "so "
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == {"a": "ü"}
    streamed = asked(model, script, chatting(messages=SHORT, max_tokens=80, tools=[TOOL], stream=True)).text
    deltas = [json.loads(line[6:])["choices"][0] for line in streamed.split("\n\n") if line[6:].startswith("{")]
    (called,) = [one["delta"]["tool_calls"][0] for one in deltas if "tool_calls" in one["delta"]]
    assert called["index"] == 0 and called["function"] == call["function"]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    (plain,) = asked(model, script, chatting(messages=SHORT, max_tokens=80, tools=[TOOL], tool_choice="none")).json()[
        "choices"
    ]
    assert plain["finish_reason"] == "stop" and plain["message"]["content"].startswith("so <tool_call>")


def test_a_demanded_call_is_begun_for_the_model(model: Scrambled) -> None:
    demanded = {"type": "function", "function": {"name": "f"}}
    script = writing(model, '{"x": 2}}</tool_call>')
    (choice,) = asked(
        model, script, chatting(messages=SHORT, max_tokens=40, tools=[TOOL], tool_choice=demanded)
    ).json()["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"x": 2}


def test_a_character_of_several_tokens_is_never_split(model: Scrambled) -> None:
    text = "日本 ü 👩\u200d👩 ok"
    answer = asked(model, writing(model, text, size=1), chatting(stream=True))
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in answer.text.split("\n\n") if "delta" in line]
    parts = [one.get("content", "") for one in deltas]
    assert "".join(parts) == text and not [one for one in parts if "\ufffd" in one]


def dying(*parts: bytes) -> Script:
    return sending(HEAD, *parts)


def late(seconds: float) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        writer.write(HEAD + event([5], "length") + b"data: [DONE]\n\n")
        writer.close()

    return script


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    while not writer.is_closing():
        writer.write(event([5] * 50))
        await writer.drain()


FAULTS: dict[str, tuple[Script, str]] = {
    "stalls": (sending(HEAD, event([5]), close=False), "was silent"),
    "never answers": (late(30), "did not begin to answer"),
    "resets": (reset, "broke off"),
    "dies": (dying(event([5])), "broke off"),
    "garbage": (dying(b"data: \xff\xfe{]\n\n"), "not a JSON object"),
    "floods": (flood, "more than the 60 tokens"),
    "foreign ids": (dying(event([100_000]), event([], "stop")), "an id that the model does not have"),
    "an error": (sending(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"), "answered 500"),
    "a page": (sending(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>"), "broke off"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_an_engine_is_a_clear_error(model: Scrambled, name: str) -> None:
    script, words = FAULTS[name]
    patience = HASTY if name in SILENT else CALM
    answer = asked(model, script, chatting(), patience)
    assert answer.status_code == 502, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["hint"], error
    streamed = asked(model, script, chatting(stream=True), patience)
    assert words in streamed.text
    if name in ("never answers", "garbage", "foreign ids", "an error", "a page"):
        assert streamed.status_code == 502, "an engine that gave no piece of an answer is not announced as a success"
    assert streamed.status_code in (200, 502)
    assert (streamed.status_code == 200) == streamed.text.endswith("data: [DONE]\n\n")


def logprobs_of(*pairs: tuple[int, list[int]]) -> bytes:
    """An event: of each token the id that its log-probability names, and the likeliest."""
    content = [
        {"token_id": named, "logprob": -1.0, "top_logprobs": [{"token_id": one, "logprob": -1.0} for one in best]}
        for named, best in pairs
    ]
    choice = {"index": 0, "token_ids": [5] * len(pairs), "finish_reason": None, "logprobs": {"content": content}}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (logprobs_of((5, [100_000])), "an id that the model does not have"),
        (logprobs_of((6, [5])), "of other tokens than its answer"),
    ],
)
def test_log_probabilities_that_cannot_be_end_the_answer(model: Scrambled, sent: bytes, words: str) -> None:
    script, more = dying(sent, event([], "stop")), {"logprobs": True, "top_logprobs": 1}
    answer = asked(model, script, chatting(**more))
    assert answer.status_code == 502 and words in answer.json()["error"]["message"]
    streamed = asked(model, script, chatting(stream=True, **more))
    assert streamed.status_code == 502 and words in streamed.json()["error"]["message"]


def test_an_engine_that_finds_the_request_at_fault_is_asked_once(model: Scrambled) -> None:
    """A 502 would have the official client ask again, with the whole prompt."""
    script = sending(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    assert asked(model, script, chatting()).status_code == 400


def test_a_prompt_that_no_tokenizer_makes_short_enough_is_refused_at_once(model: Scrambled) -> None:
    answer = asked(model, dying(), chatting(messages=[{"role": "user", "content": "a " * 1_000_000}]))
    assert answer.status_code == 400 and "resulted in more than 128 tokens" in answer.json()["error"]["message"]


def test_a_stream_of_responses_that_breaks_off_is_raised(model: Scrambled) -> None:
    """Events of errors that official clients merely pass on would make a broken answer look like a short one.

    On a real connection, so that the engine breaks off after the application has events: an answer that fails before
    them is an error without a stream.
    """
    import openai

    async def run() -> None:
        has_begun, loop = asyncio.Event(), asyncio.get_running_loop()

        async def break_off_when_begun(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + written(model, 20))
            await writer.drain()
            await has_begun.wait()
            writer.close()

        async with listing(break_off_when_begun) as server:

            def read() -> list[str]:
                kinds = []
                upstream = Upstream(server_engine(), server.url, timeouts=CALM)
                with proxying(model.codec, lambda: upstream) as url:
                    official = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
                    with pytest.raises(openai.APIError, match="broke off"):
                        for one in official.responses.create(model="tiny", input="hello", stream=True):
                            kinds.append(one.type)
                            loop.call_soon_threadsafe(has_begun.set)
                return kinds

            kinds = await asyncio.to_thread(read)
        assert kinds[:2] == ["response.created", "response.in_progress"] and "error" not in kinds

    asyncio.run(run())


def test_nothing_is_sent_for_a_request_that_is_refused(model: Scrambled) -> None:
    async def work(client: httpx2.AsyncClient, server: Wire) -> int:
        before = len(server.calls)
        for body in ({"messages": QUESTION, "response_format": {"type": "json_object"}}, {"messages": []}, {"x": 1}):
            assert (await client.post("/v1/chat/completions", json={"model": "tiny", **body})).status_code == 400
        assert (await client.post("/v1/chat/completions", content=b"{" * 10_000)).status_code == 400
        return len(server.calls) - before

    assert asked(model, dying(), work) == 0


def test_an_application_that_leaves_ends_its_request(model: Scrambled) -> None:
    """On a real connection: the engine's is closed as well."""

    async def run() -> None:
        async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD)
            while not writer.is_closing():
                writer.write(written(model))
                await writer.drain()
                await asyncio.sleep(0.1)

        async with listing(endless) as server:

            def leave(url: str, stream: bool) -> None:
                body = {"model": "tiny", "messages": QUESTION, "stream": stream}
                with httpx2.Client(base_url=url, timeout=60 if stream else 2.0) as client:
                    if stream:
                        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                            next(answer.iter_raw())
                    else:
                        with pytest.raises(httpx2.ReadTimeout):
                            client.post("/v1/chat/completions", json=body)

            def upstream() -> Upstream:
                return Upstream(server_engine(), server.url, timeouts=CALM)

            def both() -> None:
                with proxying(model.codec, upstream) as url:
                    for stream in (True, False):
                        server.left.clear()
                        leave(url, stream)
                        asyncio.run_coroutine_threadsafe(asyncio.wait_for(server.left.wait(), 60), loop).result(90)

            loop = asyncio.get_running_loop()
            await asyncio.to_thread(both)

    asyncio.run(run())


@pytest.mark.slow
def test_a_thousand_requests_to_an_engine_that_fails_in_every_way(model: Scrambled, tmp_path: Path) -> None:
    """Over 64 connections: each ends in an answer or a clear error, none hangs, and memory stays flat."""
    chance, scripts = random.Random(0), [*(script for script, _ in FAULTS.values()), writing(model, "all is well")]

    async def any_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await chance.choice(scripts)(reader, writer)

    async def part(client: httpx2.AsyncClient, first: int) -> Counter[int]:
        found = Counter[int]()

        async def one(number: int) -> None:
            body = {"model": "tiny", "messages": QUESTION, "max_tokens": 60, "stream": number % 2 == 0}
            async with asyncio.timeout(120), client.stream("POST", "/v1/chat/completions", json=body) as answer:
                text = (await answer.aread()).decode()
            written = "".join(re.findall(r'"content":"([^"]*)"', text)) == "all is well"
            assert written != ('"error"' in text), text[:200]  # whole, or an error: never a short answer
            found[answer.status_code] += 1

        await asyncio.gather(*(one(first + number) for number in range(250)))
        return found

    async def run() -> Counter[int]:
        found, sizes = Counter[int](), list[int]()
        async with listing(any_of) as server:

            def asking() -> None:
                limits = httpx2.Limits(max_connections=64)

                async def some(url: str, first: int) -> Counter[int]:
                    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
                        return await part(client, first)

                with proxying(model.codec, lambda: Upstream(server_engine(), server.url, timeouts=HASTY)) as url:
                    for first in range(0, 1000, 250):
                        found.update(asyncio.run(some(url, first)))
                        gc.collect()
                        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

            await asyncio.to_thread(asking)
        assert sizes[-1] - sizes[0] < 30_000, sizes  # kB
        return found

    found = asyncio.run(run())
    assert sum(found.values()) == 1000 and set(found) == {200, 502}

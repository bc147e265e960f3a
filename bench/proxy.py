"""What the proxy adds to an engine: milliseconds a request and a token, at 32 streams at once.

    python bench/proxy.py [--rounds 5] [--streams 32] [--tokens 100] [--json FILE]

An engine that computes nothing answers as vLLM does, in a process of its own; the proxy is another. The same reader
asks the engine for ids, and the proxy for text, in turn. All three share this machine's cores, and whatever else runs
there moves the clock: the processor's time of the proxy is given beside it. Requests that come all at once are measured
twice: with answers of one token, and to the first of --tokens tokens, where those of the others are in the way.
The model is SmolLM2's tokenizer under a key that permutes; no weight is read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from pathlib import Path
from typing import Any

QUESTION = [{"role": "user", "content": "When does the pharmacy close on Fridays, and do they have ear drops?"}]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Target = tuple[int, str, dict[str, Any]]  # port, path, body
WORDS = (
    "The pharmacy closes at six on Fridays, and the ear drops are kept behind the counter; please bring the letter. "
)


def engine(listener: socket.socket, ids: list[int]) -> None:
    """Answers each request with these ids over and over, `max_tokens` of them, an event each."""

    def event(choice: dict[str, Any]) -> bytes:
        data = b"data: " + json.dumps({"request_id": "x", "choices": [{"index": 0, **choice}]}).encode() + b"\n\n"
        return b"%x\r\n%s\r\n" % (len(data), data)

    events = [event({"token_ids": [one], "finish_reason": None, "logprobs": None}) for one in ids]
    end = event({"token_ids": [], "finish_reason": "length", "logprobs": None}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    listed = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 2048}]}).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            if head.startswith("GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(listed), listed))
                continue
            body = json.loads(await reader.readexactly(_length(head)))
            writer.write(HEAD)
            for place in range(body["sampling_params"]["max_tokens"]):
                writer.write(events[place % len(events)])
                await writer.drain()
                await asyncio.sleep(0)  # an engine's tokens come one by one, to all streams in turn
            writer.write(end)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, sock=listener)
        await server.serve_forever()

    asyncio.run(main())


def proxy(listener: socket.socket, url: str, key: Any) -> None:
    from milkglass.engines.upstream import Upstream
    from milkglass.engines.vllm import VLLM
    from milkglass.proxy.backend import Backends, connect_backend
    from milkglass.proxy.run import DEFAULT_LIMITS, ProxyAddress, serve

    async def main() -> None:
        backend, _ = await connect_backend(_codec(key), Upstream(VLLM(), url))
        await serve(Backends([backend]), listener, ProxyAddress(), DEFAULT_LIMITS)

    asyncio.run(main())


def _key() -> Any:
    from milkglass.client.key.key import Key, KeyInfo
    from milkglass.client.upload_names import tokenizer_digest
    from milkglass.models.resolve import resolve_model

    info = KeyInfo({"tokenizer_sha256": tokenizer_digest(resolve_model("demo:smollm2"))})
    return Key.new("sha256:bench", 49_152, (), info)


def _codec(key: Any) -> Any:
    from milkglass.client.codec.codec import Codec
    from milkglass.models.resolve import resolve_model

    return Codec.open(key, resolve_model("demo:smollm2"))


def with_tokens(body: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns a request for so many tokens."""
    if "sampling_params" in body:
        body = {**body, "sampling_params": {**body["sampling_params"], "max_tokens": count}}
    return {**body, "max_tokens": count} if "max_tokens" in body else body


async def _head(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode().lower().replace("get ", "GET ")
    except (asyncio.IncompleteReadError, ConnectionError):
        return ""


def _length(head: str) -> int:
    return next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length")), 0)


async def read(port: int, path: str, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first event with something in it, and to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = json.dumps(body).encode()
    began = time.perf_counter()
    writer.write(
        b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (path.encode(), len(data), data)
    )
    first = None
    async for line in reader:
        if first is None and (b'"token_ids"' in line or (b'"content":"' in line and b'"content":""' not in line)):
            first = time.perf_counter() - began
        if line.startswith(b"data: [DONE]"):
            break
        if b" 400 " in line or b" 502 " in line:
            raise SystemExit((await reader.read(2000)).decode())
    writer.close()
    assert first is not None
    return first, time.perf_counter() - began


async def streams(port: int, path: str, body: dict[str, Any], count: int) -> tuple[float, float]:
    """Of so many at once: the mean seconds to the first token, and the seconds until all were over."""
    began = time.perf_counter()
    found = await asyncio.gather(*(read(port, path, body) for _ in range(count)))
    return statistics.mean(first for first, _ in found), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    from milkglass.proxy.run import DEFAULT_LIMITS, ProxyAddress
    from milkglass.server.process import listen

    key = _key()
    codec = _codec(key)
    ids = codec.encode([WORDS]).ids[0].tolist()
    listeners = [listen(ProxyAddress(), DEFAULT_LIMITS) for _ in range(2)]
    for one in listeners:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ports = [one.getsockname()[1] for one in listeners]
    work = [
        multiprocessing.Process(target=engine, args=(listeners[0], ids), daemon=True),
        multiprocessing.Process(target=proxy, args=(listeners[1], f"http://127.0.0.1:{ports[0]}", key), daemon=True),
    ]
    for process in work:
        process.start()
    try:
        prompt = codec.encode_chat(QUESTION).tolist()
        body = {"model": "m", "token_ids": prompt, "sampling_params": {"max_tokens": asked.tokens, "temperature": 0}}
        chat = {"model": "m", "messages": QUESTION, "max_tokens": asked.tokens, "temperature": 0, "stream": True}
        bare, behind = (ports[0], "/inference/v1/generate", body), (ports[1], "/v1/chat/completions", chat)
        result = asyncio.run(measured(asked, bare, behind, [pid for pid in (work[1].pid,) if pid is not None]))
    finally:
        for process in work:
            process.terminate()
            process.join()
    if asked.json:
        from milkglass.experiments.runs import code_version

        asked.json.write_text(json.dumps({**result, "machine": platform.machine(), **code_version()}, indent=1) + "\n")


def processor(pids: list[int]) -> float:
    """Milliseconds of the processor that processes have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return 1000 * sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


async def measured(asked: argparse.Namespace, bare: Target, behind: Target, pids: list[int]) -> dict[str, Any]:
    """Prints what stands between the engine, `bare`, and `behind` adds, and returns it.

    Args:
        pids: the processes in between.
    """
    await streams(*bare, 2)
    for _ in range(200):
        try:
            await streams(*behind, 2)
            break
        except (AssertionError, ConnectionError):
            await asyncio.sleep(0.1)
    request, token, alone, cpu_token, cpu_request, short = (list[float]() for _ in range(6))
    one_bare, one_behind = ((*way[:2], with_tokens(way[2], 1)) for way in (bare, behind))
    for _ in range(asked.rounds):
        before = processor(pids)
        wholes = [(await streams(*one_behind, asked.streams))[1] for _ in range(10)]
        cpu_request.append((processor(pids) - before) / (10 * asked.streams))
        bares = [(await streams(*one_bare, asked.streams))[1] for _ in range(10)]
        short.append(1000 * (statistics.mean(wholes) - statistics.mean(bares)) / asked.streams)
        first, whole = await streams(*bare, asked.streams)
        before = processor(pids)
        first_behind, whole_behind = await streams(*behind, asked.streams)
        spent = (processor(pids) - before) / asked.streams - cpu_request[-1]
        cpu_token.append(spent / (asked.tokens - 1))
        request.append(1000 * (first_behind - first) / asked.streams)
        token.append(1000 * (whole_behind - whole) / (asked.streams * asked.tokens))
        alone.append(1000 * whole / (asked.streams * asked.tokens))
    single = [1000 * ((await streams(*behind, 1))[0] - (await streams(*bare, 1))[0]) for _ in range(5 * asked.rounds)]
    shown = {
        "ms a token, engine alone": alone,
        "ms a token, added by the proxy": token,
        "ms a token, processor's time of the proxy": cpu_token,
        "ms a request and its first token, likewise": cpu_request,
        "ms a request, added, one at a time": single,
        "ms a request of one token, added, all at once": short,
        "ms a request, added, beside others' tokens": request,
    }
    for name, values in shown.items():
        print(f"{name:46} {statistics.median(values):7.3f}  ({min(values):.3f} to {max(values):.3f})")
    about = {"streams": asked.streams, "tokens": asked.tokens, "rounds": asked.rounds}
    return {"about": about, **{name: {"median": statistics.median(v), "all": v} for name, v in shown.items()}}


if __name__ == "__main__":
    main()

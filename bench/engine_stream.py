"""What reading a token costs: 32 answers of an engine at once, each token an event and a write of its own.

    .venv/bin/python bench/engine_stream.py [TOKENS]

Processor time of this process a token, through the transport that upstream.py has and through httpx2's own. The engine
is a stub in another process. Figures of a busy machine are too high; their ratio is steadier.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from typing import Any

import httpx2

from milkglass.engines.engine import IdsRequest
from milkglass.engines.upstream import Upstream
from milkglass.engines.vllm import VLLM

STREAMS, PAUSE = 32, 0.004  # seconds between two tokens of an answer
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(token: int, last: bool) -> bytes:
    """As vLLM 0.32 writes one."""
    choice = {
        "index": 0, "logprobs": None, "finish_reason": "length" if last else None, "stop_reason": None,
        "token_ids": [token], "routed_experts": None, "sampling_mask": None, "weight_versions": None,
    }  # fmt: skip
    value = {"request_id": "generate-tokens-" + 32 * "0", "usage": None, "output_mode": "tokens", "choices": [choice]}
    raw = b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(raw), raw)


def engine(tokens: int, port: Any) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
        writer.write(HEAD)
        for place in range(tokens):
            writer.write(event(1000 + place, place == tokens - 1))
            await writer.drain()
            await asyncio.sleep(PAUSE)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def cost(url: str, tokens: int, own: bool) -> float:
    """Microseconds of this process a token."""
    upstream = Upstream(VLLM(), url)
    if not own:
        upstream._client = httpx2.AsyncClient(base_url=url, trust_env=False, timeout=None)

    async def one() -> int:
        request = IdsRequest([1, 2, 3], tokens)
        return sum([len(chunk.ids) async for chunk in upstream.generate("m", request)])

    started = time.process_time()
    found = sum(await asyncio.gather(*(one() for _ in range(STREAMS))))
    seconds = time.process_time() - started
    await upstream.close()
    assert found == STREAMS * tokens
    return 1e6 * seconds / found


def main(tokens: int) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(tokens, there), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{here.recv()}"
    rows = [[asyncio.run(cost(url, tokens, own)) for own in (True, False)] for _ in range(3)]
    process.terminate()
    ours, theirs = (sorted(column)[1] for column in zip(*rows, strict=True))
    print(f"{STREAMS} answers of {tokens} tokens, microseconds of processor time a token (medians of 3):")
    print(f"  upstream.py {ours:.0f}, with httpx2's own transport {theirs:.0f}: {theirs / ours:.1f} times as much")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)

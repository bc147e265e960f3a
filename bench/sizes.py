"""What sizes and times of encrypted answers tell: real answers of SmolLM2, through a real TLS connection.

    python bench/sizes.py FOLDER        FOLDER: where answers are kept; writes recipes/results/sizes.json

500 answers of at most 200 tokens to fifty questions on five topics are generated once. An engine then streams them
token by token, with pauses of 10 ms (with noise), behind `serve --attested` with the software stand-in; clients ask for
them, and a relay before each notes the TLS records. The answers to half of the questions are the attacker's own
recordings, and those to the others are read. Control: the topics of the recordings are shuffled.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from milkglass import files
from milkglass.attest import passthrough
from milkglass.attest.front import AttestationGateway
from milkglass.attest.passthrough import QUIET_HEADER
from milkglass.attest.sources import EvidenceSource, Software
from milkglass.audit.records import EncryptedAnswers
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.runs import code_version
from milkglass.models.resolve import resolve_model
from milkglass.sequences import Sequences
from milkglass.server.process import WebServer
from milkglass.server.settings import Limits
from milkglass.threat.budget import Budget
from milkglass.threat.observations import Records

OUT = Path(__file__).parents[1] / "recipes" / "results" / "sizes.json"
EACH, TOKENS, PAUSE = 100, 200, 0.010
CLIENTS = 8  # that ask at a time, each on a connection of its own
TOPICS = {
    "medicine": "Describe the symptoms and the treatment of {}.",
    "cooking": "Give me a short recipe for {}.",
    "law": "Explain what the law says about {}.",
    "travel": "What should a visitor see and do in {}?",
    "programming": "Write a small Python function for {}.",
}
THINGS = {
    "medicine": (
        "asthma",
        "a broken arm",
        "the flu",
        "diabetes",
        "migraine",
        "eczema",
        "anaemia",
        "gout",
        "measles",
        "a burn",
    ),
    "cooking": (
        "lentil soup",
        "pancakes",
        "apple pie",
        "fried rice",
        "pesto",
        "goulash",
        "bread",
        "salsa",
        "curry",
        "scones",
    ),
    "law": ("theft", "divorce", "copyright", "a lease", "privacy", "fraud", "taxes", "a will", "libel", "contracts"),
    "travel": ("Rome", "Kyoto", "Lima", "Oslo", "Cairo", "Delhi", "Prague", "Nairobi", "Quebec", "Seville"),
    "programming": (
        "sorting",
        "primes",
        "a queue",
        "reading a file",
        "dates",
        "JSON",
        "a cache",
        "hashing",
        "graphs",
        "regex",
    ),
}


def generated(folder: Path) -> list[dict[str, Any]]:
    """The answers: topic, and the text of each token."""
    path = folder / "answers.json"
    if path.is_file():
        return list(json.loads(path.read_text("utf-8")))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(resolve_model("demo:smollm2"))
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo:smollm2"), padding_side="left")
    torch.manual_seed(0)
    found = list[dict[str, Any]]()
    for number, (topic, template) in enumerate(TOPICS.items()):
        asked = [template.format(thing) for thing in THINGS[topic]]
        turns = [[{"role": "user", "content": one}] for one in asked]
        chats = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in turns]
        batch = tokenizer(chats * (EACH // len(chats)), return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = model.generate(**batch, max_new_tokens=TOKENS, do_sample=True, temperature=0.8, top_p=0.95,
                                 pad_token_id=tokenizer.pad_token_id)  # fmt: skip
        for row in out[:, batch["input_ids"].shape[1] :].tolist():
            ids = row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row
            question = len(TOPICS) * (len(found) % len(chats)) + number
            tokens = [tokenizer.decode([one]) for one in ids] or ["."]
            found.append({"topic": number, "question": question, "tokens": tokens})
    files.make_private_dir(folder)
    path.write_text(json.dumps(found), "utf-8")
    return found


def engine(answers: list[dict[str, Any]]) -> Starlette:
    """Streams answer N as vLLM does, an event a token."""
    rng = np.random.default_rng(0)

    async def chat(request: Request) -> Response:
        body = await request.json()
        tokens = answers[int(body["messages"][0]["content"])]["tokens"]

        async def parts() -> AsyncIterator[bytes]:
            for one in tokens:
                await asyncio.sleep(PAUSE * float(rng.lognormal(0, 0.2)))
                choice = {"index": 0, "delta": {"content": one}, "logprobs": None, "finish_reason": None}
                event = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": "m",
                         "choices": [choice]}  # fmt: skip
                yield b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


async def recorded(answers: list[dict[str, Any]], folder: Path, quiet: str | None) -> tuple[Records, float]:
    """Asks for every answer through TLS. Returns what the relay noted, and the seconds that it took."""
    certificate, key = certificate_of(folder)
    front = AttestationGateway(EvidenceSource(Software()), bytes(32), "http://engine")
    app = front.app()

    class Address:
        host, port, connections = "127.0.0.1", 0, Limits()
        tls_certificate, tls_key = certificate, key

    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    server = WebServer(app, Address(), Limits())  # type: ignore[arg-type]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.05)
    front._client = httpx2.AsyncClient(transport=Streaming(engine(answers)), base_url="http://engine")
    records, seconds = [list[tuple[int, float]]() for _ in answers], list[float]()
    address = ("127.0.0.1", listener.getsockname()[1])
    await asyncio.gather(*(
        asked(RecordRelay(*address), range(first, len(answers), CLIENTS), certificate, quiet, records, seconds)
        for first in range(CLIENTS)
    ))  # fmt: skip
    server.should_exit = True
    await task
    sizes = Sequences.of(np.array([size for size, _ in one], np.int64) for one in records)
    times = Sequences.of(np.array([1000 * at for _, at in one], np.int64) for one in records)
    return Records(sizes, times), sum(seconds)


async def asked(
    recorder: RecordRelay, numbers: range, certificate: Path, quiet: str | None,
    records: list[list[tuple[int, float]]], seconds: list[float],
) -> None:  # fmt: skip
    """Asks for some answers, one after the other, and notes the records of each."""
    async with recorder.running() as port, httpx2.AsyncClient(verify=str(certificate), timeout=60) as client:
        for number in numbers:
            begun = time.monotonic()
            recorder.answers.clear()
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"{number:03}"}]}
            headers = {} if quiet is None else {QUIET_HEADER: quiet}
            sent = json.dumps(body).encode()
            answer = await client.post(f"https://localhost:{port}/v1/chat/completions", headers=headers,
                                       content=sent if quiet is None else passthrough.pad_json(sent))  # fmt: skip
            answer.raise_for_status()
            records[number] = [one for part in recorder.answers for one in part]
            seconds.append(time.monotonic() - begun)


class Streaming(httpx2.ASGITransport):
    """Hands an application's answer on part by part, which httpx2's own transport collects first."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(app)
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        head: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        body = await request.aread()
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
                 "path": request.url.path, "raw_path": request.url.raw_path, "query_string": b"", "root_path": "",
                 "scheme": "http", "headers": [(k.lower(), v) for k, v in request.headers.raw],
                 "server": ("engine", 80), "client": ("127.0.0.1", 1)}  # fmt: skip
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.sleep(3_600)
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                head.set_result(message)
            elif message.get("body"):
                await queue.put(message["body"])
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await queue.put(None)

        task = asyncio.create_task(self._app(scope, receive, send))  # type: ignore[arg-type]
        start = await head

        class Stream(httpx2.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                while (part := await queue.get()) is not None:
                    yield part

            async def aclose(self) -> None:
                task.cancel()

        return httpx2.Response(start["status"], headers=start["headers"], stream=Stream())


# --- what anybody on the way sees ------------------------------------------------------------------------------------
HEAD, APPLICATION_DATA = 5, 23


@dataclass
class RecordRelay:
    """The relay.

    Attributes:
        answers: of each answer the size of each record, and the seconds from the request to it. An answer is what the
            server sends after the client sent something.
    """

    host: str
    port: int
    answers: list[list[tuple[int, float]]] = field(default_factory=list)
    _asked: float = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Yields the port at which the relay listens."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            back, forth = await asyncio.open_connection(self.host, self.port)
            await asyncio.gather(self._sent(reader, forth), self._received(back, writer))

    async def _sent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while part := await reader.read(1 << 16):
                self._asked = time.monotonic()
                if not self.answers or self.answers[-1]:
                    self.answers.append([])
                writer.write(part)
                await writer.drain()
        writer.close()

    async def _received(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting = bytearray()
        with suppress(OSError):
            while part := await reader.read(1 << 16):
                now = time.monotonic() - self._asked
                waiting += part
                while len(waiting) >= HEAD and len(waiting) >= HEAD + (size := int.from_bytes(waiting[3:5], "big")):
                    if waiting[0] == APPLICATION_DATA and self.answers:
                        self.answers[-1].append((size, now))
                    del waiting[: HEAD + size]
                writer.write(part)
                await writer.drain()
        writer.close()


def certificate_of(folder: Path) -> tuple[Path, Path]:
    import subprocess

    certificate, key = folder / "cert.pem", folder / "key.pem"
    if not certificate.is_file():
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=localhost"
        names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(
            [*command.split(), *names],
            check=True,
            capture_output=True,
        )
    return certificate, key


def main(folder: Path) -> None:
    answers = generated(folder)
    topics, questions = (np.array([one[name] for one in answers]) for name in ("topic", "question"))
    lengths = Sequences.of(
        np.array([len(json.dumps(token, ensure_ascii=False).encode()) - 2 for token in one["tokens"]], np.int64)
        for one in answers
    )
    made, figures = code_version(), list[ResultRecord]()
    for name, quiet in (("streamed", None), ("whole", "whole"), ("slots", "slots")):
        records, took = asyncio.run(recorded(answers, folder, quiet))
        answered = EncryptedAnswers(records, topics, token_lengths=lengths, question_numbers=questions)
        for note, shuffled in (("", False), ("control", True)):
            for measure, one in answered.read_by_sizes(0, Budget(600), shuffled).items():
                half = 50 * (one.high - one.low)
                figures.append(
                    ResultRecord(
                        measure=measure, value=100 * one.value, attack="sizes", variant=name, note=note, half_width=half
                    )
                )
        size = float(records.sizes.ids.sum()) / len(answers)
        figures.append(ResultRecord(measure="seconds an answer", value=took / len(answers), variant=name))
        figures.append(ResultRecord(measure="kB an answer", value=size / 1000, variant=name))
        print(name, {one.name: round(one.value, 2) for one in figures if one.variant == name}, flush=True)
    token_counts = np.array([len(one["tokens"]) for one in answers])
    for number, topic in enumerate(TOPICS):
        mean = float(token_counts[topics == number].mean())
        figures.append(ResultRecord(measure="tokens an answer", value=mean, variant=topic))
    counts = {"answers": len(answers), "topics": len(TOPICS), "questions": len({*questions.tolist()})}
    document = {"made": made, **counts, "figures": [one.round_to(3).to_json() for one in figures]}
    files.write(OUT, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Tokens a second of our own server, llama.cpp and vLLM on one scrambled SmolLM2, at 1, 8 and 32 streams, in one run.

    PYTHONPATH=. python bench/engines.py --llama-server build/llamacpp/bin/llama-server
        --vllm build/engines/bin/python [--json FILE]

`make test-engines` builds both. Each engine is started over the same folder (scheme `permuted`), asked for greedy
answers of --tokens tokens through engines/upstream.py, and ended. Our server and vLLM compute in fp32; llama.cpp takes
the dtype of the folder, which is written to its GGUF file. Prompts differ, so that no engine answers from another's
prefix. Threads: all cores, which the reader shares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.engines.catalogue import ENGINES
from milkglass.engines.engine import IdsRequest
from milkglass.engines.export.gguf_file import write_gguf
from milkglass.engines.upstream import Upstream
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.schemes.covariant.permuted import Permuted
from milkglass.system import cores
from tests.engines.real import VLLM_ENVIRONMENT, free_port, started

TOKEN, PROMPT = "a-token-of-the-bench", 32
# Without the two that leave vLLM one thread.
ENVIRONMENT = ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_CPU_KVCACHE_SPACE")


def commands(folder: Path, home: Path, asked: argparse.Namespace) -> dict[str, list[str]]:
    """By engine; {port} is filled in."""
    threads, most = str(cores()), max(asked.streams)
    found = {
        "milkglass": [sys.executable, "-m", "milkglass.cli.main", "serve", "--home", str(home), "--port", "{port}",
                      "--token-file", str(home.with_suffix(".token")), "--max-batch", str(most)]
    }  # fmt: skip
    if asked.llama_server:
        file = folder.with_suffix(".gguf")
        write_gguf(folder, file)
        found["llamacpp"] = [
            str(asked.llama_server), "-m", str(file), "--alias", "m", "--host", "127.0.0.1", "--port", "{port}",
            "--api-key", TOKEN, "-np", str(most), "-c", str(most * 256), "-t", threads,
        ]  # fmt: skip
    if asked.vllm:
        found["vllm"] = [
            str(asked.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--tokens-only",
            "--host", "127.0.0.1", "--port", "{port}", "--api-key", TOKEN, "--served-model-name", "m", "--dtype",
            "float32", "--max-model-len", "256", "--max-num-seqs", str(most), "--no-enable-prefix-caching",
        ]  # fmt: skip
    return found


async def speed(engine: str, url: str, streams: int, tokens: int, vocabulary: int, seed: int) -> float:
    """Tokens a second, all streams together."""
    upstream, made = Upstream(ENGINES[engine], url, TOKEN), 0
    rng = np.random.default_rng(seed)

    async def one() -> None:
        nonlocal made
        request = IdsRequest(rng.integers(20, vocabulary, PROMPT).tolist(), tokens, temperature=0)
        async for chunk in upstream.generate("m", request):
            made += len(chunk.ids)

    began = time.perf_counter()
    try:
        await asyncio.gather(*(one() for _ in range(streams)))
    finally:
        await upstream.close()
    return made / (time.perf_counter() - began)


def measured(engine: str, words: list[str], folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {name: VLLM_ENVIRONMENT[name] for name in ENVIRONMENT}
    words = [one.replace("{port}", str(port)) for one in words]
    found: dict[str, Any] = {}
    with started(words, port, folder.parent / f"{engine}.log", environment) as url:
        if engine == "milkglass":
            _upload(url, folder)
        size = Checkpoint.open(folder).config["vocab_size"]
        asyncio.run(speed(engine, url, 2, 8, size, 0))
        for streams in asked.streams:
            values = [asyncio.run(speed(engine, url, streams, asked.tokens, size, 1 + n)) for n in range(asked.rounds)]
            found[str(streams)] = {"median": statistics.median(values), "all": values}
            shown = f"{engine:10} {streams:3} streams  {statistics.median(values):7.1f} tokens/s"
            print(f"{shown}  ({min(values):.1f} to {max(values):.1f})", flush=True)
    return found


def _upload(url: str, folder: Path) -> None:
    from milkglass.client.remote.remote import Remote

    with Remote(url, TOKEN) as remote:
        remote.upload_model(folder, "m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="milkglass-bench-") as scratch:
        root = Path(scratch)
        base = Checkpoint.open(resolve("demo:smollm2"))
        scramble(base, new_key(base, "demo:smollm2", Permuted(), base.digest()), root / "model")
        (root / "home.token").write_text(TOKEN)
        found = {
            name: measured(name, words, root / "model", asked)
            for name, words in commands(root / "model", root / "home", asked).items()
        }
    if asked.json:
        about = {"streams": asked.streams, "tokens": asked.tokens, "rounds": asked.rounds, "cores": cores()}
        asked.json.write_text(json.dumps({"about": about, "tokens a second": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

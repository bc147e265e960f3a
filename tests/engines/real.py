"""Real engines on this machine's processor, started over a folder (`make test-engines` says where they are)."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2

from milkglass.engines.gguf_file import write_gguf

NAME, KEY = "tiny", "api-key-of-the-engine"
STARTING = 600.0  # seconds
WIDE = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # of a tiny Llama
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def installed(variable: str) -> str:
    path = os.environ.get(variable)
    assert path, f"{variable} names no program: `make test-engines` sets it"
    return path


def vllm(folder: Path, port: int) -> list[str]:
    return [
        *(installed("MILKGLASS_VLLM"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--tokens-only", "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY),
        *("--served-model-name", NAME, "--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "8"),
        *("--max-logprobs", "21", "--enforce-eager"),
    ]


def llamacpp(folder: Path, port: int) -> list[str]:
    file = folder.with_suffix(".gguf")
    if not file.exists():
        write_gguf(folder, file)
    return [
        *(installed("MILKGLASS_LLAMA_SERVER"), "-m", str(file), "--alias", NAME, "--host", "127.0.0.1"),
        *("--port", str(port), "--api-key", KEY, "-c", "512", "-np", "8", "-t", "1", "--kv-unified"),
    ]


def sglang(folder: Path, port: int) -> list[str]:
    """MILKGLASS_SGLANG_OPTIONS: what the machine needs, such as `--device cpu`."""
    return [
        *(installed("MILKGLASS_SGLANG"), "-m", "sglang.launch_server", "--model-path", str(folder)),
        *("--skip-tokenizer-init", "--incremental-streaming-output", "--host", "127.0.0.1", "--port", str(port)),
        *("--api-key", KEY, "--served-model-name", NAME, "--dtype", "float32", "--context-length", "64"),
        *os.environ.get("MILKGLASS_SGLANG_OPTIONS", "").split(),
    ]


COMMANDS: dict[str, Callable[[Path, int], list[str]]] = {"vllm": vllm, "llamacpp": llamacpp, "sglang": sglang}
WANTED = ["vllm", "llamacpp", *(["sglang"] if os.environ.get("MILKGLASS_SGLANG") else [])]


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running(engine: str, folder: Path) -> Iterator[str]:
    """The address of an engine that serves the folder under NAME."""
    port = free_port()
    with started(COMMANDS[engine](folder, port), port, folder.with_name(f"{folder.name}-{engine}.log")) as url:
        yield url


@contextmanager
def started(words: list[str], port: int, log: Path, environment: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a server that this command starts, once it is healthy. It ends with the block.
    environment: one thread without a say."""
    if environment is None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | VLLM_ENVIRONMENT
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env=environment)
        try:
            _wait(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(120)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + STARTING
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text("utf-8", "replace")[-3000:]
        try:
            if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"the engine did not start: {log.read_text('utf-8', 'replace')[-3000:]}")

"""What an attested endpoint adds to an engine: milliseconds a request and a token, at 32 streams at once.

    python bench/attested.py [--rounds 5] [--streams 32] [--tokens 100] [--json FILE]

The engine of bench/proxy.py answers. In front of it stand `milkglass serve --attested --software`, which owns the TLS
key, and `milkglass proxy --attested`, which an application asks; the evidence is the software stand-in's. A lease is
taken once, before the clock starts. The processor's time is that of both processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from proxy import QUESTION, engine, measured  # type: ignore[import-not-found]

COMMAND = [sys.executable, "-c", "from milkglass.cli.main import main; main()"]
CERTIFICATE = shlex.split(
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
    "-subj /CN=localhost -addext subjectAltName=DNS:localhost"
)


def started(folder: Path, engine_port: int) -> tuple[list[subprocess.Popen[bytes]], int]:
    """Starts the server and the client's proxy, and returns them with the proxy's port."""
    key, certificate, policy = (folder / name for name in ("key.pem", "cert.pem", "policy.toml"))
    subprocess.run([*CERTIFICATE, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server, client = free_port(), free_port()
    policy.write_text(f'version = 1\nserver = "https://localhost:{server}"\nkinds = ["software"]\n')
    options = ["--cert", certificate, "--tls-key", key, "--port", server]
    behind = ["--in-front-of", f"http://127.0.0.1:{engine_port}"]
    front = ["--attested", policy, "--certificate", certificate, "--open", "--port", client]
    commands = [["serve", "--attested", "--software", *options, *behind], ["proxy", *front]]
    return [spawned(one) for one in commands], client


def spawned(command: list[Any]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*COMMAND, *map(str, command)], stdout=quiet, stderr=quiet)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = listener.getsockname()[1]
    work = multiprocessing.Process(target=engine, args=(listener, list(range(25))), daemon=True)
    work.start()
    with tempfile.TemporaryDirectory() as folder:
        between, front = started(Path(folder), port)
        try:
            counted = {"max_tokens": asked.tokens, "temperature": 0}
            body = {"model": "m", "messages": QUESTION, "stream": True, "sampling_params": counted}
            path = "/v1/chat/completions"
            result = asyncio.run(measured(asked, (port, path, body), (front, path, body), [one.pid for one in between]))
        finally:
            for one in between:
                one.terminate()
                one.wait()
            work.terminate()
            work.join()
    if asked.json:
        from milkglass.experiments.runs import code_version

        asked.json.write_text(json.dumps({**result, "machine": platform.machine(), **code_version()}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What a split decoder costs: in one process, split, in the enclave, and with the sanitizer (CMIF, Figure 4).

    python bench/split_decoder.py [--model demo:smollm2] [--tokens 64] [--prompt 32] [--rounds 5] [--json FILE]

The server is a process of its own on loopback. Every round runs all four in turn, so that a ratio compares what ran in
the same minute; medians of the rounds. "crossing" is the time of the enclave's calls, "sanitizing" what a prompt's call
takes beyond the same call without the sanitizer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from milkglass.enclave import folder as at_rest
from milkglass.enclave.lists import RnmSettings
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import family_of
from milkglass.models.resolve import resolve
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.torch_model import language_model
from milkglass.server.inference.model_runner import TransformersRunner
from milkglass.split.decoder.client import DecoderServer, SplitSampling, SplitStream
from milkglass.split.decoder.text import SplitText

TEXT = (
    "The committee met on Tuesday to discuss the proposal for the new library, which several members had called too "
    "expensive, and after two hours it decided to ask for a second opinion. "
)


def started(model: str, home: Path) -> tuple[subprocess.Popen[str], str, str]:
    """The server's process, its address and token."""
    words = [sys.executable, "-m", "milkglass.cli.main", "split", "serve", model, "--port", "0", "--home", str(home)]
    process = subprocess.Popen(
        [*words, "--allow-unattested", "--rows-per-hour", "100000000", "--burst", "100000000"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None, "the server did not start"
    return process, found[0], (home / "token").read_text("ascii").strip()


class Bench:
    """One model, served and unsplit."""

    def __init__(self, model: str, prompt: int, tokens: int, url: str, token: str, home: Path) -> None:
        folder = resolve(model)
        checkpoint = Checkpoint.open(folder)
        self.table = checkpoint.read(family_of(checkpoint.config).locate(checkpoint).table)
        self.runner = TransformersRunner(language_model(checkpoint).eval())
        self.ids = load_tokenizer(folder)(TEXT * 8, add_special_tokens=False)["input_ids"][:prompt]
        self.text = load_tokenizer(folder).decode(self.ids)
        self.server, self.sampling = DecoderServer(url, token), SplitSampling(max_tokens=tokens)
        self.info = self.server.info()
        self.folder, self.tokens = home / "enclave", tokens
        at_rest.build(self.folder, "process", model, 30, self.server.package)

    @torch.inference_mode()
    def unsplit(self) -> float:
        began = time.perf_counter()
        rows, logits = self.runner.read([self.ids])
        newest = int(logits.argmax())
        for _ in range(self.tokens - 1):
            newest = int(rows.advance([newest]).argmax())
        return time.perf_counter() - began

    def split(self) -> dict[str, float]:
        """The embedding layer in the clear, in this process: CMIF's "CPU+GPU baseline"."""
        table = self.table.half() if self.table.dtype == torch.float32 else self.table
        stream = SplitStream(self.server, self.info, self.sampling, str(table.dtype).removeprefix("torch."))
        began = time.perf_counter()
        count = sum(1 for _ in stream.answer(table[self.ids], lambda ids: table[list(ids)]))
        total = time.perf_counter() - began
        return {"total": total, "bytes_sent": stream.sent, "bytes_received": stream.received, "made": count}

    def enclave(self, text: SplitText) -> dict[str, float]:
        """Through the enclave's process, with the sanitizer of `text.settings` or without."""
        inside = 0.0
        call = text.enclave.rows

        def rows(ids: list[int]) -> bytes:
            nonlocal inside
            began = time.perf_counter()
            result = call(ids)
            inside += time.perf_counter() - began
            return result

        text.enclave.rows = rows  # type: ignore[assignment,method-assign]
        try:
            began = time.perf_counter()
            sent = text.prompt(self.text, "", self.sampling)
            prompt = time.perf_counter() - began
            count = sum(1 for _ in text.ids(sent, self.sampling))
            total = time.perf_counter() - began
        finally:
            text.enclave.rows = call  # type: ignore[method-assign]
        return {"total": total, "prompt": prompt, "rows": inside, "made": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--model", "demo:smollm2"), ("--tokens", 64), ("--prompt", 32), ("--rounds", 5)):
        parser.add_argument(name, default=value, type=type(value))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        process, url, token = started(options.model, Path(home))
        try:
            result = measured(
                Bench(options.model, options.prompt, options.tokens, url, token, Path(home)), options.rounds
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    result |= {"model": options.model, "tokens": options.tokens, "prompt": options.prompt, "rounds": options.rounds,
               "threads": torch.get_num_threads(), "cores": os.cpu_count()}  # fmt: skip
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def measured(bench: Bench, rounds: int) -> dict[str, float]:
    parts: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            parts.setdefault(name, []).append(value)

    with at_rest.opened(bench.folder) as enclave:
        plain = SplitText(enclave, bench.server, bench.info, RnmSettings(None))
        noisy = SplitText(enclave, bench.server, bench.info, RnmSettings(3.0))
        for turn in range(rounds + 1):
            bench.text += "!"  # another text, so that nothing of the sanitizer repeats
            unsplit, split, inside, full = bench.unsplit(), bench.split(), bench.enclave(plain), bench.enclave(noisy)
            if turn:  # the first warms everything up
                sanitizing = max(0.0, full["prompt"] - inside["prompt"])
                note(
                    unsplit=unsplit, split=split["total"], enclave=inside["total"], sanitized=full["total"],
                    split_overhead=split["total"] / unsplit - 1, enclave_overhead=inside["total"] / unsplit - 1,
                    over_split=full["total"] / split["total"] - 1, sanitizing=sanitizing,
                    sanitizing_share=sanitizing / full["total"], crossing=inside["rows"] + inside["prompt"],
                    bytes_sent=split["bytes_sent"], bytes_received=split["bytes_received"],
                )  # fmt: skip
    table = bench.table.numel()
    whole = sum(one.numel() for one in bench.runner._model.parameters())
    return {**{name: statistics.median(values) for name, values in parts.items()}, "embedding_share": table / whole}


if __name__ == "__main__":
    main()

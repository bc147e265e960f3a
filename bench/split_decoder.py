"""Where the time of a split decoder goes (CMIF, Figure 4).

    python bench/split_decoder.py [--model demo:smollm2] [--tokens 64] [--prompt 32] [--rounds 5] [--json FILE]
        [--shape 7b --layers 4 --work FOLDER]

    one process          all layers here: CMIF's "GPU baseline"
    split                the embedding layer here, in the clear: its "CPU+GPU baseline"
    split, sanitized     the same, with the sanitizer in the clear
    enclave              the embedding layer in the enclave's process
    enclave, sanitized   CMIF

The server is a process of its own on loopback. Every round runs all of them in turn, so that a ratio compares what ran
in the same minute. Printed are medians of the rounds, the least and the most. The parts of a total:

    embedding   reading the text as tokens, sanitizing, and rows of the table
    crossing    the enclave's calls beyond this: what they take, less what the same work takes in the clear
    server      from a frame's arrival to its answer; in one process, the forward passes
    wire        the stream without the server and without the rows of the table: encoding, sockets, WebSocket
    other       the rest

With --shape, the model is a Llama of that shape with random weights, with the model's tokenizer and as many layers as
are asked for; it is made in FOLDER. With --json, FILE has the figures with the paper's, and FILE.svg the chart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import breakdown
import torch
from frame.random_llama import SHAPES, random_llama
from split_server import SECONDS

from milkglass.enclave import folder as at_rest
from milkglass.enclave import prompt
from milkglass.enclave.budget import RowPolicy
from milkglass.enclave.enclave import Enclave
from milkglass.enclave.package import TablePackage
from milkglass.enclave.token_sanitizer import RnmSettings, TokenSanitizer, with_candidate_lists
from milkglass.experiments.runs import code_version
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import family_of
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.torch_model import language_model
from milkglass.noise.stream import Stream
from milkglass.server.inference.model_runner import TransformersRunner
from milkglass.split.decoder.client import DecoderClient, SplitSampling, SplitStream
from milkglass.split.decoder.generator import SplitTextGenerator

TEXT = (
    "The committee met on Tuesday to discuss the proposal for the new library, which several members had called too "
    "expensive, and after two hours it decided to ask for a second opinion. "
)
NOTHING, NOISY = RnmSettings(None), RnmSettings(3.0)
K = 30
# What CMIF prints (4.3): seconds and percent beyond the CPU+GPU baseline, and RNM's share of the time, in percent.
PUBLISHED = {
    "Llama2-7B": {"seconds over split": 0.7152, "% over split": 28.78, "% sanitizing": 0.6, "% embedding layer": 1.9},
    "Llama3-8B": {"seconds over split": 0.7432, "% over split": 38.12, "% sanitizing": 0.74},
}


@dataclass
class Watch:
    """A function whose time is taken.

    Attributes:
        seconds: of all calls.
    """

    call: Callable[..., Any]
    seconds: float = 0.0

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return self.call(*args)
        finally:
            self.seconds += time.perf_counter() - began


class TimedEnclave:
    """An enclave; `calls` has the time of those that an answer needs."""

    def __init__(self, inner: Enclave) -> None:
        self.table_info, self.sanitize_text, self.vectors = (
            inner.table_info,
            Watch(inner.sanitize_text),
            Watch(inner.vectors),
        )

    @property
    def calls(self) -> float:
        return self.sanitize_text.seconds + self.vectors.seconds


@dataclass
class Timing:
    """One answer. Its parts are in seconds.

    Attributes:
        made: tokens.
        sanitizing: seconds of `embedding` that the sanitizer took.
    """

    total: float
    made: int
    embedding: float = 0.0
    crossing: float = 0.0
    server: float = 0.0
    wire: float = 0.0
    sanitizing: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    other: float = field(init=False)

    def __post_init__(self) -> None:
        self.other = self.total - self.embedding - self.crossing - self.server - self.wire


class Bench:
    """One model, served and unsplit."""

    def __init__(self, model: str, length: int, tokens: int, url: str, token: str, home: Path) -> None:
        source = resolve_model(model)
        checkpoint = Checkpoint.open(source)
        self.table = checkpoint.read(family_of(checkpoint.config).locate(checkpoint).table)
        network = language_model(checkpoint).eval()
        self.parameters = sum(one.numel() for one in network.parameters())
        self.runner, self.tokenizer = TransformersRunner(network), load_tokenizer(source)
        self.text = self.tokenizer.decode(self.tokenizer(TEXT * 8, add_special_tokens=False)["input_ids"][:length])
        self.server, self.sampling = DecoderClient(url, token), SplitSampling(max_tokens=tokens)
        self.info, self.home, self.tokens, self.turn = self.server.info(), home, tokens, 0
        package = with_candidate_lists(TablePackage.of_model(source, self.table, RowPolicy()), K)
        self.sanitizer = TokenSanitizer(package, at_rest.token_counts_of(self.tokenizer, len(package.rows), None))
        self.folder = home / "enclave"
        self.attestation_text = at_rest.build_enclave(self.folder, "process", model, K, self.server.fetch_package)[
            1
        ].attestation_text

    @torch.inference_mode()
    def one_process(self) -> Timing:
        began = time.perf_counter()
        read, embedding = Watch(self.runner.prefill), Watch(self._tokens)
        rows, logits = read([embedding().ids.tolist()])
        advance = Watch(rows.advance)
        newest = int(logits.argmax())
        for _ in range(self.tokens - 1):
            newest = int(advance([newest]).argmax())
        total = time.perf_counter() - began
        return Timing(total, self.tokens, embedding.seconds, server=read.seconds + advance.seconds)

    def split(self, settings: RnmSettings) -> Timing:
        """The embedding layer in the clear, in this process."""
        began = time.perf_counter()
        sanitizer = Watch(self.sanitizer.sanitize)
        ids = self._tokens().replace_private(lambda own: sanitizer(own, settings, Stream.of_seed("bench", self.turn)))
        vectors, rows = self.table[ids], Watch(lambda one: self.table[[one]])
        before = time.perf_counter() - began
        stream = SplitStream(self.server, self.info, self.sampling, self.info.dtype)
        made = sum(1 for _ in stream.ids(vectors, rows))
        total = time.perf_counter() - began
        server = self._server_seconds()
        return Timing(
            total, made, before + rows.seconds, 0.0, server, total - before - rows.seconds - server, sanitizer.seconds,
            stream.sent_bytes, stream.received_bytes,
        )  # fmt: skip

    def enclave(self, inner: Enclave, settings: RnmSettings, clear: Timing) -> Timing:
        """As `generate --split` does it. clear: the same text's time in the clear."""
        enclave: Any = TimedEnclave(inner)
        generator = SplitTextGenerator(enclave, self.server, self.info, settings, is_exact=True)
        began = time.perf_counter()
        sent = generator.sanitize_text(self.text, "", self.sampling)
        before = time.perf_counter() - began
        made = sum(1 for _ in generator.generate_ids(sent, self.sampling))
        total = time.perf_counter() - began
        server = self._server_seconds()
        wire = total - before - enclave.vectors.seconds - server
        return Timing(total, made, clear.embedding, enclave.calls - clear.embedding, server, wire, clear.sanitizing)

    def round(self, inner: Enclave) -> dict[str, Timing]:
        self.turn += 1
        self.text += "!"  # another text, so that nothing of the sanitizer repeats
        split, sanitized = self.split(NOTHING), self.split(NOISY)
        return {
            "one process": self.one_process(), "split": split, "split, sanitized": sanitized,
            "enclave": self.enclave(inner, NOTHING, split),
            "enclave, sanitized": self.enclave(inner, NOISY, sanitized),
        }  # fmt: skip

    def _tokens(self) -> prompt.PromptTokens:
        return prompt.prompt_tokens(
            self.tokenizer, prompt.text_pieces(self.text, ""), self.info.max_length - self.tokens, True
        )

    def _server_seconds(self) -> float:
        return float((self.home / SECONDS).read_text("ascii").split()[-1])


def started(model: str, home: Path) -> tuple[subprocess.Popen[str], str, str]:
    """The server's process, its address and token."""
    words = [sys.executable, str(Path(__file__).with_name("split_server.py")), model, str(home)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None, "the server did not start"
    return process, found[0], (home / "token").read_text("ascii").strip()


def of_shape(work: Path, model: str, shape: str, layers: int) -> Path:
    """Makes a Llama with random weights, and with the tokenizer and the special tokens of `model`."""
    work.mkdir(parents=True, exist_ok=True)
    source = resolve_model(model)
    config = Checkpoint.open(source).config
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    folder = work / f"llama-{shape}-{layers}"
    return random_llama(folder, shape, source, int(config["vocab_size"]), num_hidden_layers=layers, **ids)


def measured(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """The figures as records. The first round warms everything up."""
    with at_rest.open_enclave(bench.folder) as enclave:
        every = [bench.round(enclave) for _ in range(rounds + 1)][1:]
    values: dict[tuple[str, str], list[float]] = {}

    def note(measure: str, value: float, variant: str = "") -> None:
        values.setdefault((measure, variant), []).append(value)

    for one in every:
        each = {name: timing.total / timing.made for name, timing in one.items()}
        for name, timing in one.items():
            note("total s", timing.total, name)
            for part in breakdown.PARTS:
                note(f"{part} s", getattr(timing, part), name)
            note("forward ms", 1000 * each[name], name)
            note("tokens", timing.made, name)
            note("% over one process", 100 * (each[name] / each["one process"] - 1), name)
            note("% over split", 100 * (each[name] / each["split"] - 1), name)
        full = one["enclave, sanitized"]
        note("sanitizing ms", 1000 * full.sanitizing)
        note("% sanitizing", 100 * full.sanitizing / full.total)
        note("bytes sent", one["split"].bytes_sent)
        note("bytes received", one["split"].bytes_received)
    note("% embedding layer", 100 * bench.table.numel() / bench.parameters)
    return [
        {
            "measure": measure, **({"variant": variant} if variant else {}),
            "value": round(statistics.median(each), 4), "least": round(min(each), 4), "most": round(max(each), 4),
        }
        for (measure, variant), each in values.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--model", "demo:smollm2"), ("--tokens", 64), ("--prompt", 32), ("--rounds", 5)):
        parser.add_argument(name, default=value, type=type(value))
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (options.shape is None) != (options.work is None) or (options.layers is not None and options.shape is None):
        parser.error("--shape and --work go together, and --layers with them")
    model, about = options.model, options.model
    if options.shape is not None:
        layers = options.layers or SHAPES[options.shape]["num_hidden_layers"]
        about = f"random:{options.shape}, {layers} layers"
        model = str(of_shape(options.work, options.model, options.shape, layers))
    by, load = code_version(), os.getloadavg()[0]  # of the code that runs, whatever is committed meanwhile
    with tempfile.TemporaryDirectory() as home:
        process, url, token = started(model, Path(home))
        try:
            bench = Bench(model, options.prompt, options.tokens, url, token, Path(home))
            figures, dtypes = measured(bench, options.rounds), str(bench.runner._model.dtype).removeprefix("torch.")
            crossing = bench.info.dtype
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    result = {
        "recipe": options.json.stem if options.json else "cmif_figure4", "model": about,
        "paper": "CMIF, Figure 4 and section 4.3",
        "tokens": options.tokens, "prompt": options.prompt, "rounds": options.rounds, "dtype": dtypes,
        "vectors": crossing, "threads": torch.get_num_threads(), "cores": os.cpu_count(),
        "machine": f"{platform.machine()}, {processor()}", "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "enclave": bench.attestation_text, "made": by, "figures": figures, "published": PUBLISHED,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        options.json.with_suffix(".svg").write_text(breakdown.drawn(result), "utf-8")


def processor() -> str:
    """Its name, where the system says it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text("ascii", "replace")) if info.is_file() else None
    return found[1] if found else platform.processor()


if __name__ == "__main__":
    main()

"""Times the main jobs on one GPU: attacks, and a Llama of a real shape with random weights, beside other programs.

    python bench/gpu.py OUT --texts sst2/train.tsv --chats alpaca.jsonl --tokenizer FOLDER [--shape 8b] [--only PART]

OUT/gpu.json has the figures, and is written again after each one, so that a run that is stopped keeps what it has. The
figures of other parts stay in it if the same commit measured them on the same machine.
Parts, in order:

    attacks  seconds of each attack on MiniLM under ObfusLM, on the processor and on the GPU
    step     a step of fine-tuning a decoder (LoRA, outer layers and tables in full), beside transformers' own Trainer
    job      obfuscate --delta, upload, generate, and tokens a second at 1, 8 and 32 streams, beside transformers' own
             generate of as many rows

Each command is the user's own, in a process of its own. `FOLDER` holds a tokenizer of the shape's 128,256 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from milkglass.errors import MilkglassError
from milkglass.experiments.record import ResultRecord, read
from milkglass.experiments.runs import now

if TYPE_CHECKING:
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.threat.attack import Attack
    from milkglass.threat.defence import Client, Server

MILKGLASS = (sys.executable, "-m", "milkglass.cli.main")
SHAPES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8},
}  # fmt: skip
PASSPHRASE = "correct horse battery staple nine"
PORT = 8497
STREAMS = (1, 8, 32)
TOKENS, PROMPT = 64, 32  # of each stream
ROUNDS = 3  # of each speed; the first one warms up and is not counted
STEPS, BATCH = 16, 8  # of fine-tuning; the first four are not timed
SKIPPED = 4
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
PRIVATE, PUBLIC = 300, 2000  # texts of the attacks
SLOW = 900  # seconds after which a command is stopped


class Figures:
    """The figures so far, as records (milkglass/experiments/record.py), and the file that has them."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self.about, self.records = path, about, list[ResultRecord]()
        if path.is_file():
            stored = json.loads(path.read_text("utf-8"))
            if {name: value for name, value in stored.items() if name != "figures"} == about:
                self.records = read(stored)

    def add(self, measure: str, value: float, **parts: str) -> None:
        """Adds a figure and writes the file. `parts` are fields of the record, such as its attack."""
        added = ResultRecord(measure=measure, value=value, **parts)  # type: ignore[arg-type]
        self.records = [record for record in self.records if record.name != added.name] + [added]
        document = {**self.about, "figures": [record.to_json() for record in self.records]}
        self.path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        print(self.records[-1].name, value, flush=True)


# --- attacks ----------------------------------------------------------------------------------------------------------
def attacks(asked: argparse.Namespace, figures: Figures) -> None:
    """Times each attack on each device, over the same texts and key."""
    with asked.texts.open(encoding="utf-8", newline="") as lines:
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(rows)
        texts = list(dict.fromkeys(row[0].strip() for row in rows if len(row[0].split()) > 4))[: PRIVATE + PUBLIC]
    for name in ("cluster-solve", "invbert", "decipherment"):
        for device in ("cuda", "cpu"):
            for measure, value in _in_child("attacked", {"MILKGLASS_DEVICE": device}, name, texts).items():
                figures.add(measure, value, attack=name, note=device)


def attacked(name: str, texts: list[str]) -> dict[str, float]:
    """Returns the seconds, by the clock, of an audit with one attack, and which share of the tokens it reads."""
    from milkglass.attacks.catalogue import ATTACKS
    from milkglass.attacks.hidden_states.invbert import InvBert
    from milkglass.defences.obfuscated_tables import TableDefence
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.resolve import resolve
    from milkglass.schemes.obfuslm import ObfusLM
    from milkglass.threat.defence import LabelledTexts

    attack = InvBert(epochs=1) if name == "invbert" else ATTACKS[name]
    base = Checkpoint.open(resolve("demo:minilm"))
    corpus = LabelledTexts(tuple(texts[PRIVATE:]), tuple([0, 1] * (PUBLIC // 2)))
    defence, secret = TableDefence(ObfusLM(k=10, epsilon=0.1)), bytes(range(32))
    with tempfile.TemporaryDirectory(prefix="milkglass-bench-") as work:
        client, server = defence.split(base, corpus, secret, Path(work) / "server")
        return _audited(base, client, server, texts, name, attack)


def _audited(
    base: Checkpoint, client: Client, server: Server, texts: list[str], name: str, attack: Attack
) -> dict[str, float]:
    """Returns what `attacked` does, for halves that were split already."""
    from milkglass.lab import audit_defence
    from milkglass.metrics.interval import Interval

    began = time.perf_counter()
    audit = audit_defence(base, client, server, texts[:PRIVATE], texts[PRIVATE:], attacks={name: attack}, budget="30m")
    spent = time.perf_counter() - began
    found = [cell.measures["tokens top-1"] for cell in audit.cells if "tokens top-1" in (cell.measures or {})]
    shares = [one.value if isinstance(one, Interval) else one for one in found]
    return {"seconds": round(spent, 2), **({"tokens top-1": round(float(max(shares)), 4)} if shares else {})}


# --- a decoder --------------------------------------------------------------------------------------------------------
def decoder(asked: argparse.Namespace) -> Path:
    """Returns a Llama of the shape with random weights. Rows of its table lie in clusters, as a trained one's do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    out: Path = asked.out / f"llama-{asked.shape}"
    if out.is_dir():
        return out
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=128_256, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=128_000, eos_token_id=128_009, pad_token_id=128_004, rope_theta=500_000.0, **SHAPES[asked.shape],
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
        size, width = config.vocab_size, config.hidden_size
        centres = torch.randn(size // 20 + 1, width)
        with torch.no_grad():
            rows = centres[torch.randint(0, len(centres), (size,))] + 0.7 * torch.randn(size, width)
            model.model.embed_tokens.weight.copy_(rows * 0.02)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(partial, max_shard_size="5GB")
    for file in asked.tokenizer.iterdir():
        shutil.copy(file, partial / file.name)
    return partial.rename(out)


# --- a step of fine-tuning --------------------------------------------------------------------------------------------
def step(asked: argparse.Namespace, figures: Figures) -> None:
    """Times a step of ours and of transformers' Trainer, each twice, in turn."""
    folder = str(decoder(asked))
    sides: dict[str, list[float]] = {"ours": [], "trainer": []}
    for _ in range(2):
        for side in sides:
            sides[side] += _in_child("step_seconds", {}, side, folder, str(asked.out / "step"), str(asked.chats))
            shutil.rmtree(asked.out / "step", ignore_errors=True)
    for side, spent in sides.items():
        figures.add("seconds of a step", round(statistics.median(spent), 4), variant=side)
    figures.add(
        "step beside the Trainer's", round(statistics.median(sides["ours"]) / statistics.median(sides["trainer"]), 3)
    )


def step_seconds(side: str, model: str, work: str, chats: str) -> list[float]:
    """Returns the seconds of each step after the first ones. Both sides train the same parts on the same rows."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    from milkglass.client.data.marked_rows import write_tensors
    from milkglass.server import training
    from milkglass.server.jobs import lora
    from milkglass.server.jobs.data import Collate, TrainingDataset
    from milkglass.server.jobs.trainer import Reporter
    from milkglass.server.spec import Hyperparameters, JobSpec

    folder = Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [
        min(256, max(24, len(line) // 4)) for line in Path(chats).read_text("utf-8").splitlines()[: STEPS * BATCH]
    ]
    draws = np.random.default_rng(0)
    ids = [draws.integers(20, 120_000, length).astype(np.int32) for length in lengths]
    joined = np.concatenate(ids)
    tensors = {"lengths": np.array(lengths), "input_ids": joined, "token_labels": joined.copy()}
    write_tensors(folder / "train.safetensors", [tensors])
    chosen = Hyperparameters.model_validate(
        {"task": "causal-lm", "max_steps": STEPS, "batch_size": BATCH, "dtype": DTYPE, "logging_steps": 1,
         "save_steps": 10_000, "max_length": 512}
    )  # fmt: skip
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            if state.global_step == STEPS:
                raise _Over

    if side == "ours":
        spec = JobSpec.model_validate({"model": model, "train": str(folder / "train.safetensors"),
                                       "hyperparameters": chosen})  # fmt: skip
        reporter = Reporter(folder)
        reported = reporter.on_step_end

        def both(*args: Any, **kwargs: Any) -> Any:
            answer = reported(*args, **kwargs)
            Clock().on_step_end(*args, **kwargs)
            return answer

        reporter.on_step_end = both  # type: ignore[method-assign]
        with suppress(_Over):
            training.train(folder, spec, reporter)
    else:
        set_seed(chosen.seed)
        network = training.load_model(model, chosen)
        lora.prepare(network, chosen)
        rows = TrainingDataset(folder / "train.safetensors", "causal-lm", chosen.max_length)
        arguments = TrainingArguments(
            str(folder / "bare"), max_steps=STEPS, per_device_train_batch_size=BATCH, bf16=DTYPE == "bfloat16",
            seed=chosen.seed, learning_rate=chosen.learning_rate, train_sampling_strategy="group_by_length",
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(network, arguments, train_dataset=rows, data_collator=Collate(0), callbacks=[Clock()])
        with suppress(_Over):
            trainer.train()
    return np.diff(times)[SKIPPED:].tolist()  # type: ignore[no-any-return]


class _Over(Exception):
    """The last step is done: what comes after it is not timed."""


# --- the main job -----------------------------------------------------------------------------------------------------
def job(asked: argparse.Namespace, figures: Figures) -> None:
    """Times a user's commands, and the server's answers."""
    out, model = asked.out, decoder(asked)
    key, scrambled, home = out / "key.mgkey", out / "scrambled", out / "home"
    for old in (scrambled, home):
        shutil.rmtree(old, ignore_errors=True)
    key.unlink(missing_ok=True)
    figures.add(
        "seconds of obfuscate", _timed([*MILKGLASS, "obfuscate", model, scrambled, "--key", key, "--delta"], out)
    )
    size = sum(path.stat().st_size for path in scrambled.iterdir())
    figures.add("GB of the delta", round(size / 1e9, 2))
    with _server(out, home, model) as url:
        token = (home / "token").read_text("utf-8").strip()
        whole = [*MILKGLASS, "upload", scrambled, "--name", "big", "--server", url, "--token-file", home / "token"]
        figures.add("seconds of upload", _timed(whole, out))
        asks = [*MILKGLASS, "generate", "big", "My patient has a cough.", "--raw", "--max-tokens", "16", "--key", key,
                "--server", url, "--token-file", home / "token"]  # fmt: skip
        figures.add("seconds of the first answer", _timed(asks, out))
        for streams in STREAMS:
            found = [asyncio.run(_speed(url, token, streams, seed)) for seed in range(ROUNDS)][1:]
            figures.add("tokens a second", round(statistics.median(speed for speed, _ in found), 1), note=str(streams))
            figures.add(
                "seconds to a token", round(statistics.median(first for _, first in found), 3), note=str(streams)
            )
    shutil.rmtree(home, ignore_errors=True)
    for streams, speed in _in_child("own_generate", {}, str(model)).items():
        figures.add("tokens a second", speed, variant="transformers", note=str(streams))


async def _speed(url: str, token: str, streams: int, seed: int) -> tuple[float, float]:
    """Returns tokens a second over all streams, and the median seconds to a first token."""
    from milkglass.engines.catalogue import ENGINES
    from milkglass.engines.engine import IdsRequest
    from milkglass.engines.upstream import Upstream

    upstream, draws = Upstream(ENGINES["milkglass"], url, token), np.random.default_rng(seed)
    made, first = 0, list[float]()

    async def one() -> None:
        nonlocal made
        asked, came = time.perf_counter(), False
        request = IdsRequest(draws.integers(20, 120_000, PROMPT).tolist(), TOKENS, temperature=0)
        async for chunk in upstream.generate("big", request):
            if not came:
                first.append(time.perf_counter() - asked)
                came = True
            made += len(chunk.ids)

    began = time.perf_counter()
    try:
        await asyncio.gather(*(one() for _ in range(streams)))
    finally:
        await upstream.close()
    return made / (time.perf_counter() - began), statistics.median(first)


def own_generate(folder: str) -> dict[int, float]:
    """Returns tokens a second of transformers' own greedy generate, of as many rows at a time."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    speeds = {}
    for rows in STREAMS:
        ids = torch.randint(20, 120_000, (rows, PROMPT), device=device)
        for _ in range(2):
            began = time.perf_counter()
            with torch.inference_mode():
                made = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS,
                    do_sample=False, pad_token_id=128_004,
                )  # fmt: skip
            made.cpu()
            spent = time.perf_counter() - began
        speeds[rows] = round(rows * TOKENS / spent, 1)
    return speeds


@contextmanager
def _server(out: Path, home: Path, model: Path) -> Iterator[str]:
    """Runs a server on loopback, and ends it."""
    options = ["--home", home, "--port", str(PORT), "--base-models", model, "--max-batch", str(max(STREAMS))]
    environment = {name: value for name, value in os.environ.items() if name != "MILKGLASS_PASSPHRASE"}
    url = f"http://127.0.0.1:{PORT}"
    with (out / "serve.log").open("wb") as log:
        server = subprocess.Popen([*MILKGLASS, "serve", *map(str, options)], stdout=log, stderr=log, env=environment)
        try:
            for _ in range(120):
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=1).close()
                    break
                time.sleep(0.5)
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def _timed(command: list[Any], out: Path) -> float:
    """Returns the seconds of a command. Raises RuntimeError with its last lines if it fails."""
    environment = {**os.environ, "MILKGLASS_PASSPHRASE": PASSPHRASE}
    began = time.perf_counter()
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, env=environment, timeout=SLOW,
        cwd=out,
    )  # fmt: skip
    spent = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{command[3]} ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    return round(spent, 2)


def _in_child(name: str, environment: Mapping[str, str], *values: Any) -> Any:
    """Returns what a function of this file returns in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "child", name], input=json.dumps(values), text=True, check=False,
        env={**os.environ, **environment}, stdout=subprocess.PIPE, timeout=SLOW,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} failed; what it said is above")
    answer = json.loads(done.stdout.splitlines()[-1])
    return {int(k) if k.isdigit() else k: v for k, v in answer.items()} if isinstance(answer, dict) else answer


PARTS: Mapping[str, Callable[[argparse.Namespace, Figures], None]] = {"attacks": attacks, "step": step, "job": job}


def main() -> int:
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(globals()[sys.argv[2]](*json.load(sys.stdin))))
        return 0
    parser = argparse.ArgumentParser(description="Time the main jobs on one GPU.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="SST-2's train.tsv")
    parser.add_argument("--chats", type=Path, required=True, help="a file whose lines are as long as training rows")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    asked = parser.parse_args()
    for name in ("out", "texts", "chats", "tokenizer"):
        setattr(asked, name, getattr(asked, name).resolve())
    asked.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    about = {"made": now(), "gpu": gpu, "cores": os.cpu_count(), "torch": torch.__version__, "shape": asked.shape}
    figures, failed = Figures(asked.out / "gpu.json", about), 0
    for name in asked.only:
        try:
            PARTS[name](asked, figures)
        except (RuntimeError, OSError, MilkglassError, subprocess.TimeoutExpired) as error:  # the other parts still run
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())

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
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame.child import in_child
from frame.random_llama import SHAPES, random_llama
from frame.rounds import paired
from parts.fine_tuning import Losses, job_losses, step_seconds, trainer_losses
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

from milkglass.attacks.catalogue import ATTACKS
from milkglass.attacks.hidden_states.invbert import InvBert
from milkglass.client.data.marked_rows import write_tensors
from milkglass.defences.obfuscated_tables import TableDefence
from milkglass.demo.run import ServerProcess
from milkglass.device import DEVICE_VARIABLE
from milkglass.engines.catalogue import ENGINES
from milkglass.engines.engine import IdsRequest
from milkglass.engines.upstream import Upstream
from milkglass.errors import MilkglassError
from milkglass.experiments.record import ResultRecord, read_records
from milkglass.experiments.runs import code_version
from milkglass.lab import audit_defence
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.rows.examples import read_examples
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.server.jobs import lora
from milkglass.server.jobs.data import PaddingCollator, TrainingDataset
from milkglass.server.spec import Hyperparameters
from milkglass.server.training import load_model
from milkglass.threat.defence import LabelledTexts

MILKGLASS = (sys.executable, "-m", "milkglass.cli.main")
PASSPHRASE = "correct horse battery staple nine"
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
                self.records = read_records(stored)

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
    rows = read_examples(asked.texts)
    texts = list(dict.fromkeys(row.text for row in rows if len(row.text.split()) > 4))[: PRIVATE + PUBLIC]
    for name in ("cluster-solve", "invbert", "decipherment"):
        for device in ("cuda", "cpu"):
            seconds, read_share = in_child(attacked, name, device, texts)
            figures.add("seconds", seconds, attack=name, note=device)
            figures.add("tokens top-1", read_share, attack=name, note=device)


def attacked(name: str, device: str, texts: list[str]) -> tuple[float, float]:
    """Returns the seconds, by the clock, of an audit with one attack, and which share of the tokens it reads."""
    os.environ[DEVICE_VARIABLE] = device  # of this process, which has computed nothing yet
    attack = InvBert(epochs=1) if name == "invbert" else ATTACKS[name]
    base = Checkpoint.open(resolve_model("demo:minilm"))
    private, public = texts[:PRIVATE], texts[PRIVATE:]
    corpus = LabelledTexts(tuple(public), tuple([0, 1] * (PUBLIC // 2)))
    defence = TableDefence(ObfusLM(k=10, epsilon=0.1))
    with tempfile.TemporaryDirectory(prefix="milkglass-bench-") as work:
        client, server = defence.split(base, corpus, bytes(range(32)), Path(work) / "server")
        began = time.perf_counter()
        audit = audit_defence(base, client, server, private, public, attacks={name: attack}, budget="30m")
        spent = time.perf_counter() - began
    shares = [cell.measures["tokens top-1"].value for cell in audit.results if cell.state == "done"]
    return round(spent, 2), round(max(shares), 4)


# --- a decoder --------------------------------------------------------------------------------------------------------
def decoder(asked: argparse.Namespace) -> Path:
    """Returns a Llama of the shape with random weights."""
    ids = {"bos_token_id": 128_000, "eos_token_id": 128_009, "pad_token_id": 128_004, "rope_theta": 500_000.0}
    return random_llama(asked.out / f"llama-{asked.shape}", asked.shape, asked.tokenizer, 128_256, **ids)


# --- a step of fine-tuning --------------------------------------------------------------------------------------------
def step(asked: argparse.Namespace, figures: Figures) -> None:
    """Times a step of ours and of transformers' Trainer, in turn."""
    model, work = decoder(asked), asked.out / "step"
    lengths = [len(line) // 4 for line in asked.chats.read_text("utf-8").splitlines()[: STEPS * BATCH]]
    ours, trainer = (partial(in_child, side, model, work, lengths) for side in (our_step, trainer_step))
    sides = paired(ours, trainer, rounds=2, warm=False)
    for name, spent in zip(("ours", "trainer"), sides, strict=True):
        figures.add("seconds of a step", round(statistics.median(spent), 4), variant=name)
    figures.add("step beside the Trainer's", round(statistics.median(sides[0]) / statistics.median(sides[1]), 3))
    shutil.rmtree(work)


def settings() -> Hyperparameters:
    """Returns the settings of both sides. Each step reports its loss, for which it waits for the device."""
    chosen = {"task": "causal-lm", "max_steps": STEPS, "batch_size": BATCH, "dtype": DTYPE, "logging_steps": 1}
    return Hyperparameters.model_validate({**chosen, "save_steps": 10_000})


def rows_file(work: Path, lengths: list[int]) -> Path:
    """Writes rows of random ids as the server takes them, and returns their file."""
    work.mkdir(parents=True, exist_ok=True)
    draws, sizes = np.random.default_rng(0), np.clip(lengths, 24, 256)
    ids = draws.integers(20, 120_000, sizes.sum()).astype(np.int32)
    write_tensors(work / "train.safetensors", [{"lengths": sizes, "input_ids": ids, "token_labels": ids}])
    return work / "train.safetensors"


def our_step(model: Path, work: Path, lengths: list[int]) -> float:
    """Returns the seconds of a step of a job."""
    return without_first(job_losses(work / "job", model, rows_file(work, lengths), settings()))


def trainer_step(model: Path, work: Path, lengths: list[int]) -> float:
    """Returns the seconds of a step of a bare Trainer, which trains the same parts of the model on the same rows."""
    chosen = settings()
    set_seed(chosen.seed)
    network = load_model(str(model), chosen)
    lora.inject_adapters(network, chosen)
    arguments = TrainingArguments(
        str(work / "bare"), max_steps=STEPS, per_device_train_batch_size=BATCH, bf16=DTYPE == "bfloat16",
        seed=chosen.seed, learning_rate=chosen.learning_rate, adam_beta2=chosen.adam_beta2,
        train_sampling_strategy="group_by_length", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    rows = TrainingDataset(rows_file(work, lengths), "causal-lm", chosen.max_length)
    losses = trainer_losses(model=network, args=arguments, train_dataset=rows, data_collator=PaddingCollator(0))
    return without_first(losses)


def without_first(losses: Losses) -> float:
    """Returns the seconds of a step after the first ones, which warm up."""
    return step_seconds({number: report for number, report in losses.items() if number > SKIPPED})


# --- the main job -----------------------------------------------------------------------------------------------------
def job(asked: argparse.Namespace, figures: Figures) -> None:
    """Times a user's commands, and the server's answers."""
    out, model = asked.out, decoder(asked)
    key, scrambled, home = out / "key.mgkey", out / "scrambled", out / "home"
    for old in (scrambled, home):
        shutil.rmtree(old, ignore_errors=True)
    key.unlink(missing_ok=True)
    obfuscate = [*MILKGLASS, "obfuscate", model, scrambled, "--key", key, "--delta"]
    figures.add("seconds of obfuscate", _timed(obfuscate, out))
    size = sum(path.stat().st_size for path in scrambled.iterdir())
    figures.add("GB of the delta", round(size / 1e9, 2))
    with ServerProcess(home, (model,), out / "serve.log", ("--max-batch", str(max(STREAMS)))) as service:
        url = service.wait_for_url()
        at = ["--server", url, "--token-file", home / "token"]
        figures.add("seconds of upload", _timed([*MILKGLASS, "upload", scrambled, "--name", "big", *at], out))
        asks = ["big", "My patient has a cough.", "--raw", "--max-tokens", "16", "--key", key]
        figures.add("seconds of the first answer", _timed([*MILKGLASS, "generate", *asks, *at], out))
        for streams in STREAMS:
            found = [asyncio.run(_speed(url, service.token, streams, seed)) for seed in range(ROUNDS)][1:]
            speed, first = (round(statistics.median(values), 3) for values in zip(*found, strict=True))
            figures.add("tokens a second", speed, note=str(streams))
            figures.add("seconds to a token", first, note=str(streams))
    shutil.rmtree(home, ignore_errors=True)
    for streams, speed in in_child(own_generate, model).items():
        figures.add("tokens a second", speed, variant="transformers", note=str(streams))


async def _speed(url: str, token: str, streams: int, seed: int) -> tuple[float, float]:
    """Returns tokens a second over all streams, and the median seconds to a first token."""

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


def own_generate(folder: Path) -> dict[int, float]:
    """Returns tokens a second of transformers' own greedy generate, of as many rows at a time."""
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


PARTS: Mapping[str, Callable[[argparse.Namespace, Figures], None]] = {"attacks": attacks, "step": step, "job": job}


def main() -> int:
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
    about = {
        "made": code_version(), "gpu": gpu, "cores": os.cpu_count(),
        "torch": torch.__version__, "shape": asked.shape,
    }  # fmt: skip
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

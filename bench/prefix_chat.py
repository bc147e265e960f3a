"""Time to the first token of each turn of a chat, with and without the prefix cache of our server, in one run.

    python bench/prefix_chat.py [--turns 5] [--question 80] [--answer 40] [--json FILE]

A scrambled SmolLM2 (scheme `permuted`) in fp32, greedy. The two take turns at every turn of the chat; both get the same
ids, and answers that differ are counted. Only the ratio is worth comparing between machines.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.schemes.covariant.permuted import Permuted
from milkglass.server.inference.generator import Generator
from milkglass.server.inference.model_runner import TransformersRunner
from milkglass.server.inference.prefixes import PrefixRunner
from milkglass.server.inference.sampling import SamplingParams
from milkglass.server.inference.sequence import Sequence
from milkglass.system import cores

ROOM = 512 << 20


def asked_of(engine: Generator, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
    """Seconds to the first token, and the answer."""
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    began = time.perf_counter()
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    engine.submit([Sequence(prompt, sampling, lambda *said: heard.put(said), heard.put)])
    answer, first = [], 0.0
    while True:
        said = heard.get()
        if not isinstance(said, tuple):
            raise SystemExit(f"the engine failed: {said}")
        first = first or time.perf_counter() - began
        answer.append(said[0])
        if said[1]:
            return first, answer


def chat(model: Any, asked: argparse.Namespace, seed: int) -> tuple[list[list[float]], int]:
    """Seconds [turn][without, with], and how many answers differ."""
    rng = np.random.default_rng(seed)
    engines = [Generator(runner, 4, 4) for runner in (TransformersRunner(model), PrefixRunner(model, ROOM))]
    for engine in engines:
        engine.start()
    spoken: list[int] = []
    seconds, different = [], 0
    for _ in range(asked.turns):
        spoken += rng.integers(20, model.config.vocab_size, asked.question).tolist()
        told = [asked_of(engine, spoken, asked.answer) for engine in engines]
        seconds.append([first for first, _ in told])
        different += told[0][1] != told[1][1]
        spoken = spoken + told[0][1]
    for engine in engines:
        engine.close()
    return seconds, different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--question", type=int, default=80)
    parser.add_argument("--answer", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory(prefix="milkglass-bench-") as scratch:
        base = Checkpoint.open(resolve("demo:smollm2"))
        scramble(base, new_key(base, "demo:smollm2", Permuted(), base.digest()), Path(scratch, "model"))
        model = AutoModelForCausalLM.from_pretrained(Path(scratch, "model"), dtype=torch.float32).eval()
    asked_of_all = [chat(model, asked, seed) for seed in range(asked.rounds)]
    found = []
    for turn in range(asked.turns):
        without, with_it = (statistics.median(one[turn][side] for one, _ in asked_of_all) for side in (0, 1))
        found.append({"without": without, "with": with_it, "ratio": without / with_it})
        print(f"turn {turn + 1}  without {without:6.3f} s  with {with_it:6.3f} s  ratio {without / with_it:5.2f}")
    different = sum(one for _, one in asked_of_all)
    print(f"different answers {different} of {asked.turns * asked.rounds}")
    if asked.json:
        asked.json.write_text(json.dumps({"turns": found, "different": different}, indent=1) + "\n")


if __name__ == "__main__":
    main()

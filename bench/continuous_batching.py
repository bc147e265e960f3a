"""Tokens a second of our scheduler and cache, and of transformers' continuous batching with paged cache, in one run.

    PYTHONPATH=. python bench/continuous_batching.py [--model tiny|smollm2] [--runner transformers] [--json FILE]

Both get the same scrambled model (scheme `permuted`) in fp32, the same prompts and greedy answers of --tokens tokens,
and take turns: ours, theirs, ours, ... Neither goes through the web. Only the ratio is worth comparing between
machines; answers that differ are counted. Memory for the paged cache is allotted before the clock starts, and prefixes
are not shared.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame.generation import Answers, answered
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.schemes.covariant.permuted import Permuted
from milkglass.system import cores
from tests import tiny

PROMPT, PAGE = 32, 32


def theirs(manager: Any, prompts: Answers, tokens: int) -> Answers:
    order = manager.add_requests(inputs=prompts, max_new_tokens=tokens)
    found: dict[str, list[int]] = {}
    while len(found) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise SystemExit("transformers' engine ended")
        if result is not None and result.is_finished():
            if result.error is not None:
                raise SystemExit(f"transformers' engine failed: {result.error}")
            found[result.request_id] = result.generated_tokens
    return [found[one] for one in order]


def compared(model: Any, streams: int, asked: argparse.Namespace) -> dict[str, Any]:
    rng, vocabulary = np.random.default_rng(streams), model.config.vocab_size
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=asked.tokens)
    blocks = streams * -(-(PROMPT + asked.tokens + 1) // PAGE) + 2
    paged = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=blocks, max_batch_tokens=max(streams * PROMPT, 64), max_requests_per_batch=streams,
        allow_block_sharing=False,
    )  # fmt: skip
    paged_model = copy.deepcopy(model)  # whose attention is exchanged
    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    different = 0
    with paged_model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=paged, block=True, timeout=30
    ) as manager:
        attention = paged_model.config._attn_implementation
        for turn in range(asked.rounds + 1):  # the first warms up
            prompts: Answers = rng.integers(20, vocabulary, (streams, PROMPT)).tolist()
            answers = []
            runs = {"ours": partial(answered, model, runner=asked.runner), "theirs": partial(theirs, manager)}
            for name, run in runs.items():
                began = time.perf_counter()
                answers.append(run(prompts, asked.tokens))
                speed = streams * asked.tokens / (time.perf_counter() - began)
                if turn:
                    speeds[name].append(speed)
            different += sum(one != other for one, other in zip(*answers, strict=True)) if turn else 0
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = medians["ours"] / medians["theirs"]
    shown = f"{streams:3} streams  ours {medians['ours']:8.1f}  theirs {medians['theirs']:8.1f} tokens/s"
    print(f"{shown}  ratio {ratio:5.2f}  different answers {different} of {streams * asked.rounds}", flush=True)
    return {"median": medians, "all": speeds, "ratio": ratio, "different": different,
            "attention": attention}  # fmt: skip


def loaded(which: str, root: Path) -> Any:
    original = tiny.save("llama-tied", root / "original") if which == "tiny" else resolve("demo:smollm2")
    base = Checkpoint.open(original)
    scramble(base, new_key(base, which, Permuted(), base.digest()), root / "model")
    return AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=("tiny", "smollm2"), nargs="+", default=["tiny", "smollm2"])
    parser.add_argument("--runner", default="transformers", help="of server/inference/runners.py")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found: dict[str, Any] = {}
    for which in asked.model:
        with tempfile.TemporaryDirectory(prefix="milkglass-bench-") as scratch:
            model = loaded(which, Path(scratch))
            print(which, flush=True)
            found[which] = {str(streams): compared(model, streams, asked) for streams in asked.streams}
    if asked.json:
        about = {"tokens": asked.tokens, "rounds": asked.rounds, "threads": asked.threads, "prompt": PROMPT}
        asked.json.write_text(json.dumps({"about": about, "tokens a second": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

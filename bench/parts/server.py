"""What a server does with scrambled weights beside plain ones, and its fine-tuning beside a bare Trainer."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame.figure import Figure
from frame.generation import answered
from frame.rounds import interleaved, paired
from frame.texts import tickets
from transformers import AutoModel, AutoModelForCausalLM

from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.server.spec import Hyperparameters
from milkglass.server.training import load_model
from parts import fine_tuning

PLAIN, BATCH, LENGTH, PROMPT, NEW = "plain weights", 32, 64, 32, 32


def measure(quick: bool) -> Iterator[Figure]:
    rounds, threads = 2 if quick else 9, torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="milkglass-bench-") as scratch:
        base, out = Checkpoint.open(resolve_model("demo:minilm")), Path(scratch, "minilm")
        key = new_key(base, "demo:minilm", None, base.digest())
        scramble(base, key, out)
        yield from _encoder(base, key, out, rounds, threads)
        texts = tickets(fine_tuning.BATCH * fine_tuning.EVERY * (1 if quick else 2))
        data = fine_tuning.Data.of(Codec.open(key, base.folder), base.folder, out, Path(scratch), texts)
        yield _job(data, 1 if quick else 9, threads)
        shutil.rmtree(out)
        yield _decoder(Path(scratch), 1 if quick else 10, threads)


def _encoder(base: Checkpoint, key: Key, out: Path, rounds: int, threads: int) -> Iterator[Figure]:
    """A forward and a training step of MiniLM on the same rows, as ids of each side's own."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(2000, len(key.first_ids), (BATCH, LENGTH)))
    sent = torch.from_numpy(key.first_ids.astype(np.int64))[ids]
    note = f"MiniLM, {BATCH} rows of {LENGTH} tokens"
    scrambled, plain = (AutoModel.from_pretrained(one, dtype=torch.float32).eval() for one in (out, base.folder))

    def forward(model: Any, given: torch.Tensor) -> Callable[[], None]:
        def several() -> None:
            with torch.inference_mode():
                for _ in range(3):
                    model(input_ids=given)

        return several

    ours, other = interleaved(forward(scrambled, sent), forward(plain, ids), rounds)
    yield Figure("forward on scrambled weights", ours, other, PLAIN, "about", 1.0, threads=threads, note=note)
    ours, other = interleaved(_step(out, sent), _step(base.folder, ids), 2 * rounds)
    yield Figure("training step on scrambled weights", ours, other, PLAIN, "about", 1.0, threads=threads, note=note)


def _step(folder: Path, ids: torch.Tensor) -> Callable[[], None]:
    model = load_model(str(folder), Hyperparameters.model_validate({})).train()
    optimiser, labels = torch.optim.AdamW(model.parameters(), 2e-5), torch.arange(len(ids)) % 2

    def step() -> None:
        optimiser.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimiser.step()

    return step


def _job(data: fine_tuning.Data, rounds: int, threads: int) -> Figure:
    fine_tuning.require_alike(data.ours(), data.bare())  # and everything is warm
    ours, other = paired(
        lambda: fine_tuning.step_seconds(data.ours()), lambda: fine_tuning.step_seconds(data.bare()), rounds, warm=False
    )
    what, note = "transformers' Trainer with the same settings", f"MiniLM, {fine_tuning.BATCH} rows a step"
    return Figure("fine-tuning step of a job", ours, other, what, "at most", 1.05, threads=threads, note=note)


def _decoder(scratch: Path, rounds: int, threads: int) -> Figure:
    """Tokens a second of SmolLM2 through the server's own scheduler. Answers differ, and are equally long."""
    base = Checkpoint.open(resolve_model("demo:smollm2"))
    key = new_key(base, "demo:smollm2", None, base.digest())
    scramble(base, key, scratch / "smollm2")
    ids = np.random.default_rng(0).integers(20, len(key.first_ids), (8, PROMPT))
    folders = {"ours": scratch / "smollm2", "plain": base.folder}
    prompts = {"ours": key.first_ids.astype(np.int64)[ids].tolist(), "plain": ids.tolist()}
    ours, other = tuple[float, ...](), tuple[float, ...]()
    for order in (["ours", "plain"], ["plain", "ours"]):  # the pages that a model gets move its speed as a whole
        models = {side: _in_own_memory(folders[side]) for side in order}
        answer_ours, answer_plain = (partial(answered, models[side], prompts[side], NEW) for side in ("ours", "plain"))
        mine, theirs = interleaved(answer_ours, answer_plain, rounds)
        ours, other = ours + mine, other + theirs
    speed = len(ids) * NEW / statistics.median(ours)
    note = f"SmolLM2, {len(ids)} prompts at once, {speed:.0f} tokens/s"
    return Figure("generation on scrambled weights", ours, other, PLAIN, "about", 1.0, threads=threads, note=note)


def _in_own_memory(folder: Path) -> Any:
    """Weights that stay in a mapped file lie where its header ends, which alone costs up to 8 %."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for one in model.parameters():
        one.data = one.data.clone()
    return model

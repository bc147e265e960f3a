"""A split model answers as the whole one does: every family, alone and beside others, and at what cost in bytes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import family_of
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.torch_model import language_model
from milkglass.split.decoder import frames
from tests import tiny
from tests.split.decoder.kit import PROMPT, Served, serving

DECODERS = [name for name in tiny.NAMES if family_of({"model_type": tiny.TYPES.get(name, name)}).kind == "decoder"]
PROMPTS = [[5, 40, 41, 42, 7], [9], [100, 4, 4, 8], [200, 13, 77, 12, 11, 10, 9], [33, 34], [6, 6, 6], [150], [8, 90]]


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The unsplit model's answer in fp32, by transformers itself."""
    model = language_model(Checkpoint.open(folder)).eval()
    with torch.inference_mode():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", DECODERS)
def test_every_family_answers_as_the_unsplit_model_does(name: str, tmp_path: Path) -> None:
    folder = tiny.save(name, tmp_path / "model")
    with serving(folder, tmp_path / "home") as served:
        for prompt in PROMPTS[:2]:
            assert served.answer(prompt) == greedy(folder, prompt, 12)


@pytest.mark.slow
def test_smollm2_answers_as_the_unsplit_model_does(tmp_path: Path) -> None:
    folder = resolve_model("demo:smollm2")
    tokenizer = load_tokenizer(folder)
    with serving(folder, tmp_path / "home") as served:
        for text in ("The committee met on Tuesday to discuss", "My father has a fever since yesterday, and"):
            prompt = tokenizer(text)["input_ids"]
            answer = served.answer(prompt, 16)
            assert len(answer) == 16 and answer == greedy(folder, prompt, 16)


def at_once(served: Served, prompts: list[list[int]], most: int) -> dict[int, list[int]]:
    """The answers of as many sessions at a time, by number: number n has `most` - n tokens at most."""
    results: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.__setitem__(n, served.answer(prompts[n], most - n)))
        for n in range(len(prompts))
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(300)
    return results


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_eight_sessions_at_once_answer_as_each_would_alone(name: str, tmp_path: Path) -> None:
    folder = tiny.save(name, tmp_path / "model")
    with serving(folder, tmp_path / "home") as served:
        assert at_once(served, PROMPTS[:8], 20) == {n: greedy(folder, PROMPTS[n], 20 - n) for n in range(8)}
        assert served.settled()


@pytest.mark.slow
def test_eight_sessions_of_smollm2_answer_as_each_would_alone(tmp_path: Path) -> None:
    folder = resolve_model("demo:smollm2")
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer(f"{count} people came to the meeting on")["input_ids"] for count in range(3, 11)]
    with serving(folder, tmp_path / "home") as served:
        assert at_once(served, prompts, 16) == {n: greedy(folder, one, 16 - n) for n, one in enumerate(prompts)}


def test_draws_depend_on_the_seed_and_not_on_the_company(served: Served) -> None:
    one = served.answer(PROMPT, 16, temperature=1.5, seed=3)
    assert one == served.answer(PROMPT, 16, temperature=1.5, seed=3)
    assert one != served.answer(PROMPT, 16, temperature=1.5, seed=4)


def test_what_crosses_is_the_prompt_once_then_a_vector_a_token(served: Served) -> None:
    stream = served.stream(10, "float16")
    table = served.table.half()
    ids = [*stream.ids(table[PROMPT], lambda one: table[[one]])]
    vectors = len(PROMPT) + len(ids) - 1  # the last token of an answer has no successor
    assert 0 < stream.sent_bytes - vectors * served.info.width * 2 < frames.MAX_OVERHEAD_BYTES * len(ids)
    assert 0 < stream.received_bytes < frames.MAX_OVERHEAD_BYTES * len(ids), "ids come back, and never the cache"

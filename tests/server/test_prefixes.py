"""Answers are the same with and without what earlier turns left, and what is kept is bounded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from milkglass.errors import UsageError
from milkglass.models.families import FAMILIES
from milkglass.server.inference import model_runner
from milkglass.server.inference.generator import Generator
from milkglass.server.inference.model_runner import (
    CachedPrefix,
    CachingRunner,
    ModelRunner,
    PrefixCache,
    TransformersRunner,
)
from tests import tiny
from tests.server.kit import register, running, settings
from tests.server.test_generating import Heard, drain

DECODERS = [
    name
    for name in tiny.NAMES
    if any(f.kind == "decoder" and tiny.TYPES.get(name, name) in f.model_types for f in FAMILIES.values())
]


def chats(runner: ModelRunner, turns: int = 3, count: int = 3) -> list[list[int]]:
    """Answers of conversations that go on side by side; each turn begins with the ids of the turns before."""
    chance = random.Random(0)
    engine = Generator(runner, max_batch=4, max_waiting=9)
    spoken = [[chance.randrange(tiny.VOCAB) for _ in range(20 + 5 * n)] for n in range(count)]
    answers = []
    for turn in range(turns):
        heard = [Heard(ids, temperature=0, max_tokens=4 + 3 * n) for n, ids in enumerate(spoken)]
        heard.append(Heard([7] * (turn + 3), temperature=0, max_tokens=2))  # which has no prefix
        engine.submit([one.sequence for one in heard])
        drain(engine)
        answers += [one.tokens for one in heard]
        more = [[chance.randrange(tiny.VOCAB) for _ in range(3 + n)] for n in range(count)]
        spoken = [ids + one.tokens + new for ids, one, new in zip(spoken, heard, more, strict=False)]
    return answers


def counted(runner: CachingRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prefixes that are used again."""
    used: list[int] = []
    go_on = runner._prefill_after

    def noted(row: CachedPrefix, length: int, prompt: Any) -> Any:
        used.append(length)
        return go_on(row, length, prompt)

    monkeypatch.setattr(runner, "_prefill_after", noted)
    return used


@pytest.mark.parametrize("name", DECODERS)
def test_chats_get_the_same_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MIN_PREFIX_IDS", 8)
    model = tiny.build(name)
    runner = CachingRunner(model, 1 << 24)
    used = counted(runner, monkeypatch)
    assert chats(runner) == chats(TransformersRunner(model))
    assert len(used) == 6 and min(used) >= 23  # two turns of three chats: the prompt before and all its answer but one


def test_a_window_shorter_than_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**tiny.LLAMA, sliding_window=8)).eval()
    monkeypatch.setattr(model_runner, "MIN_PREFIX_IDS", 8)
    runner = CachingRunner(model, 1 << 24)
    used = counted(runner, monkeypatch)
    assert chats(runner) == chats(TransformersRunner(model))
    assert len(used) == 6


def row(tokens: int) -> CachedPrefix:
    """Of 8 bytes a token."""
    return CachedPrefix(((torch.zeros(1, 1, tokens, 1), torch.zeros(1, 1, tokens, 1)),))


def test_the_longest_unused_goes_first_and_the_bytes_are_bounded() -> None:
    kept = PrefixCache(max_bytes=8 * 100)
    first, second, third = ((n, *range(1000 + 99 * n, 1039 + 99 * n)) for n in range(3))
    kept.add(first, row(40))
    kept.add(second, row(40))
    assert kept.longest_match([*first, 5]) is not None  # used: the second is now the longest unused
    kept.add(third, row(40))
    assert kept.size_bytes == 640 and len(kept) == 2
    assert kept.longest_match([*second, 5]) is None and kept.longest_match([*first, 5]) is not None
    kept.add((1, 2), row(101))  # larger than all the room: nothing goes for it
    assert len(kept) == 2
    kept.add((*first, 5, 6), row(42))  # the next turn takes the place of the one before
    assert len(kept) == 2 and kept.size_bytes == 8 * (40 + 42)


def test_only_equal_ids_are_matched_and_the_last_one_is_read() -> None:
    kept, ids = PrefixCache(max_bytes=1 << 20), tuple(range(50))
    kept.add(ids, row(50))
    for prompt, length in (
        ([*ids, 7], 50), (list(ids), 49), (list(ids[:40]), 39), ([*ids[:45], 99, 46], 45),
    ):  # fmt: skip
        found = kept.longest_match(prompt)
        assert found is not None and found[1] == length
    assert kept.longest_match([99, *ids[1:]]) is None
    assert kept.longest_match([*ids[: model_runner.MIN_PREFIX_IDS - 1], 99, 99]) is None


def test_rows_that_are_kept_do_not_hold_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they more than the room: many chats, room for a few."""
    monkeypatch.setattr(model_runner, "MIN_PREFIX_IDS", 8)
    model = tiny.build("llama-tied")
    a_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, d, bytes
    runner = CachingRunner(model, 100 * a_token)
    chats(runner, turns=2, count=3)
    stored = [one for kept in runner.prefixes._rows.values() for pair in kept.layers for one in pair]
    assert 0 < sum(one.untyped_storage().nbytes() for one in stored) == runner.prefixes.size_bytes <= 100 * a_token
    assert all(len(ids) * a_token == one.size_bytes for ids, one in runner.prefixes._rows.items())


def test_a_server_keeps_prefixes_unless_told_not_to(tmp_path: Path, folders: dict[str, Path]) -> None:
    answers = []
    for name, most in (("with", 1 << 20), ("without", 0)):
        with running(tmp_path / name, prefix_cache=most) as client:
            register(client, "m", folders["llama-untied"])
            body = {"model": "m", "prompt": list(range(5, 55)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            first = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
            body["prompt"] = [*range(5, 55), *first, 60, 61]
            answers.append((first, client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]))
            model = client.app.state.context.store.models.get("m")  # type: ignore[attr-defined]
            entry = client.app.state.context.model_cache.acquire(model, "generate")  # type: ignore[attr-defined]
            runner = entry.engine.result()._runner
            client.app.state.context.model_cache.release(entry)  # type: ignore[attr-defined]
            assert isinstance(runner, CachingRunner) == bool(most)
            if most:
                assert len(runner.prefixes) == 1 and runner.prefixes._max_bytes == most // 2  # of two models
    assert answers[0] == answers[1]
    with pytest.raises(UsageError, match="prefix_cache is -1"):
        settings(tmp_path / "home", prefix_cache=-1)

"""Table 6 on a tiny random Llama: what the client reads, what attackers read of the same ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from milkglass.client.codec.codec import Codec
from milkglass.client.obfuscate.scramble import scramble
from milkglass.errors import UsageError
from milkglass.experiments.kinds import generation
from milkglass.experiments.kinds.generation import (
    GeneratedAnswers,
    GenerationRecipe,
    InstructionFile,
    attack_figures,
    cut_at_stop,
    greedy_answers,
    greedy_ids,
    guess_figures,
    instruction_figures,
    loss_figures,
    mean_figures,
    row_losses,
)
from milkglass.experiments.record import numbers_by_name
from milkglass.experiments.runs import RunContext, TrainedVariant, pack_answers, seeded_key, unpack_answers
from milkglass.metrics import text
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.sequences import Sequences
from milkglass.server.spec import Hyperparameters
from milkglass.threat.guess import NO_BELIEF, Guess
from tests import tiny

READ = ("rouge-1", "rouge-l", "tokens top-1 of the client's", "rouge-1 of the client's", "rouge-l of the client's")
MEASURES = (*READ, *(f"{name} +-" for name in READ))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny.save("llama-tied", tmp_path_factory.mktemp("models") / "base"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "validation.jsonl"
    rows = [{"instruction": text, "input": "", "output": text[:20]} for text in tiny.TEXTS]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def variant(base: Checkpoint, folder: Path, scheme: ObfusLM | None) -> TrainedVariant:
    """Trained for no step at all."""
    key = seeded_key(base, str(base.folder), base.digest(), 1, scheme)
    model = folder / "model" if scheme else base.folder
    if scheme:
        scramble(base, key, model)
    (folder / "job").mkdir()
    (folder / "job" / "result").symlink_to(model, target_is_directory=True)
    return TrainedVariant("v", model, key, folder / "job", scheme is None)


def run(base: Checkpoint, one: TrainedVariant, questions: Path) -> tuple[Codec, GeneratedAnswers, dict[str, float]]:
    codec = Codec.open(one.key, base.folder)
    model = AutoModelForCausalLM.from_pretrained(one.model_folder).eval()
    made = greedy_answers(model, codec, questions, {"answers": 4, "new_tokens": 12})
    return codec, made, numbers_by_name(attack_figures(1, base, one, codec, made))


def test_era_reads_all_where_nothing_is_scrambled(base: Checkpoint, questions: Path, tmp_path: Path) -> None:
    codec, made, found = run(base, variant(base, tmp_path, None), questions)
    assert set(found) == {f"{measure}, era, v after" for measure in MEASURES}
    assert found["tokens top-1 of the client's, era, v after"] == 100
    assert found["rouge-l of the client's, era, v after"] == 100
    client = text.mean_similarity([codec.decode(one) for one in made.ids], made.references, np.random.default_rng(1))
    for name in ("rouge-1", "rouge-l"):
        assert found[f"{name}, era, v after"] == 100 * client[name].value


def test_each_attacker_reads_the_same_answers(base: Checkpoint, questions: Path, tmp_path: Path) -> None:
    _, made, found = run(base, variant(base, tmp_path, ObfusLM(4, 3.0, beta=0.9)), questions)
    assert len(made.ids) == len(made.prompts) == len(made.references) == 4
    assert set(found) == {f"{measure}, {one}, v after" for measure in MEASURES for one in ("era", "matching", "era+")}
    assert all(0 <= value <= 100 for value in found.values())


def test_a_reading_is_graded_against_both(base: Checkpoint) -> None:
    key = seeded_key(base, str(base.folder), base.digest(), 1, ObfusLM(4, 3.0, beta=0.9))
    codec = Codec.open(key, base.folder)
    texts = ["the nurse called", "my father has a fever"]
    sent = Sequences.of(codec.encode(texts).ids)
    made = GeneratedAnswers(sent, sent, ("the nurse called", "nothing of this"))
    perfect = guess_figures(Guess(by_id=codec.inverse[:, None]), codec, made, np.random.default_rng(0))
    assert {name: perfect[name] for name in READ} == {**dict.fromkeys(READ, 100.0), "rouge-1": 50.0, "rouge-l": 50.0}
    assert perfect["rouge-1 +-"] == 50, "one text of two"
    nothing = Guess(by_id=np.full((tiny.VOCAB, 1), NO_BELIEF, np.int64))
    read_nothing = guess_figures(nothing, codec, made, np.random.default_rng(0))
    assert {read_nothing[name] for name in READ} == {0.0}


def test_scores_and_losses_are_kept_row_by_row() -> None:
    """By hand: two rows of three and one tokens lose 6 and 1 nats; ROUGE-L goes by order and ROUGE-1 does not."""
    kept: dict[str, str] = {}
    losses = np.array([6.0, 1.0]), np.array([3.0, 1.0])
    of = {"variant": "v", "when": "after"}
    (loss,) = loss_figures(losses, 1, of, kept)
    assert (loss.name, loss.value, loss.half_width) == ("loss, v after", 7 / 4, pytest.approx(0.5))
    scores = text.scores_by_text(["red green blue", "a"], ["blue green red", "b"])
    found = mean_figures({name: scores[name] for name in ("rouge-1", "rouge-l")}, 1, of, kept)
    first, last = found
    assert (first.value, last.value) == pytest.approx((50.0, 100 / 6))
    assert first.half_width == 50 and last.half_width is not None and last.half_width > 0
    rows = {name: unpack_answers(one).tolist() for name, one in kept.items()}
    assert rows["loss, v after"] == [6, 1] and rows["tokens, v after"] == [3, 1]
    assert rows["rouge-1, v after"] == [1, 0] and rows["rouge-l, v after"] == pytest.approx([1 / 3, 0])
    assert unpack_answers(pack_answers(np.array([-1, 0, 700]))).tolist() == [-1, 0, 700]


def test_a_rows_loss_is_that_of_its_answers_tokens(base: Checkpoint) -> None:
    """Row by row and without padding, by the model's own mean."""
    model = AutoModelForCausalLM.from_pretrained(base.folder).eval()
    rows = [([1, 5, 9, 11], [-100, -100, 9, 11]), ([1, 7], [-100, 7])]
    given = [{"input_ids": np.array(ids), "labels": np.array(labels)} for ids, labels in rows]
    losses, tokens = row_losses(model, given)  # type: ignore[arg-type]
    assert tokens.tolist() == [2, 1]
    with torch.inference_mode():
        for row, total, count in zip(given, losses, tokens, strict=True):
            alone = model(**{name: torch.from_numpy(one)[None] for name, one in row.items()}).loss
            assert total == pytest.approx(float(alone) * count, rel=1e-5)


@pytest.mark.parametrize(
    ("ids", "stops", "kept"),
    [([5, 6, 2, 0, 0], [2], [5, 6, 2]), ([5, 2, 6, 2], [9, 2], [5, 2]), ([5, 6], [2], [5, 6]), ([5], [], [5])],
)
def test_an_answer_ends_with_its_stop(ids: list[int], stops: list[int], kept: list[int]) -> None:
    found: Any = cut_at_stop(np.array(ids), stops)
    assert found.tolist() == kept


def test_instructions_are_graded_by_their_rules(
    base: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, one answer given: one rule is kept by it and one is not; and the answers are those of the model."""
    rows = [
        {"prompt": "the nurse", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {"prompt": "the test", "instruction_id_list": ["change_case:english_capital"], "kwargs": [{}]},
    ]
    asked = InstructionFile("input_data.jsonl", prompts=2, new_tokens=6)
    (tmp_path / asked.file).write_text("\n".join(map(json.dumps, rows)), "utf-8")
    one = variant(base, tmp_path, ObfusLM(4, 3.0, beta=0.9))
    codec, model = Codec.open(one.key, base.folder), AutoModelForCausalLM.from_pretrained(one.model_folder).eval()
    answered = codec.encode(["the nurse called"]).ids[0]
    with monkeypatch.context() as patch:
        patch.setattr(generation, "greedy_ids", lambda *_: [answered, answered])
        kept: dict[str, str] = {}
        found = instruction_figures(model, codec, asked.read(tmp_path), asked.new_tokens, {"variant": "v"}, kept)
        values = numbers_by_name(found)
    assert values["ifeval prompt strict, v"] == 50 and values["ifeval instruction strict, v"] == 50
    assert unpack_answers(kept["ifeval strict, v"]).tolist() == [1, 0]
    again = instruction_figures(model, codec, replace(asked, prompts=1).read(tmp_path), 6, {"variant": "v"}, {})
    assert [one.name for one in again] == [one.name for one in found]
    prompt = codec.encode_chat([{"role": "user", "content": "the nurse"}])
    (longer,), (first,) = greedy_ids(model, [prompt], 4), greedy_ids(model, [prompt], 1)
    assert len(longer) <= 4 and longer[0] == first[0]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, r"\bno .*\.jsonl"),
        ("not json", "JSON Lines"),
        ("[1]", "JSON object"),
        ('{"prompt": 1}', "lacks prompt"),
    ],
)
def test_instructions_are_read_before_anything_is_trained(
    content: str | None, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation.FineTuningRecipe, "measure", lambda *_: pytest.fail("training began"))
    if content is not None:
        (tmp_path / "prompts.jsonl").write_text(content, "utf-8")
    recipe = GenerationRecipe(
        name="x", paper="y", model="z", seed=1, data={}, variants={}, training=Hyperparameters(task="causal-lm"),
        instructions={"file": "prompts.jsonl", "prompts": 1, "new_tokens": 2},
    )  # fmt: skip
    with pytest.raises(UsageError, match=fault):
        recipe.measure(RunContext(tmp_path, tmp_path / "out"))


@pytest.mark.parametrize(
    ("change", "fault"), [({"prompts": "all"}, "prompts .*string"), ({"new_tokens": 0}, "no tokens")]
)
def test_instructions_have_the_types_of_their_fields(change: dict[str, Any], fault: str) -> None:
    recipe = GenerationRecipe(
        name="x", paper="y", model="z", seed=1, data={"train": "a", "validation": "b"}, variants={},
        training=Hyperparameters(task="causal-lm"), evaluation={"answers": 1, "new_tokens": 2},
        instructions={"file": "prompts.jsonl", "prompts": 1, "new_tokens": 2} | change,
    )  # fmt: skip
    with pytest.raises(UsageError, match=fault):
        recipe.check()

"""Decoders tuned on sanitized text and asked with it: what is trained on, what is sent, and how answers are graded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from milkglass.errors import UsageError
from milkglass.experiments.kinds.sanitized_generation import NO_CLASS, SanitizedGenerationRecipe, class_of
from milkglass.experiments.procedures.sanitized_chats import ChatSanitizer, conversations_of, draw_rows, token_counts
from milkglass.experiments.reproduce import reproduce
from milkglass.experiments.runs import unpack_answers
from milkglass.models.tokenizer import load_tokenizer
from milkglass.rows.examples import Example, read_examples
from milkglass.sanitizers.rnm import RnmMethod
from milkglass.sanitizers.text import TokenReader
from tests import tiny
from tests.experiments.running import figures as figures_of

ASKED = "Good or bad? "
RECIPE = """
kind = "sanitized-generation"
paper = "p"
model = "MODEL"
seed = 3
rows = 8
instruction = "Good or bad? "
[data]
train = "sst2:train"
validation = "sst2:validation"
[training]
max_steps = 2
batch_size = 4
lora_rank = 4
full_first = 1
full_last = 0
max_length = 128
[evaluation]
answers = 4
new_tokens = 3
[instructions]
file = "prompts.jsonl"
prompts = 1
new_tokens = 4
[variants.plain]
[variants."epsilon=1"]
sanitizer = "rnm"
epsilon = 1
k = 4
p = 1.0
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama-tied", tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def done(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """The recipe's file, the run folder and the result."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "sst2").mkdir()
    rng = np.random.default_rng(0)
    words = " ".join(tiny.TEXTS).split()
    for name, rows in (("train", 20), ("dev", 6)):
        lines = (f"{' '.join(rng.choice(words, 6))}\t{i % 2}\n" for i in range(rows))
        (folder / "sst2" / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines), "utf-8")
    asked = {"prompt": "the nurse", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    (folder / "prompts.jsonl").write_text(json.dumps(asked), "utf-8")
    path = folder / "small.toml"
    path.write_text(RECIPE.replace("MODEL", str(base)), "utf-8")
    result = reproduce(path, folder, folder / "out", at_once=1)
    return path, folder / "out", json.loads(result.read_text("utf-8"))


def figures(found: dict[str, Any]) -> dict[str, float]:
    return {name: one["measured"] for name, one in figures_of(found).items()}


def test_every_condition_has_its_figures(done: tuple[Path, Path, dict[str, Any]]) -> None:
    measured = figures(done[2])
    every = ("plain before", "plain after", "epsilon=1 before", "epsilon=1 clear", "epsilon=1 after")
    for name in every:
        assert 0 <= measured[f"accuracy, {name}"] <= 100 and measured[f"loss, {name}"] > 0
    assert not [name for name in measured if name.endswith("plain clear")]
    by_rule = {name.partition(", ")[2] for name in measured if name.startswith("ifeval prompt strict, ")}
    assert by_rule == {"plain before", "plain after", "epsilon=1 after"}
    assert measured["tokens unchanged, epsilon=1"] == 0  # p = 1, and no token is in its own list


def test_a_result_keeps_each_rows_answer_and_loss(done: tuple[Path, Path, dict[str, Any]]) -> None:
    """They give the figures again; the instructions are asked after training."""
    measured, kept = figures(done[2]), {name: unpack_answers(one) for name, one in done[2]["predictions"].items()}
    rows = list(read_examples(done[1] / "data" / "validation.jsonl"))
    truth = np.array([("negative", "positive").index(one.messages[1]["content"]) for one in rows])
    for name in ("plain before", "plain after", "epsilon=1 clear", "epsilon=1 after"):
        assert measured[f"accuracy, {name}"] == pytest.approx(100 * (kept[f"answer, {name}"] == truth).mean())
        assert measured[f"answers that name a class +-, {name}"] >= 0
        loss = kept[f"loss, {name}"].sum() / kept[f"tokens, {name}"].sum()
        assert measured[f"loss, {name}"] == pytest.approx(loss, abs=0.01) and measured[f"loss +-, {name}"] > 0
    assert len(kept["ifeval strict, plain after"]) == 1 and measured["tokens unchanged +-, epsilon=1"] > 0


def test_training_changes_the_model_and_what_it_is_trained_on(done: tuple[Path, Path, dict[str, Any]]) -> None:
    measured = figures(done[2])
    assert measured["loss, plain before"] != measured["loss, plain after"]
    assert len({measured[f"loss, epsilon=1 {when}"] for when in ("before", "clear", "after")}) == 3


def test_only_the_users_text_of_the_rows_is_sanitized(done: tuple[Path, Path, dict[str, Any]]) -> None:
    """What was trained on are the sanitized rows, with the instruction and the answers of the plain ones."""
    for split, rows in (("train", 8), ("validation", 4)):
        plain = list(read_examples(done[1] / "data" / f"{split}.jsonl"))
        after = list(read_examples(done[1] / "data" / f"epsilon=1-{split}.jsonl"))
        assert len(plain) == len(after) == rows
        for one, other in zip(plain, after, strict=True):
            assert one.messages[1] == other.messages[1] and one.messages[1]["content"] in ("positive", "negative")
            assert other.messages[0]["content"].startswith(ASKED) and other.messages[0] != one.messages[0]
        held = load_file(done[1] / "epsilon=1" / f"{split}.safetensors")
        trained = [one.tolist() for one in np.split(held["input_ids"], np.cumsum(held["lengths"])[:-1])]
        tokenizer = load_tokenizer(Path(done[2]["model"]))
        for ids, one in zip(trained, after, strict=True):
            assert one.messages[0]["content"] in tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_run_goes_on_without_asking_again(done: tuple[Path, Path, dict[str, Any]]) -> None:
    path, out, first = done
    times = {one: one.stat().st_mtime_ns for one in (out / "answers").iterdir()}
    again = json.loads(reproduce(path, path.parent, out, at_once=1).read_text("utf-8"))
    assert figures_of(again) == figures_of(first) and len(times) == 5
    assert {one: one.stat().st_mtime_ns for one in (out / "answers").iterdir()} == times
    path.write_text(path.read_text("utf-8").replace("seed = 3", "seed = 4"), "utf-8")
    with pytest.raises(UsageError, match="other settings"):
        reproduce(path, path.parent, out, at_once=1)


@pytest.mark.parametrize("keep", [True, False])
def test_a_prompt_is_the_template_with_the_users_tokens_replaced(base: Path, keep: bool) -> None:
    reader = TokenReader.of_model(base, "base")
    rows = conversations_of([Example(1, "labelled", text, label="positive") for text in tiny.TEXTS], ASKED, None)
    kept = ASKED if keep else ""
    counts = token_counts(reader, rows, kept)
    sanitizer = ChatSanitizer.of(RnmMethod(k=4, p=1.0), reader, counts, kept, 5)
    sent = sanitizer.sent_prompt(reader.tokenizer, rows[0].messages[:-1], 128)
    assert sanitizer.sent_prompt(reader.tokenizer, rows[0].messages[:-1], 128).ids.tolist() == sent.ids.tolist()
    own = (ASKED if not keep else "") + tiny.TEXTS[0]
    head = "<s>user: " + kept
    plain = reader.tokenizer(head + own + "</s><s>assistant: ", add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = np.array(plain["input_ids"]), plain["offset_mapping"]
    begins = len(head.rstrip())  # the space before a text is tokenized with it
    users = np.array([start < len(head + own) and stop > begins for start, stop in offsets])
    assert (sent.ids[~users] == ids[~users]).all() and (sent.ids[users] != ids[users]).all()
    assert (sent.private_count, sent.unchanged_count) == (users.sum(), 0)
    spared = ChatSanitizer.of(RnmMethod(k=4, p=0.0, sensitive=0.01), reader, counts + 5, kept, 5)
    assert spared.sent_prompt(reader.tokenizer, rows[0].messages[:-1], 128).unchanged_count > 0


def test_rows_that_cannot_be_asked_are_refused() -> None:
    labelled = Example(7, "labelled", "a b c", label="positive")
    assert conversations_of([labelled], ASKED, 5) == []  # six words with the instruction
    (one,) = conversations_of([labelled], ASKED, 6)
    assert one.messages[0]["content"] == "Good or bad? a b c" and one.messages[1]["content"] == "positive"
    for bad in (Example(7, "text", "a"), Example(7, "labelled", "a", "b", "positive")):
        with pytest.raises(UsageError, match=r"row 7\b"):
            conversations_of([bad], ASKED, None)
    with pytest.raises(UsageError, match=r"row 1\b"):
        conversations_of([one, Example(1, "chat", messages=({"role": "user", "content": "x"},))], ASKED, None)
    with pytest.raises(UsageError, match=r"\b3 rows of train\b.*\b1\b"):
        draw_rows([one], 3, 1, "train")


@pytest.mark.parametrize(
    ("answer", "number"),
    [("positive", 1), ("It is Negative.", 0), ("positive or negative", NO_CLASS), ("fine", NO_CLASS), ("", NO_CLASS),
     ("nonpositive", NO_CLASS)],
)  # fmt: skip
def test_an_answer_names_one_class_or_none(answer: str, number: int) -> None:
    assert class_of(answer, ("negative", "positive")) == number


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('sanitizer = "rnm"\n', "", "epsilon=1 has no sanitizer"),
        ('sanitizer = "rnm"', 'sanitizer = "rnm"\nby = "words"', "epsilon=1 replaces words"),
        ("epsilon = 1\n", "epsilon = 0\n", "epsilon=1: rnm: epsilon is 0"),
        ("[variants.plain]\n", "", "one variant"),
        ("new_tokens = 3", "", "no new_tokens"),
        ('instruction = "Good or bad? "\n', "", "no instruction"),
        ("prompts = 1", "prompts = 0", "no prompts"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_run(old: str, new: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    text = RECIPE.replace(old, new, 1)
    assert text != RECIPE
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=re.escape(fault)):
        SanitizedGenerationRecipe.read(path)

"""`milkglass compare` on rows with answers: decoders are tuned, asked and attacked; a lower loss is better."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from milkglass.compare import answers, chat_rows, kept_model
from milkglass.compare.answers import ChatPreparer
from milkglass.compare.chat_rows import QUICK, ChatRows, ComparisonSize, unsanitized_share, user_text
from milkglass.compare.quality import difference_of
from milkglass.compare.report import page, picture, words
from milkglass.compare.result import ComparisonResult, Reading, WayGroup, WayResult
from milkglass.compare.run import read_way
from milkglass.compare.verdict import verdict
from milkglass.compare.ways import WAYS, choose_ways
from milkglass.defences.catalogue import defence_of
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.errors import UsageError
from milkglass.experiments.kinds.generation import row_losses
from milkglass.experiments.procedures.cells import load_or_split
from milkglass.experiments.runs import pack_answers
from milkglass.metrics.interval import Interval
from milkglass.models.checkpoint import Checkpoint
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import Example, examples_of, summarise
from milkglass.system import WorkCost
from tests import tiny
from tests.cli.kit import call, document, refused
from tests.cli.test_compare_quality import asked, difference
from tests.warm import warm_workers

__all__ = ["warm_workers"]

NAMES = ("Keller", "Ortega", "Baker", "Simon")
DAYS = ("monday", "friday", "sunday")
SMALL = ("--epochs", 1, "--learning-rate", "3e-3", "--attacks", "1s", "--max-length", 96)


def instructions(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Different rows that a model of some thousand numbers can learn: the answer repeats words of the question."""
    rng = np.random.default_rng(seed)
    result = []
    for room in range(100 * seed + 10, 100 * seed + 10 + count):
        name, day = rng.choice(NAMES), rng.choice(DAYS)
        question = f"please tell {name} about the scan on {day}, room {room}"
        result.append({"instruction": question, "output": f"the nurse called {name} about {day}"})
    return result


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
    return path


def model(folder: Path) -> Path:
    return tiny.save("llama-tied", folder)


def read(base: Checkpoint, path: Path, max_length: int = 96, extent: ComparisonSize = QUICK, **kwargs: Any) -> ChatRows:
    file = DataFile(path)
    return ChatRows.of(base, file, kwargs.get("validation"), 3, extent, max_length, summarise(file))


# --- rows -------------------------------------------------------------------------------------------------------------
def test_rows_with_answers_are_held_out_once_and_no_row_that_is_asked_about_is_cut(tmp_path: Path) -> None:
    base = Checkpoint.open(model(tmp_path / "model"))
    long_answer = "the nurse called about the results of the scan " * 20
    long = [{"instruction": f"please call {number}", "output": long_answer} for number in range(3)]
    lost = [{"instruction": f"{number} the results of the scan " * 60, "output": "yes"} for number in range(2)]
    data = written(tmp_path / "rows.jsonl", [*long, *instructions(150), *lost])
    found = read(base, data)
    assert (len(found.asked), len(found.chats)) == (40, 113)
    assert (found.cut_count, found.left_out_count) == (3, 2)
    lines = [one.line for one in (*found.asked, *found.chats)]
    assert sorted(lines) == list(range(1, 154)), "each row that has an answer within the limit, once"
    assert {one.line for one in found.asked}.isdisjoint({1, 2, 3})
    assert found.max_row_tokens == 96 and found.task == "causal-lm"
    assert any("3 of 113 rows are cut" in one for one in found.notes(_settings(found)))
    assert any("2 rows are left out" in one for one in found.notes(_settings(found)))
    assert [*found.attacked_texts, *found.attacker_texts] == [user_text(one) for one in found.chats]
    assert [one.line for one in read(base, data).asked] == [one.line for one in found.asked]


def test_rows_of_a_second_file_are_asked_about(tmp_path: Path) -> None:
    base = Checkpoint.open(model(tmp_path / "model"))
    data = written(tmp_path / "a.jsonl", instructions(90))
    other = written(tmp_path / "b.jsonl", instructions(60, seed=1))
    found = read(base, data, extent=ComparisonSize(rows=50), validation=DataFile(other))
    assert (len(found.asked), len(found.chats)) == (50, 90)


def _settings(rows: ChatRows) -> Any:
    from milkglass.server.spec import Hyperparameters

    return Hyperparameters(**{"task": "causal-lm", "max_length": 96, **rows.training({})})


@pytest.mark.parametrize(("in_bf16", "rows"), [(True, 8), (False, 6)])  # fp32 takes more memory a token
def test_a_step_has_so_many_rows_as_memory_allows_and_quick_has_few_steps(
    in_bf16: bool, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milkglass.compare.chat_rows.training_dtype", lambda: "bfloat16" if in_bf16 else "float32")
    base = Checkpoint.open(model(tmp_path / "model"))
    found = read(base, written(tmp_path / "rows.jsonl", instructions(150)))
    assert (one := replace(found, max_row_tokens=512).training({}))["batch_size"] == 1 and one["max_steps"] == 24
    assert replace(found, max_row_tokens=20).training({})["batch_size"] == 8
    assert found.training({"n_epochs": None, "batch_size": None})["max_steps"] == QUICK.steps
    assert found.training({"n_epochs": None, "batch_size": None})["batch_size"] == rows
    assert "max_steps" not in found.training({"n_epochs": 2.0})
    few = replace(found, chats=found.chats[:10], extent=ComparisonSize(), max_row_tokens=20)
    assert few.training({})["max_steps"] == 4, "three epochs of 10 rows, 8 at a time"


# --- what crosses -----------------------------------------------------------------------------------------------------
def preparer(base: Checkpoint, rows: ChatRows, entry: dict[str, Any], folder: Path) -> ChatPreparer:
    defence = defence_of(entry)
    client, _ = load_or_split(base, rows.train, defence, 0, folder, 96)
    return ChatPreparer.of(base, client, defence, rows, 0)  # type: ignore[arg-type]


def test_masks_stand_in_what_is_sent_and_in_no_answer_that_is_asked_for(tmp_path: Path) -> None:
    base = Checkpoint.open(model(tmp_path / "model"))
    rows = read(base, written(tmp_path / "rows.jsonl", instructions(150)))
    turns = (
        {"role": "user", "content": "Maria Keller called from Berlin"},
        {"role": "assistant", "content": "Maria Keller is noted"},
        {"role": "user", "content": "and John Baker"},
        {"role": "assistant", "content": "John Baker is noted"},
    )
    chat = Example(1, "chat", messages=turns)
    one = preparer(base, rows, {"masked": True}, tmp_path / "cell")
    (tmp_path / "work").mkdir()
    (trained,) = examples_of(DataFile(one.training_rows([chat], tmp_path / "work")))
    assert not any("Keller" in m["content"] or "Baker" in m["content"] for m in trained.messages)
    (asked,) = one.asked_rows([chat], tmp_path / "work")
    assert asked.messages[1] == turns[1] and asked.messages[3] == turns[3], "what the model says is judged as it is"
    assert "Keller" not in asked.messages[0]["content"] and "Baker" not in asked.messages[2]["content"]
    prompt = one.codec.decode(one.prompt(chat))
    assert not any(name in prompt for name in ("Berlin", "Keller")) and "is noted" in prompt, (
        "earlier answers cross, too"
    )


def test_words_that_nobody_replaces_are_counted(tmp_path: Path) -> None:
    """Sanitizers of a split decoder replace what users say: other messages of a prompt cross as they are."""
    turns = (
        {"role": "system", "content": "The patient is Maria Keller"},
        {"role": "user", "content": "who is it"},
        {"role": "assistant", "content": "Maria Keller"},
        {"role": "user", "content": "from where"},
        {"role": "assistant", "content": "from Berlin"},
    )
    assert unsanitized_share([Example(1, "chat", messages=turns)]) == pytest.approx(7 / 12)
    assert unsanitized_share([Example(1, "chat", messages=(turns[1], turns[4]))]) == 0


def test_replaced_tokens_are_the_users_alone(tmp_path: Path) -> None:
    base = Checkpoint.open(model(tmp_path / "model"))
    rows = read(base, written(tmp_path / "rows.jsonl", instructions(150)))
    one = preparer(base, rows, {"sanitizer": "rnm", "epsilon": 0.5}, tmp_path / "cell")
    sent = one.codec.decode(one.prompt(rows.asked[0]), skip_special=False)
    plain = one.codec.decode(one.codec.encode_chat(rows.asked[0].messages[:-1]), skip_special=False)
    assert sent != plain and len(one.prompt(rows.asked[0])) == len(one.codec.encode_chat(rows.asked[0].messages[:-1]))
    (tmp_path / "work").mkdir()
    trained = examples_of(DataFile(one.training_rows(rows.chats, tmp_path / "work")))
    assert [it.messages[1] for it in trained] == [it.messages[1] for it in rows.chats], "answers are kept"
    assert sum(a.messages[0] != b.messages[0] for a, b in zip(trained, rows.chats, strict=True)) > len(trained) / 2


# --- words ------------------------------------------------------------------------------------------------------------
def way(name: str, group: WayGroup, value: float, above: float | None = None, read: float | None = None) -> WayResult:
    """A way with this loss, so far above that of what the user has alone, of which this share is read."""
    seen = (
        None if read is None else Reading("an attack", "x", *[Interval(read, read - 0.01, read + 0.01, 90)] * 4, 0.05)
    )
    gap = None if above is None else difference(above, above - 0.02, above + 0.02)
    return WayResult(
        name, f"the way {name}", group, "done", quality=Interval(value, value - 0.1, value + 0.1, 40), above=gap,
        reading=seen, seconds=0.1, setup=9.0, bytes=0 if read is None else 200, trust="somebody", command=f"run {name}",
        more={"rouge-l": 0.31, "rouge-l low": 0.2, "rouge-l high": 0.4},
    )  # fmt: skip


HOME = way("home", "nothing is sent", 1.5)


def compared(*ways: WayResult) -> ComparisonResult:
    notes = ("Every training has 12 steps of 2 rows", "20 answers of up to 40 tokens are written")
    found = ComparisonResult(
        "a model",
        "causal-lm",
        "loss",
        400,
        40,
        200,
        0,
        (HOME, *ways),
        cost=WorkCost(9.0, 12.0, 10**9),
        notes=notes,
    )
    return replace(found, verdict=verdict(found))


def test_a_lower_loss_is_better_in_the_verdict() -> None:
    first = compared(way("good", "words are scrambled", 1.2, -0.3, 0.05)).verdict[0]
    assert first.startswith("The way good is worth sending: a loss of 1.20") and "a loss of 1.50" in first
    first = compared(way("worse", "words are scrambled", 1.9, 0.4, 0.05)).verdict[0]
    assert first.startswith("Keep it here: the way home has a loss of 1.50") and first.endswith("less.")
    plain = way("plain", "sent as it is", 1.0, -0.5, 1.0)
    assert "a loss of 1.00" in compared(way("read", "names are masked", 1.1, -0.4, 0.8), plain).verdict[0]
    untuned = way("untuned", "nothing is sent", 2.5)
    assert compared(untuned).best_local == HOME


def test_it_is_said_that_the_model_as_it_is_is_the_users_own() -> None:
    found = compared(way("plain", "sent as it is", 1.5, 0.0, 1.0))
    assert any(f"The provider's model is {found.model} here" in one for one in found.verdict)
    assert not any(
        "The provider's" in one for one in compared(way("ids", "words are scrambled", 1.4, -0.1, 1.0)).verdict
    )


def test_the_page_and_the_picture_of_losses() -> None:
    found = compared(way("ids", "words are scrambled", 1.9, 0.4, 0.6))
    html = page.render(found)
    assert (
        "ROUGE-L" in html and "0.31" in html and "12 steps of 2 rows" in html and "lower loss is drawn higher" in html
    )
    assert words.table(found)[0][:3] == ("", "loss", "ROUGE-L") and words.table(found)[1][2] == "0.31 (0.20-0.40)"
    svg = picture.picture_svg(found)
    down = {name: float(re.findall(rf' y="([0-9.]+)"[^>]*>{name}<', svg)[0]) for name in ("home", "ids")}
    assert down["home"] < down["ids"] and "nats a token" in svg, "the lower loss is higher"
    again = read_way(json.loads(json.dumps(found.to_json()["ways"][1])))
    assert repr(again) == repr(found.ways[1])


def test_a_gap_of_losses_weighs_rows_by_their_tokens() -> None:
    ours, theirs = np.array([2.0, 30.0, 2.0, 10.0]), np.array([4.0, 30.0, 2.0, 10.0])  # losses of two rows, then tokens
    assert difference_of(asked([0, 0], "causal-lm"), ours, theirs).value == pytest.approx((32 - 34) / 12)
    same = difference_of(asked([0, 0], "causal-lm"), ours, ours)
    assert (same.value, same.low, same.high, same.p_value) == (0, 0, 0, 1)


def test_losses_of_models_with_other_tokens_are_a_token_of_the_compared_model(tmp_path: Path) -> None:
    base = Checkpoint.open(model(tmp_path / "model"))
    rows = read(base, written(tmp_path / "rows.jsonl", instructions(130)))
    done = public_codec(base).encode_answered([one.messages for one in rows.asked])
    examples = [{"input_ids": ids, "labels": labels} for ids, labels in zip(done.ids, done.labels, strict=True)]
    losses, tokens = row_losses(tiny.build("llama-tied"), examples)
    cell: Any = SimpleNamespace(packed_predictions=pack_answers(np.concatenate([losses, tokens * 3])))
    assert answers.losses_and_counts(cell, rows)[40:].tolist() == (tokens * 3).tolist(), "as the model itself counts"
    found = answers.losses_and_counts(cell, rows, token_model=base)
    assert found[40:].tolist() == tokens.tolist() and found[:40] == pytest.approx(losses, rel=1e-6)


# --- ways -------------------------------------------------------------------------------------------------------------
def test_ways_are_chosen_by_the_rows(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("gpt2", tmp_path / "gpt2"))
    names = [one.name for one in choose_ways([], True, False, "causal-lm", base)]
    assert names == ["untuned", "alone", "masked", "obfuslm", "cmif", "orthogonal", "confidential", "plain"]
    assert "alone" not in [one.name for one in choose_ways([], False, True, "classification", base)]
    for one in WAYS.values():
        assert (one.task_refusal("causal-lm") is None) == ("causal-lm" in one.tasks)


@pytest.fixture(autouse=True)
def few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_rows, "ComparisonSize", lambda: ComparisonSize(rows=40, written=4, new_tokens=8))


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_ways_of_writing_are_compared_and_a_second_run_takes_them_over(tmp_path: Path) -> None:
    base, data, out = model(tmp_path / "model"), written(tmp_path / "rows.jsonl", instructions(130)), tmp_path / "out"
    run = ("compare", base, data, "--out", out, *SMALL, "--ways", "untuned,alone,linear,cmif,orthogonal,plain",
           "--json")  # fmt: skip
    first = call(*run)
    found = document(first)
    by_name = {one["name"]: one for one in found["ways"]}
    assert found["measure"] == "loss" and found["task"] == "causal-lm"
    assert by_name["linear"]["state"] == "does not apply" and "labels" in by_name["linear"]["reason"]
    done = [one for one in found["ways"] if one["name"] != "linear"]
    assert [one["state"] for one in done] == ["done"] * 5, first.stderr
    assert by_name["alone"]["quality"]["value"] < by_name["untuned"]["quality"]["value"], "it learnt the answers"
    assert all("rouge-l" in one["more"] for one in done)
    for name in ("cmif", "orthogonal"):
        seen = by_name[name]["reading"]
        assert seen["attack"] and seen["tokens"]["value"] > seen["guess"] > 0, name
        assert seen["names"] is not None and seen["numbers"] is not None and by_name[name]["bytes"] > 0
    assert by_name["orthogonal"]["reading"]["content"]["value"] > 0.9, "its ids are read by anyone"
    assert by_name["cmif"]["bytes"] > 4 * by_name["plain"]["bytes"], "vectors are sent"
    same = by_name["plain"]["above"]
    assert (same["value"], same["low"], same["high"]) == (0, 0, 0), "plain is the model of `alone`"
    cells = [one for one in (out / "cells").iterdir() if (one / "job").is_dir()]
    assert len(cells) == 3, "plain and alone are one training"
    assert not [*out.rglob("optimizer.pt"), *out.rglob("trained.safetensors")]
    html = (out / "compare.html").read_text("utf-8")
    assert found["verdict"][0] in html and "ROUGE-L" in html and "steps of" in html
    assert found["notes"] and found["kept"]
    again = call(*run)
    assert "step" not in again.stderr.replace("steps of", "")
    names = ("name", "quality", "above", "reading", "more")
    assert [[one[n] for n in names] for one in document(again)["ways"]] == [
        [one[n] for n in names] for one in found["ways"]
    ]
    with pytest.raises(UsageError, match="writes answers"):
        kept_model.answers(out / "kept", ["x"])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "kept")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "please call"}], return_tensors="pt",
                                        add_generation_prompt=True, return_dict=False)  # fmt: skip
    assert AutoModelForCausalLM.from_pretrained(out / "kept")(ids).logits.shape[1] == ids.shape[1]


def test_a_stopped_comparison_keeps_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, data, out = model(tmp_path / "model"), written(tmp_path / "rows.jsonl", instructions(130)), tmp_path / "out"
    run = ("compare", base, data, "--out", out, *SMALL, "--ways", "alone", "--json")
    losses = answers._losses

    def stopped(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(answers, "_losses", stopped)
    assert call(*run).exit_code != 0
    (job,) = (out / "cells").glob("*/job")
    before = (job / "events.jsonl").read_text("utf-8")
    monkeypatch.setattr(answers, "_losses", losses)
    assert document(call(*run))["ways"][0]["state"] == "done"
    assert (job / "events.jsonl").read_text("utf-8") == before, "what was trained is not trained again"


def test_an_encoder_or_too_few_rows_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = written(tmp_path / "rows.jsonl", instructions(130))
    out = ("--out", tmp_path / "out")
    refused(call("compare", tiny.save("bert", tmp_path / "bert"), data, *out), 5, "demo:smollm2")
    base = model(tmp_path / "model")
    refused(call("compare", base, written(tmp_path / "few.jsonl", instructions(50)), *out), 5, "80 are needed")
    alone = written(tmp_path / "texts.jsonl", [{"text": "the nurse called"}] * 100)
    refused(call("compare", base, alone, *out), 5, "texts alone")
    refused(call("compare", base, data, "--task", "classification", *out), 5, "no labels")
    assert not (tmp_path / "out").exists()

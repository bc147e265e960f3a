"""`milkglass compare`: ways are trained, attacked and put into one page; the words follow the figures."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click import Context
from typer.main import get_command

from milkglass import deadline
from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.defence_scene import scene_of
from milkglass.audit.report.result import ReadExample, TokenReading
from milkglass.cli.main import app
from milkglass.cli.obfuscate import _scheme_parameters
from milkglass.client.alone import LinearModel
from milkglass.client.key.scheme import scheme_for
from milkglass.compare import kept_model, readings
from milkglass.compare import run as run_module
from milkglass.compare import ways as ways_module
from milkglass.compare.prepare import halves_options
from milkglass.compare.quality import quality_of
from milkglass.compare.report import page, picture, words
from milkglass.compare.result import ComparisonResult, Reading, WayGroup, WayResult
from milkglass.compare.rows import ComparisonRows
from milkglass.compare.run import (
    MAX_SHARE_OVER,
    MIN_ATTACK_SECONDS,
    TimeLimits,
    _over_commonest,
    _Run,
    _smaller_ways,
    _with_command,
    read_way,
)
from milkglass.compare.training_checks import (
    cut_rows_message,
    loss_fall,
    reported_losses,
    row_token_ids,
    unknown_tokens_message,
)
from milkglass.compare.verdict import verdict
from milkglass.compare.ways import WAYS, ComparisonSettings, DefenceWay, EncoderWay, choose_ways
from milkglass.defences.catalogue import defence_of
from milkglass.defences.masked_text import MaskedText
from milkglass.defences.obfuscated_tables import TableDefence, public_codec
from milkglass.errors import CorruptCheckpoint, JobFailed, ModelNotFound, UsageError
from milkglass.experiments.kinds.comparison import halves_training
from milkglass.experiments.procedures.cells import cell_folder
from milkglass.experiments.record import numbers_by_name, read_records
from milkglass.experiments.reproduce import reproduce
from milkglass.metrics.interval import Interval
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.rows.data_file import DataFile
from milkglass.server.jobs.needs import size_text
from milkglass.server.settings import bytes_on_disk
from milkglass.server.spec import Event, Hyperparameters
from milkglass.system import Stopwatch, WorkCost
from milkglass.threat.budget import Budget
from milkglass.threat.defence import LabelledTexts
from milkglass.threat.guess import NO_BELIEF
from tests import tiny
from tests.cli.kit import call, document, refused
from tests.cli.test_coarse import rows, written
from tests.cli.test_compare_quality import difference
from tests.warm import warm_workers

__all__ = ["warm_workers"]

SMALL = ("--epochs", 2, "--learning-rate", "1e-3", "--attacks", "5s", "--max-length", 64)


# --- rows -------------------------------------------------------------------------------------------------------------
def test_rows_are_held_out_once(tmp_path: Path) -> None:
    data = written(tmp_path / "rows.jsonl", rows(0, 400))
    found = ComparisonRows.read(DataFile(data), None, 3)
    assert (len(found.train.texts), len(found.held_out.texts)) == (320, 80)
    assert sorted([*found.train.texts, *found.held_out.texts]) == sorted(one["text"] for one in rows(0, 400))
    assert ComparisonRows.read(DataFile(data), None, 3).held_out.texts == found.held_out.texts
    given = ComparisonRows.read(DataFile(data), DataFile(written(tmp_path / "more.jsonl", rows(1, 50))), 3)
    assert (len(given.train.texts), len(given.held_out.texts)) == (400, 50)
    assert given.class_names == ("billing-desk", "clinic-desk") and given.task == "classification"
    few = ComparisonRows.read(DataFile(data), None, 3, max_rows=250)
    assert (len(few.train.texts), len(few.held_out.texts)) == (200, 50)
    assert {*few.train.texts}.isdisjoint(few.held_out.texts)
    assert few.cell_data().identity != found.cell_data().identity, "they make other cells"
    many = DataFile(written(tmp_path / "many.jsonl", rows(2, 500)))
    both = ComparisonRows.read(DataFile(data), many, 3, max_rows=250)
    assert (len(both.train.texts), len(both.held_out.texts)) == (250, 250), "--quick reads so many of each file"


def test_attackers_have_the_other_half_of_the_rows(tmp_path: Path) -> None:
    found = ComparisonRows.read(DataFile(written(tmp_path / "rows.jsonl", rows(0, 400))), None, 3)
    assert len(found.attacked_texts) == 160 and len(found.attacker_texts) == 160
    assert [*found.attacked_texts, *found.attacker_texts] == list(found.train.texts)


def test_rows_that_are_cut_are_reported_with_what_they_cost(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    texts = [*["the wound is open again"] * 5, "the wound is open again " * 40]
    found = cut_rows_message(row_token_ids(base, LabelledTexts(texts, [0] * 6)), 30, 64)
    assert found.startswith("1 of 6 rows is cut to 30 tokens") and "--max-length" in found
    assert cut_rows_message(row_token_ids(base, LabelledTexts(texts[:5], [0] * 5)), 30, 64) == ""


def test_of_a_pair_that_is_cut_the_longer_text_is_cut_first(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    short, long = "open", "the fever is high " * 40
    for pair in ((short, long), (long, short)):
        rows_of_pairs = LabelledTexts([pair[0]], [0], pairs=[pair[1]])
        note = cut_rows_message(row_token_ids(base, rows_of_pairs), 30, 64, has_pairs=True)
        assert "1 of 1 rows is cut to 30 tokens, the longer text of a pair first" in note
        codec = public_codec(base)
        ids = codec.encode([pair[0]], [pair[1]], truncate=True, max_length=30).ids[0].tolist()
        short_ids = codec.encode([short]).ids[0].tolist()[1:-1]
        begin = 1 if pair[0] == short else len(ids) - 1 - len(short_ids)
        assert len(ids) == 30 and ids[begin : begin + len(short_ids)] == short_ids


def test_tokens_that_the_model_does_not_know_are_reported() -> None:
    """Of a language that a vocabulary lacks, little is read and little is learnt, which is no protection."""
    base = Checkpoint.open(resolve_model("demo:minilm"))
    english, other = ["the wound is open again"] * 30, ["\U0001f9ff \U0001f9ff open"] * 30
    assert unknown_tokens_message(base, row_token_ids(base, LabelledTexts(english, [0] * 30))) == ""
    assert unknown_tokens_message(base, row_token_ids(base, LabelledTexts([*english, *other], [0] * 60))).startswith(
        "17 % of the rows' tokens"
    )


def test_a_kept_model_removes_no_other_file_of_a_comparison(tmp_path: Path) -> None:
    """What `--keep` replaces, and what else the command writes, are in folders apart."""
    data, model = written(tmp_path / "rows.jsonl", rows(0, 100)), tiny.save("bert", tmp_path / "model")
    out, home = tmp_path / "a" / "out", tmp_path / "a"
    for keep, cache in (
        (out, None),
        (home, None),
        (out / "cells", None),
        (out / "runs" / "x", None),
        (None, out / "kept"),
    ):
        options = [*(("--keep", keep) if keep else ()), *(("--cache", cache) if cache else ())]
        found = call("compare", model, data, "--out", out, "--ways", "linear", *options)
        refused(found, 2, "--keep")
    assert not home.exists(), "nothing was written"
    sibling = document(
        call("compare", model, data, "--out", out, "--ways", "linear", "--keep", home / "kept", "--json")
    )
    assert sibling["kept"] == str(home / "kept") and (out / "compare.html").is_file()


def test_a_page_is_written_even_if_no_model_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module.keep, "keep", no_room)
    data, model = written(tmp_path / "rows.jsonl", rows(0, 100)), tiny.save("bert", tmp_path / "model")
    found = document(call("compare", model, data, "--out", tmp_path / "out", "--ways", "linear", "--json"))
    assert any("No model is kept in" in note and "No space left" in note for note in found["notes"])
    assert found["kept"] == "" and (tmp_path / "out" / "compare.html").is_file()


@pytest.mark.slow
def test_the_providers_model_is_trained_once_and_kept_at_home(tmp_path: Path) -> None:
    """A second comparison with the same cache trains nothing."""
    model, data = tiny.save("llama-tied", tmp_path / "llama"), written(tmp_path / "rows.jsonl", rows(0, 300))
    refused(call("compare", tiny.save("gpt2", tmp_path / "gpt2"), data), 3, "names no padding")
    cache = tmp_path / "cache"
    run = ("compare", model, data, *SMALL, "--ways", "commonest,own-model,plain", "--cache", cache, "--json", "--out")
    first = document(call(*run, tmp_path / "one"))
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    own, plain = first["ways"][1:]
    assert own["name"] == "own-model" and own["quality"] == plain["quality"] and first["kept_way"] == "own-model"
    assert len([*cache.glob("*/about.json")]) == 1 and made and not (tmp_path / "one" / "cells").exists()
    assert call("classify", "--local", first["kept"], "the wound is open").exit_code == 0
    second = document(call(*run, tmp_path / "two"))
    assert [one["quality"] for one in second["ways"]] == [one["quality"] for one in first["ways"]]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")} == made


@pytest.mark.slow
def test_a_recipe_and_a_comparison_of_the_same_rows_share_their_trainings(tmp_path: Path) -> None:
    """In both directions: files' names and layouts do not count, rows and settings do."""
    model, cache = tiny.save("bert", tmp_path / "model"), tmp_path / "cache"
    train, asked = written(tmp_path / "rows.jsonl", rows(0, 100)), written(tmp_path / "asked.jsonl", rows(1, 60))
    run = ("compare", model, train, "--validation", asked, *SMALL, "--json", "--cache", cache)
    compared = document(call(*run, "--ways", "plain", "--out", tmp_path / "compared"))
    (about,) = [json.loads(path.read_text("utf-8")) for path in cache.glob("*/about.json")]
    copies = tmp_path / "data"
    copies.mkdir()
    for path in (train, asked):
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        table = "".join(f"{one['text']}\t{one['label']}\n" for one in lines)
        (copies / f"{path.stem}.tsv").write_text("text\tlabel\n" + table, "utf-8")
    settings = ((name, value) for name, value in about["training"].items() if value is not None and name != "seed")
    training = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings if name != "num_labels")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'kind = "comparison"\npaper = "p"\nmodel = "{model}"\nseeds = [{about["seed"]}]\n'
        '[data.mine]\ntrain = "rows.tsv"\nheld_out = "asked.tsv"\n'
        f'[training]\n{training}[defences.plain]\n[defences.coarse-16]\nscheme = "coarse"\nsymbols = 16\n',
        "utf-8",
    )
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    assert made
    result = json.loads(reproduce(recipe, copies, tmp_path / "reproduced", cache=cache).read_text("utf-8"))
    assert {path: path.stat().st_mtime_ns for path in made} == made and len([*cache.iterdir()]) == 2
    (plain,) = compared["ways"]
    figures = numbers_by_name(read_records(result))
    assert figures["accuracy, mine, plain"] == pytest.approx(100 * plain["quality"]["value"], abs=0.01)
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    (symbols,) = document(call(*run, "--ways", "coarse-16", "--out", tmp_path / "again"))["ways"]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")} == made
    assert figures["accuracy, mine, coarse-16"] == pytest.approx(100 * symbols["quality"]["value"], abs=0.01)


def test_a_loss_is_called_falling_only_where_the_noise_of_batches_does_not_explain_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, 40)
    assert loss_fall((noise + 0.8).tolist()) is None
    found = loss_fall((noise + np.linspace(2, 0.8, 40)).tolist())
    assert found is not None and found[0] > found[1]
    assert loss_fall((noise + np.linspace(0.8, 2, 40)).tolist()) is None, "it rises"
    assert loss_fall([3.0, 2.0, 1.0]) is None, "too few to say"
    events = tmp_path / "events.jsonl"
    data = [{"step": 2, "loss": 9.0}, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"eval_loss": 1.0}]
    lines = [Event(time=0.0, message="", data=one).model_dump_json() for one in data]
    events.write_text("\n".join(lines) + '\n{"time": 1, "mes')
    assert reported_losses(tmp_path) == [3.0, 2.0]
    assert reported_losses(tmp_path / "none") == []


# --- words ------------------------------------------------------------------------------------------------------------
def way(name: str, group: WayGroup, value: float, above: float | None = None, read: float | None = None) -> WayResult:
    """A way with this accuracy, so many points above what the user has alone, of which this share is read."""
    seen = (
        None
        if read is None
        else Reading(
            "an attack", "x", *[Interval(read, read - 0.01, read + 0.01, 90)] * 4, 0.05, masks={"masks guessed": 0.5}
        )
    )
    gap = None if above is None else difference(above, above - 0.02, above + 0.02)
    return WayResult(
        name, f"the way {name}", group, "done", quality=Interval(value, value - 0.03, value + 0.03, 400), above=gap,
        reading=seen, seconds=0.1, setup=9.0, bytes=0 if read is None else 200, trust="somebody", command=f"run {name}",
    )  # fmt: skip


HOME = way("home", "nothing is sent", 0.72)


def compared(*ways: WayResult) -> ComparisonResult:
    result = ComparisonResult(
        "a model", "classification", "accuracy", 1600, 400, 800, 3, (HOME, *ways), cost=WorkCost(9.0, 12.0, 10**9)
    )
    return replace(result, verdict=verdict(result))


def test_the_verdict_keeps_text_here_if_nothing_sent_is_worth_more() -> None:
    first, *more = compared(
        way("masked", "names are masked", 0.73, 0.01, 0.7), way("ids", "words are scrambled", 0.6, -0.12, 0.6)
    ).verdict
    assert first.startswith("Keep it here: the way home has 72 % right")
    assert any("400" in one for one in more), "so many rows tell no small difference apart"


def test_the_verdict_names_a_way_that_hides_text_and_gains() -> None:
    first = compared(way("good", "words are scrambled", 0.8, 0.08, 0.05)).verdict[0]
    assert "The way good is worth sending: 80 % right" in first and "5 %" in first and "72 % right" in first


def test_the_verdict_does_not_recommend_what_attacks_have_not_finished_reading() -> None:
    good = way("good", "words are scrambled", 0.8, 0.08, 0.05)
    assert good.reading is not None
    first = compared(replace(good, reading=replace(good.reading, cut=True))).verdict[0]
    assert "may be worth sending" in first and "at least 5 %" in first and "--attacks" in first


def test_the_verdict_says_that_no_model_was_tried_at_home_or_that_no_way_was_finished() -> None:
    commonest, good = way("commonest", "nothing is sent", 0.5), way("good", "words are scrambled", 0.8, 0.3, 0.05)
    result = ComparisonResult("a model", "classification", "accuracy", 1600, 400, 800, 3, (commonest, good))
    assert any("No model was tried" in one for one in verdict(result))
    assert not any("No model was tried" in one for one in compared(good).verdict)
    assert "was finished" in compared(replace(good, state="failed", quality=None, reading=None)).verdict[0]
    assert compared().verdict[0].startswith("Only ways with nothing sent were run")
    assert "the way home, with 72 % right (69 to 75)" in compared().verdict[0]


def test_what_was_not_learnt_is_not_recommended_where_nothing_was_sent() -> None:
    unfinished = replace(way("good", "words are scrambled", 0.8), state="not run", quality=None)
    unclear = replace(compared(unfinished), over_commonest=difference(0.02, -0.05, 0.09))
    first, *others = verdict(unclear)
    assert first.startswith("These rows cannot tell what sending is worth") and "the way home has 72 % right" in first
    assert "No way that sends something was finished." in others
    command = "milkglass compare MODEL ROWS --quick --out out"
    kept = replace(unclear, kept="kept", kept_way="home", origin={"command": command, "whole": command})
    assert words.next_line(kept).startswith("next: milkglass compare MODEL ROWS --out out ")
    assert words.next_line(replace(kept, origin={})) == ""


def test_a_way_that_was_not_finished_may_be_read_less_than_the_least() -> None:
    masked = way("masked", "names are masked", 0.7, -0.02, 0.7)
    coarse = replace(way("coarse", "words are scrambled", 0.6), state="not run", quality=None)
    sentence = "The way coarse was not finished: what it is worth, and what is read, is not known."
    assert sentence in verdict(compared(masked, coarse))
    assert not any("not known" in sentence for sentence in verdict(compared(masked)))


def test_the_legend_explains_the_marks_that_stand_in_the_table() -> None:
    known = compared(way("masked", "names are masked", 0.7, -0.02, 0.7))
    assert "-: nothing is sent" in words.legend(known) and "Not measured:" not in words.legend(known)
    masked = known.ways[1]
    assert masked.reading is not None
    nameless = replace(masked, reading=replace(masked.reading, names=None))
    assert "Not measured:" in words.legend(compared(nameless))


def test_the_verdict_says_that_what_gains_is_read() -> None:
    masked, plain = way("masked", "names are masked", 0.8, 0.08, 0.7), way("plain", "sent as it is", 0.82, 0.1, 1.0)
    first, second, *_ = compared(masked, plain).verdict
    assert first.startswith("No way here hides your text") and "82 % right" in first
    assert "the way masked (80 % right; 70 % of the names and other content words are read)" in second


def test_the_verdict_says_which_way_is_read_least_and_a_line_names_what_is_read_more() -> None:
    masked, ids = (
        way("masked", "names are masked", 0.73, 0.01, 0.7),
        way("ids", "words are scrambled", 0.6, -0.12, 0.04),
    )
    assert ids.reading is not None
    ids = replace(ids, reading=replace(ids.reading, numbers=Interval(0.51, 0.4, 0.6, 99)))
    sentence = next(one for one in compared(masked, ids).verdict if "least is read of" in one)
    assert "the way ids" in sentence and "51 % of the numbers" in sentence and "60 % right" in sentence
    assert words.line(ids, "accuracy").endswith("4 % of names and content words read, 51 % of numbers")
    assert not words.line(masked, "accuracy").endswith("of numbers")


def test_no_way_is_read_least_of_which_each_share_is_larger() -> None:
    """Intervals are wider where few tokens are numbers, or few texts have any."""
    words_way, symbols = (
        way("words", "words are replaced", 0.6, -0.25, 0.15),
        way("symbols", "words are scrambled", 0.55, -0.3, 0.008),
    )
    assert words_way.reading is not None and symbols.reading is not None
    more = replace(words_way.reading, names=Interval(0.15, 0.11, 0.21, 35), numbers=Interval(0.49, 0.44, 0.54, 35))
    less = replace(symbols.reading, names=Interval(0.07, 0.04, 0.12, 35), numbers=Interval(0.40, 0.25, 0.57, 35))
    verdict = compared(replace(words_way, reading=more), replace(symbols, reading=less)).verdict
    assert "least is read of the way symbols" in next(one for one in verdict if "least is read of" in one)


def test_a_way_that_shows_numbers_does_not_hide_the_text() -> None:
    one = way("symbols", "words are scrambled", 0.8, 0.08, 0.05)
    assert one.reading is not None
    numbers = replace(one, reading=replace(one.reading, numbers=Interval(0.46, 0.4, 0.5, 99)))
    first = compared(numbers).verdict[0]
    assert first.startswith("No way here hides your text") and "46 % of the numbers are read" in first
    nothing_known = replace(one.reading, tokens=None, content=None, names=None, numbers=None)
    unknown = compared(replace(one, reading=nothing_known)).verdict[0]
    assert unknown.startswith("No way here hides your text") and "unknown share" in unknown
    all_tokens = replace(nothing_known, tokens=Interval(0.9, 0.8, 1, 99), numbers=Interval(0.02, 0, 0.1, 99))
    readable = compared(replace(one, reading=all_tokens)).verdict[0]
    assert readable.startswith("No way here hides your text") and "90 % of all its tokens" in readable


def test_a_package_s_way_with_nothing_sent_counts_for_ways_before_it(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    own = ComparisonRows.read(DataFile(written(tmp_path / "rows.jsonl", rows(0, 200))), None, 3)
    settings = ComparisonSettings("bert", base, "digest", own, Hyperparameters(), 0, tmp_path, 1, print)
    right = np.asarray(own.held_out.labels)
    answers = {name: np.where(np.arange(len(right)) < share * len(right), right, 1 - right) for name, share in
               (("linear", 0.6), ("plain", 0.85), ("mine", 0.95))}  # fmt: skip
    results = [
        replace(way(name, group, 0.0), quality=quality_of(own, answers[name]), above=None)
        for name, group in (("linear", "nothing is sent"), ("plain", "sent as it is"), ("mine", "nothing is sent"))
    ]
    run = _Run(settings, tmp_path, TimeLimits(), [], print)
    merged = run.with_earlier(results, answers)
    plain = next(one for one in merged if one.name == "plain")
    assert plain.above is not None and plain.above.value < 0
    result = ComparisonResult("a model", "classification", "accuracy", 160, 40, 80, 3, tuple(merged))
    assert verdict(result)[0].startswith("Keep it here: the way mine")


def test_a_comparison_in_which_nothing_was_learnt_says_so() -> None:
    result = compared(way("commonest", "nothing is sent", 0.64), way("ids", "words are scrambled", 0.6, -0.12, 0.6))
    assert verdict(result)[0].startswith("Keep it here"), "nothing was compared with the commonest class"
    unclear = replace(result, over_commonest=difference(0.08, -0.01, 0.17))
    first, *others = verdict(unclear)
    assert "no way here is shown to beat naming the commonest class (the way home has 72 % right)" in first
    without_model = replace(unclear, ways=tuple(one for one in unclear.ways if one.name != "home"))
    assert "shown to beat naming the commonest class (64 % right)" in verdict(without_model)[0]
    surest = "The surest difference from naming the commonest class is +8.0 (-1.0 to +17.0) points. "
    assert others[0].startswith(surest)
    certain = replace(unclear, over_commonest=replace(unclear.over_commonest, p_value=1.0))
    assert "chance alone may give one as sure in every comparison (p-value 1," in verdict(certain)[1]
    nearly = replace(unclear, over_commonest=replace(unclear.over_commonest, p_value=0.0502))
    assert "(p-value 0.051, corrected for the number of ways; 0.05 or less" in verdict(nearly)[1], (
        "never rounded to what would show it"
    )
    below = replace(unclear, over_commonest=difference(-0.08, -0.15, -0.01))
    assert verdict(below)[1] == "No way is better than naming the commonest class in these rows."
    assert "--quick" not in first and not any("Keep it here" in sentence for sentence in others)
    assert not any("smaller" in sentence for sentence in verdict(replace(unclear, smaller_ways=("home",)))[1:])
    in_haste = replace(unclear, origin={**unclear.origin, "command": "milkglass compare MODEL ROWS --quick --out out"})
    assert "leave out --quick" in verdict(in_haste)[0]
    few = verdict(replace(in_haste, held_out=40))[0]
    assert few.endswith("Give more rows: 40 held-out ones tell large differences only.")
    whole = replace(in_haste, origin={**in_haste.origin, "whole": "milkglass compare MODEL ROWS --quick"})
    assert words.next_line(whole) and not words.next_line(replace(whole, held_out=40)), "it would hardly tell more"
    for worse in (difference(-0.08, -0.15, -0.01), difference(math.nan, math.nan, math.nan)):
        assert "no way here is shown" in verdict(replace(result, over_commonest=worse))[0]
    clear = replace(result, over_commonest=difference(0.08, 0.01, 0.15))
    assert verdict(clear)[0].startswith("Keep it here")


def test_the_page_of_a_comparison_in_which_nothing_was_learnt_recommends_no_way() -> None:
    found = compared(way("commonest", "nothing is sent", 0.64), way("ids", "words are scrambled", 0.6, -0.12, 0.6))
    origin = dict.fromkeys(("milkglass", "commit", "date", "run"), "x") | {
        "command": "milkglass compare m r --quick --ways linear", "whole": "milkglass compare m r --quick"
    }  # fmt: skip
    learnt = replace(found, origin=origin, kept_folders={"home": "kept"})
    unclear = replace(learnt, over_commonest=difference(0.08, -0.01, 0.17))
    recommended = '<tr class="home"><th scope="row">the way home<small>the best with nothing sent</small>'
    assert recommended in page.render(learnt) and recommended not in page.render(unclear)
    html = page.render(unclear)
    assert "and may say more</th><td><code>milkglass compare m r</code>" in html
    assert "<code>kept</code>; no way here is shown to have learnt anything." in html


def test_every_way_is_compared_with_the_commonest_class(tmp_path: Path) -> None:
    """A way that sends may beat it where the best with nothing sent does not; the number of ways is counted."""
    own = ComparisonRows.read(DataFile(written(tmp_path / "rows.jsonl", rows(0, 400))), None, 3)
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    settings = ComparisonSettings("bert", base, "digest", own, Hyperparameters(), 0, tmp_path, 1, print)
    truth = np.asarray(own.held_out.labels)
    useless, good = 1 - truth, np.where(np.arange(len(truth)) % 8 == 0, 1 - truth, truth)
    alone, both = (_over_commonest(settings, answers) for answers in ([good], [useless, good]))
    assert alone is not None and both is not None and both.value == alone.value > 0.2
    assert both.p_value == pytest.approx(2 * alone.p_value) and both.p_value < 0.05
    nothing = _over_commonest(settings, [useless])
    assert nothing is not None and nothing.value < 0 and _over_commonest(settings, []) is None


@pytest.mark.slow
def test_the_page_has_the_command_that_tries_a_larger_model(tmp_path: Path) -> None:
    """It keeps that model in a folder of its own: the smaller one may be as good, and quicker."""
    data = written(tmp_path / "rows.jsonl", rows(0, 100))
    run = ("compare", tiny.save("bert", tmp_path / "bert"), data, "--out", tmp_path / "out", *SMALL, "--json")
    found = document(call(*run, "--ways", "linear"))
    assert found["larger_command"].endswith("--ways large-encoder --keep kept-large-encoder")
    assert str(data) in found["larger_command"] and "--ways linear" not in found["larger_command"]
    assert found["larger_command"] in html.unescape((tmp_path / "out" / "compare.html").read_text("utf-8"))
    assert document(call(*run, "--ways", "own-model"))["larger_command"] == ""


def test_a_smaller_model_at_home_that_is_as_good_is_named(tmp_path: Path) -> None:
    """The best is the one with the most right answers; one that is not told from it may be preferred."""
    own = ComparisonRows.read(DataFile(written(tmp_path / "rows.jsonl", rows(0, 400))), None, 3)
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    settings = ComparisonSettings("bert", base, "digest", own, Hyperparameters(), 0, tmp_path, 1, print)
    linear, encoder = way("linear", "nothing is sent", 0.7), way("encoder", "nothing is sent", 0.72)
    plain = way("plain", "sent as it is", 0.7, -0.02, 1.0)
    found = ComparisonResult("a model", "classification", "accuracy", 1, 100, 1, 2, (linear, encoder, plain))
    truth = np.asarray(own.held_out.labels)
    nearly, useless = np.where(np.arange(len(truth)) < 2, 1 - truth, truth), 1 - truth
    for answers, expected in ((nearly, ("linear",)), (useless, ())):
        smaller = _smaller_ways(settings, found, {"encoder": truth, "linear": answers})
        assert smaller == expected
        sentence = "The way linear is smaller; 100 rows are too few to tell it from the best."
        assert (sentence in verdict(replace(found, smaller_ways=smaller))) == bool(expected)
    best_linear = replace(linear, quality=Interval(0.9, 0.8, 0.95, 90))
    best_is_smallest = replace(found, ways=(best_linear, encoder))
    assert _smaller_ways(settings, best_is_smallest, {"linear": truth, "encoder": nearly}) == ()


def test_only_the_kept_model_has_the_command_that_uses_it(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    own = ComparisonRows.read(DataFile(written(tmp_path / "rows.jsonl", rows(0, 100))), None, 3)
    commands = {"kept": "kept", "text": "'a new text'", "compare": "milkglass compare demo:minilm rows.jsonl --quick"}
    settings = ComparisonSettings("bert", base, "digest", own, Hyperparameters(), 0, tmp_path, 1, print, commands)
    linear, encoder = (way(name, "nothing is sent", 0.7) for name in ("linear", "encoder"))
    assert _with_command(linear, {"linear": "kept"}, settings).command == "milkglass classify --local kept 'a new text'"
    expected = "milkglass compare demo:minilm rows.jsonl --quick --ways encoder --keep kept-encoder"
    assert _with_command(encoder, {"linear": "kept"}, settings).command == expected
    result = replace(compared(linear), kept="kept", kept_way="linear")
    assert words.next_line(result).startswith("next: run linear")
    assert words.kept_line(result) == "kept: the way linear in kept" and words.kept_line(compared(linear)) == ""
    useless = replace(result, over_commonest=difference(0.01, -0.1, 0.12))
    assert words.kept_line(useless).endswith("in kept; no way here is shown to have learnt anything")
    both = replace(result, kept_folders={"linear": "kept", "home": "other"})
    assert words.next_line(both).startswith("next: run linear"), "what this call kept"
    earlier = replace(both, kept="", kept_way="")
    assert words.next_line(earlier).startswith("next: run home"), (
        "the best with nothing sent, which an earlier call kept"
    )
    assert "page" in words.next_line(compared(linear))
    assert words.next_line(useless) == "", "what was not learnt is not recommended"


def test_more_time_may_read_more_is_said_of_cut_attacks() -> None:
    one = way("ids", "words are scrambled", 0.6, -0.12, 0.6)
    assert one.reading is not None
    found = compared(replace(one, reading=replace(one.reading, cut=True)))
    assert "With more work (--attacks) attacks may read more of: the way ids." in found.verdict
    assert words.content_share_text(found.ways[1]) == "at least 60 %"
    share = Interval(0.668, 0.61, 0.72, 31)
    assert words.share_text(found.ways[1], share) == "at least 66 %", "rounded up, less would be read than it says"
    assert words.share_text(found.ways[1], share, shows_interval=True) == "at least 66 % (61-72)"
    assert words.share_text(one, share, shows_interval=True) == "67 % (61-72)"
    every = Interval(1.0, 1.0, 1.0, 99)
    full = replace(one.reading, cut=True, content=every, names=every, numbers=None)
    found = compared(replace(one, reading=full))
    assert not any("more work" in sentence for sentence in found.verdict), "nothing is left to read"
    assert words.content_share_text(found.ways[1]) == "100 %"
    found = compared(replace(one, reading=replace(full, numbers=Interval(0.5, 0.4, 0.6, 9))))
    assert "With more work (--attacks) attacks may read more of: the way ids." in found.verdict


def test_a_larger_model_that_was_tried_is_named() -> None:
    plain, larger = way("plain", "sent as it is", 0.7, -0.02, 1.0), way("large-encoder", "nothing is sent", 0.71)
    assert any("or here with --ways large-encoder" in sentence for sentence in compared(plain).verdict)
    with_larger = " ".join(compared(plain, larger).verdict)
    assert "The way large-encoder has 71 % right; what another model" in with_larger and "only with" not in with_larger


def test_the_verdict_names_what_you_have_alone_and_was_not_finished() -> None:
    plain = way("plain", "sent as it is", 0.7, -0.02, 1.0)
    failed = WayResult("encoder", "a small encoder", "nothing is sent", "failed", "its training diverged")
    late = WayResult("linear", "a linear model", "nothing is sent", "not run", "9 min of 10 min are spent")
    assert "A small encoder was not finished, and may be better." in compared(plain, failed).verdict
    both = compared(plain, failed, late).verdict
    assert "A small encoder and a linear model were not finished, and may be better." in both
    assert not any("not finished" in sentence for sentence in compared(plain).verdict)


def test_names_that_few_texts_have_are_not_called_hidden() -> None:
    hidden = way("ids", "words are scrambled", 0.9, 0.2, 0.02)
    assert hidden.reading is not None and "is worth sending" in compared(hidden).verdict[0]
    for names in (None, Interval(0.0, 0.0, 0.05, 3)):
        without = replace(hidden, reading=replace(hidden.reading, names=names))
        first = compared(without).verdict[0]
        assert "may be worth sending" in first and "How many names are read is not measured" in first


def test_what_may_be_read_decides_whether_a_way_hides_text() -> None:
    """A share of 9 % whose interval ends at 17 % is not known to be small."""
    good = way("good", "words are scrambled", 0.8, 0.08, 0.09)
    assert good.reading is not None and "is worth sending" in compared(good).verdict[0]
    wide = replace(good, reading=replace(good.reading, numbers=Interval(0.09, 0.04, 0.17, 20)))
    assert "No way here hides your text" in compared(wide).verdict[0]


@pytest.mark.parametrize(("value", "p_value", "warns"), [(0.3, 0.2, True), (0.3, 0.01, False), (-0.2, 0.01, True)])
def test_scores_that_no_way_learnt_say_nothing_of_sending(value: float, p_value: float, warns: bool) -> None:
    """A correlation is compared with 0, which answers that are all the same have."""
    local = replace(HOME, quality=Interval(math.nan if value < 0 else value, -0.1, 0.6, 90))
    sent = way("ids", "words are scrambled", 0.1, -0.2, 0.6)
    found = ComparisonResult("a model", "regression", "pearson", 90, 90, 90, 0, (local, sent))
    words_of = " ".join(verdict(replace(found, over_commonest=replace(difference(value, -1, 1), p_value=p_value))))
    assert ("shown to beat naming the mean score" in words_of) == warns and " nan" not in words_of


def test_nothing_is_said_without_a_way_to_compare_with() -> None:
    only = ComparisonResult(
        "a model", "classification", "accuracy", 9, 9, 9, 3, (way("ids", "words are scrambled", 0.6, None, 0.6),)
    )
    assert "nothing with nothing sent" in verdict(only)[0] or "No way with nothing sent" in verdict(only)[0]
    assert "best" in verdict(replace(only, ways=(HOME,)))[0]


def test_the_page_has_every_way_once_and_escapes_what_it_quotes() -> None:
    odd = replace(way("odd", "words are scrambled", 0.6, -0.1, 0.3), title="<script>alert(1)</script>")
    missing = WayResult("cut", "the way cut", "states are sent", "not run", "9 min of 10 min are spent")
    html = page.render(compared(odd, missing))
    assert "<script>alert" not in html and "&lt;script&gt;" in html
    assert html.count("the way cut") == 1 and "9 min of 10 min are spent" in html
    assert "run odd" in html and html.count("<svg") == 1


def test_a_text_that_crosses_in_place_of_another_is_shown() -> None:
    masked = way("masked", "names are masked", 0.7, -0.02, 0.7)
    example = ReadExample(
        "we met ann", (TokenReading("we", True, "we"), TokenReading("met", True, "met")), (), "we met <PERSON>"
    )
    assert masked.reading is not None
    html = page.render(compared(replace(masked, reading=replace(masked.reading, example=example))))
    assert "<small>as it is sent</small> we met &lt;PERSON&gt;" in html
    ids = replace(example, sent_text="")
    assert "as it is sent<" not in page.render(
        compared(replace(masked, reading=replace(masked.reading, example=ids)))
    ), "ids and states are no text"


def test_seconds_that_a_kill_left_uncounted_do_not_end_the_page() -> None:
    """A run that is killed after the last step of a training, before its seconds are written, goes on to its end."""
    cell = page.processor_text(replace(way("encoder", "nothing is sent", 0.7), seconds=7.2, setup=math.nan))
    assert cell == "7.2\u00a0s for 1,000; setting up not counted"
    html = page.render(compared(replace(way("encoder", "nothing is sent", 0.7), seconds=math.nan, setup=math.nan)))
    assert "not counted for 1,000; setting up not counted" in html


def test_a_cell_of_many_words_breaks_between_them() -> None:
    """One that did not pushed the table over the page's edge, with whom the user trusts."""
    summary = "words named without their order: F1 14.9 % (14.1 to 15.8); the same words for every text: 9.1 %"
    seen = Reading("an attack", "x", content=None, names=None, numbers=None, tokens=None, guess=0.05, summary=summary)
    html = page.render(compared(replace(way("cape", "states are sent", 0.7, -0.02, 0.1), reading=seen)))
    named = "<div>words named without their order: <span>F1 14.9 %</span> <span>(14.1 to 15.8);</span>"
    assert f"{named} the same words for every text: <span>9.1 %</span></div>" in html
    assert html.count("words named without their order") == 1, "its cell has it"
    assert "<div><span>72 %</span> <span>(69-75)</span></div>" in html, "one part beside its name, on a narrow page"


@pytest.mark.parametrize("measure", ["accuracy", "loss"])
def test_markers_stand_where_their_values_are(measure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways with the same value are rings around each other; moving one would show it below a worse way."""
    drawn = list[Any]()
    monkeypatch.setattr(picture, "svg", lambda figure, title: drawn.append(figure) or "")
    values = {"plain": (0.96, 1.0), "masked": (0.95, 0.9), "confidential": (0.96, 0.0), "enclave": (0.955, 0.01)}
    ways = [way(name, "sent as it is", value, 0.1, read) for name, (value, read) in values.items()]
    picture.picture_svg(replace(compared(*ways), measure=measure))
    (axes,), scale = drawn[0].axes, 100 if measure == "accuracy" else 1
    markers = [line for line in axes.lines if len(line.get_xdata()) == 1]
    places = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in markers]
    assert places[1:] == [pytest.approx((100 * read, scale * value)) for value, read in values.values()]
    assert markers[3].get_markersize() < markers[4].get_markersize() and markers[4].get_fillstyle() == "none"


def test_no_line_of_the_page_ends_inside_an_option() -> None:
    noted = replace(way("ids", "words are scrambled", 0.6), notes=("give --epochs <b>",))
    assert 'give <span class="whole">--epochs</span> &lt;b&gt;' in page.render(compared(noted))


def test_no_two_near_markers_have_one_ring() -> None:
    assert picture._rings([(0.0, 5.0), (1.9, 5.0), (2.1, 5.0), (50.0, 5.0), (0.0, 9.0)]) == [0, 1, 2, 0, 0]


def test_ways_at_one_place_share_a_name() -> None:
    """Ways that nothing is read of often have the same quality; a name each would fill the picture."""
    assert picture._crowds([(0.0, 5.0), (1.9, 5.0), (2.1, 5.0), (50.0, 5.0), (0.0, 9.0)]) == [[0, 1, 2], [3], [4]]
    svg = picture.picture_svg(
        compared(*(way(name, "words are replaced", 0.7, -0.02, 0.1) for name in ("rnm", "coarse-16")))
    )
    assert ">rnm, coarse-16<" in svg and ">rnm<" not in svg
    assert (
        picture._joint_name(["encoder", "rnm", "coarse-64", "confidential"]) == "encoder, rnm, coarse-64,\nconfidential"
    )


def test_the_picture_draws_only_what_is_known() -> None:
    unread = replace(way("cape", "states are sent", 0.7, -0.02, 0.1), reading=None)
    svg = picture.picture_svg(compared(unread, way("ids", "words are scrambled", 0.6, -0.1, 0.3)))
    assert ">ids<" in svg and ">home<" in svg and ">cape<" not in svg
    assert "no share of content words is known: the way cape." in page.render(compared(unread))
    assert picture.picture_svg(ComparisonResult("a model", "classification", "accuracy", 9, 9, 9, 3, ())) == ""


def test_a_way_is_read_back_as_it_was_kept() -> None:
    for one in (HOME, way("ids", "words are scrambled", 0.6, -0.1, 0.3)):
        again = read_way(json.loads(json.dumps(compared(one).to_json()["ways"][1])))
        assert repr(again) == repr(one) and math.isnan(again.share_read) == math.isnan(one.share_read)


# --- ways -------------------------------------------------------------------------------------------------------------
def test_ways_are_chosen_by_name_in_their_order(tmp_path: Path) -> None:
    assert [one.name for one in choose_ways(["plain", "linear"], False, False)] == ["linear", "plain"]
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    quick, usual, every = (
        choose_ways([], *one, "classification", base) for one in ((True, False), (False, False), (False, True))
    )
    assert {one.name for one in quick} < {one.name for one in usual} <= WAYS.built_in.keys()
    assert len(quick) < len(usual) < len(every) == sum("classification" in one.tasks for one in WAYS.values())
    more = {one.name for one in every} - {one.name for one in usual}
    assert {"custext+-6", "santext+-12", "rnm-1", "textobfuscator", "dp-forward"} <= more
    assert [one.name for one in choose_ways(["rnm-1"], True, False)] == ["rnm-1"]
    assert [one.group for one in every][:3] == ["nothing is sent"] * 3 and every[-1].group == "sent as it is"
    with pytest.raises(UsageError, match="obfuslm"):
        choose_ways(["nonsense"], False, False)
    assert [one.name for one in choose_ways(["coarse-64"], True, False)] == ["coarse-64"], "a name is taken at its word"
    with pytest.raises(UsageError, match="there are no ways 'nonsense', 'plane'"):
        choose_ways(["nonsense", "plain", "plane"], False, False)
    with pytest.raises(UsageError, match="--all"):
        choose_ways(["plain"], False, True)


def test_the_model_itself_is_on_your_machine_in_every_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the provider tunes is trained here, so that sending is never compared with a smaller model alone."""
    bert, gpt2 = (Checkpoint.open(tiny.save(family, tmp_path / family)) for family in ("bert", "gpt2"))

    def names(base: Checkpoint, size: int, task: str, is_quick: bool = True) -> set[str]:
        monkeypatch.setattr(ways_module, "weight_bytes", lambda model: size)
        return {one.name for one in choose_ways([], is_quick, False, task, base) if one.is_local}

    small, large, huge = 10**8, 4 * 10**8, 2 * 10**9
    assert names(bert, small, "classification") == {"commonest", "linear", "encoder"}
    assert names(bert, large, "classification") == {"commonest", "linear", "encoder", "large-encoder"}
    for is_quick, more in ((True, set[str]()), (False, {"large-encoder"})):
        expected = {"commonest", "linear", "encoder", "own-model"} | more
        assert names(bert, huge, "regression", is_quick) == names(gpt2, small, "classification", is_quick) == expected
    assert names(gpt2, large, "causal-lm") == {"untuned", "alone"}
    assert names(gpt2, huge, "causal-lm") == {"untuned", "alone", "own-model"}


def test_every_way_says_whom_one_trusts_and_what_comes_next() -> None:
    for one in WAYS.values():
        has_command = all(one.command_for(task) for task in one.tasks)
        assert one.trust and one.title and (has_command or one.name in ("commonest", "plain"))
        one.command.format(model="m", rows="r", task="", kept="k", text="t", compare="c", halves="")


def test_every_next_command_is_one(tmp_path: Path) -> None:
    """The command line reads it: each option exists, and none that is needed is missing."""
    group = get_command(app)
    names, fields = (
        set[str](),
        {
            "model": "m", "rows": "r", "task": " --task regression", "kept": "k", "text": "t",
            "compare": "milkglass compare m r", "halves": " --epochs 3",
        },
    )  # fmt: skip
    for one in WAYS.values():
        if not one.command.startswith("milkglass ") or "--help" in one.command:
            continue
        words = shlex.split(one.command.format(**fields))
        command, context, words = group, Context(group), words[1:]
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        command.make_context("milkglass", list(words), parent=context)
        names.add(one.name)
    assert {"linear", "masked", "obfuslm", "coarse-16", "cape"} <= names
    keys = [word for one in WAYS.values() for word in one.command.split() if word.endswith(".mgkey")]
    assert len(keys) == len({*keys}), "two ways never share a key"


@pytest.mark.parametrize("family", ["bert", "llama-tied"])
def test_obfuscate_makes_the_key_that_was_attacked(family: str, tmp_path: Path) -> None:
    """The command that a page gives for a scrambled way has the parameters of the way, for encoders and decoders."""
    base, group, named = Checkpoint.open(tiny.save(family, tmp_path / family)), get_command(app), list[str]()
    for way in WAYS.values():
        words = shlex.split(way.command.format(model="m", rows="r", task="", kept="k", text="t", halves=""))
        if words[:2] != ["milkglass", "obfuscate"]:
            continue
        command = group.commands["obfuscate"]  # type: ignore[attr-defined]
        options = command.make_context("obfuscate", words[2:]).params
        parameters = _scheme_parameters(options["scheme"] or "obfuslm", options["assignments"] or [], {})
        asked = scheme_for(base, options["scheme"] or "obfuslm", **parameters)
        settings: Any = SimpleNamespace(base=base)
        assert isinstance(way, DefenceWay)
        defence = way.defence(settings)
        assert isinstance(defence, TableDefence) and asked.document() == defence.scheme.document(), way.name
        named.append(way.name)
    assert {"obfuslm", "orthogonal", "coarse-16", "coarse-64"} <= {*named}


def test_next_commands_of_scores_say_so(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    scores = written(tmp_path / "scores.jsonl", [{**row, "label": str(i / 7)} for i, row in enumerate(rows(0, 100))])
    for data, task in ((scores, "regression"), (written(tmp_path / "rows.jsonl", rows(0, 100)), "classification")):
        own = ComparisonRows.read(DataFile(data), None, 3, task=task)
        option = " --task regression" if task == "regression" else ""
        commands = {
            "model": "m", "rows": "r", "task": option, "kept": "k", "text": "t", "halves": "",
            "compare": "milkglass compare",
        }  # fmt: skip
        settings = ComparisonSettings(
            "bert", base, "digest", own, Hyperparameters(), 0, tmp_path, 1, print, commands=commands
        )
        named = {name: _with_command(way(name, WAYS[name].group, 0.5), {}, settings).command for name in WAYS}
        assert named["coarse-16"].endswith("--data r" + option) and named["coarse-64"].endswith("--data r" + option)
        assert WAYS["cape"].task_refusal(task) is None and WAYS["cape"] in choose_ways([], False, False, task, base)
        assert ("--task regression" in halves_options(Hyperparameters(task=task))) == (task == "regression")


def test_masks_guessed_are_those_of_the_attack_that_guesses_most(tmp_path: Path) -> None:
    base = Checkpoint.open(resolve_model("demo:minilm"))
    texts = [f"Maria Keller of Berne called on Monday about form {i}" for i in range(30)]
    client, server = MaskedText().split(base, None, bytes(32), tmp_path / "server")
    scene = scene_of(base, client, server, texts, {})
    tokens = scene.truth.tokens.ids
    none, all_right = ("Nothing", np.full_like(tokens, NO_BELIEF)), ("All", tokens)
    for attack_readings, share in (([none], 0.0), ([none, all_right], 1.0), ([all_right, none], 1.0)):
        masks, guesser = readings._masks(scene, client, texts, attack_readings)
        assert masks["masks guessed"] == share and 0 <= masks["names left"] < 1
        assert guesser == ("All" if share else "Nothing")
    assert "masks guessed" not in readings._masks(scene, client, texts, [])[0]
    all_guessed = readings._masks_in_words(masks, "All", True)[-1]
    assert all_guessed.startswith("100.0 %") and '"All"' in all_guessed
    partly_guessed = readings._masks_in_words({**masks, "masks guessed": 0.0459}, "All", True)[-1]
    assert partly_guessed.startswith("at least 4.5 %")


# --- the command ------------------------------------------------------------------------------------------------------
def test_ways_are_compared_and_a_second_run_takes_them_over(tmp_path: Path) -> None:
    model, data, out = (
        tiny.save("bert", tmp_path / "model"),
        written(tmp_path / "rows.jsonl", rows(0, 300)),
        tmp_path / "out",
    )
    run = ("compare", model, data, "--out", out, *SMALL, "--ways", "commonest,linear,rnm", "--json")
    first = call(*run)
    found = document(first)
    assert [one["name"] for one in found["ways"]] == ["commonest", "linear", "rnm"]
    assert [one["state"] for one in found["ways"]] == ["done"] * 3, first.stderr
    assert found["rows"] == 240 and found["held_out"] == 60 and found["attacked"] == 120
    rnm = found["ways"][2]
    assert rnm["reading"]["tokens"]["value"] > 0 and rnm["above"] is not None and rnm["bytes"] > 0
    assert rnm["setup"] > 0 and rnm["seconds"] is not None and found["ways"][1]["setup"] > 0
    assert "[3 of 3]" in first.stderr and "step" in first.stderr
    html = (out / "compare.html").read_text("utf-8")
    assert found["verdict"][0] in html and "--method rnm" in html
    assert (out / "compare.json").stat().st_mode & 0o077 == 0, "it quotes the user's texts"
    assert (out / "kept").is_dir() and not [*out.rglob("optimizer.pt"), *out.rglob("trained.safetensors")]
    again = call(*run)
    assert "step" not in again.stderr and again.stderr.count("taken over from an earlier call") == 3
    taken_over = "Taken over from an earlier call of the same command: commonest, linear, rnm"
    assert found["taken_over"] == {} and taken_over in document(again)["notes"]
    assert "in all calls" in (out / "compare.html").read_text("utf-8") and "in all calls" not in html
    names = ("name", "quality", "above", "reading")
    assert [[one[name] for name in names] for one in document(again)["ways"]] == [
        [one[name] for name in names] for one in found["ways"]
    ]
    more = call(*run[:-2], "commonest,linear,rnm,plain", "--json")
    plain = document(more)["ways"][3]
    assert plain["reading"]["tokens"]["value"] == 1 and plain["name"] == "plain"
    assert document(more)["ways"][2]["quality"] == rnm["quality"], "another way costs only itself"
    earlier_page = (out / "compare.html").read_bytes()
    other = call(*run[:-2], "commonest", "--seed", 3, "--json")
    assert other.exit_code == 0 and len([*(out / "runs").iterdir()]) == 2, "another run in the same folder"
    assert "--ways commonest " in document(other)["origin"]["command"]
    aside = out / "runs" / document(more)["origin"]["run"] / "compare.html"
    assert aside.read_bytes() == earlier_page and f"is now {aside}" in other.stderr
    alone = document(call(*run[:-2], "linear", "--keep", tmp_path / "kept-linear", "--json"))
    assert [one["name"] for one in alone["ways"]] == ["commonest", "linear", "rnm", "plain"], "the page keeps all ways"
    assert alone["kept_way"] == "linear" and f"--local {tmp_path / 'kept-linear'} " in alone["ways"][1]["command"]
    folders = {"linear": str(tmp_path / "kept-linear")}
    assert alone["kept_folders"] == folders
    assert document(call(*run[:-2], "commonest", "--json"))["kept_folders"] == {"linear": str(out / "kept")}
    assert document(call(*run[:-2], "rnm", "--keep", tmp_path / "other-kept", "--json"))["kept_folders"] == {
        "linear": str(out / "kept")
    }, "rnm has no model, and an earlier call's folder is still there"
    sources = {source for source in alone["taken_over"].values() if source.endswith("--json")}
    assert len(sources) == 2 and all(f"Taken over from `{one}`: " in "".join(alone["notes"]) for one in sources)
    assert alone["ways"][3]["above"] is not None and alone["ways"][3]["quality"] == plain["quality"]
    third = call(*run)
    assert "step" not in third.stderr and document(third)["ways"][2] == document(again)["ways"][2]
    refused(call("compare", data, model), 2, "rows.jsonl")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    refused(call(*run[:3], "--out", tmp_path / "other", *SMALL), 2, "other")


@pytest.mark.slow
def test_a_way_is_run_again_if_its_attacks_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 300))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "commonest,linear,rnm", "--json")
    first = document(call(*run))
    assert "attacked" not in call(*run).stderr
    other = replace(ATTACKS["tfa"], k=11)  # type: ignore[type-var]
    monkeypatch.setitem(ATTACKS._entries, "tfa", other)  # type: ignore[arg-type]
    again = call(*run)
    assert "attacked" in again.stderr and "training from step" not in again.stderr, "its cell is as it was"
    assert document(again)["ways"][2]["quality"] == first["ways"][2]["quality"]


def test_a_way_that_fails_says_what_to_do_and_its_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 200))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "commonest,linear", "--json")
    fit = LinearModel.fit

    def failing(*args: object, **kwargs: object) -> None:
        time.sleep(1.2)
        raise UsageError("the disk is full", "free some of it")

    monkeypatch.setattr(LinearModel, "fit", failing)
    found = document(call(*run))
    assert found["ways"][1]["reason"] == "the disk is full; free some of it" and found["cost"]["clock"] > 1
    assert found["cost"]["processor"] > 0 and found["cost"]["peak_bytes"] > 10**7
    monkeypatch.setattr(LinearModel, "fit", fit)
    found = document(call(*run))
    assert found["ways"][1]["state"] == "done"
    again = document(call(*run))
    assert again["cost"]["clock"] > 1.2, "of the call that failed, too"


def test_what_only_another_run_needs_is_said_and_may_be_removed(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 300))
    out = tmp_path / "out"
    run = ("compare", model, data, "--out", out, *SMALL, "--ways", "encoder")
    found = call(*run)
    (last,) = (line for line in found.stdout.splitlines() if line.startswith("disk: "))
    assert last.startswith(f"disk: {size_text(bytes_on_disk(out))} in {out}; ") and "cells and runs" in last
    for name in ("cells", "runs"):
        shutil.rmtree(out / name)
    assert kept_model.answers(out / "kept", ["the wound is open again"]) and (out / "compare.html").is_file()
    assert [one["state"] for one in document(call(*run, "--json"))["ways"]] == ["done"]


def test_a_masked_way_says_that_texts_are_not_english(tmp_path: Path) -> None:
    masked = WAYS["masked"]
    assert isinstance(masked, DefenceWay)
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    for text, is_noticed in (("die Wunde ist wieder offen", True), ("the wound is open again", False)):
        data = written(tmp_path / "rows.jsonl", [{**row, "text": f"{text} {i}"} for i, row in enumerate(rows(0, 100))])
        own = ComparisonRows.read(DataFile(data), None, 3)
        settings = ComparisonSettings("bert", base, "digest", own, Hyperparameters(), 0, tmp_path, 1, print)
        assert any("English" in note for note in masked._language_notes(settings)) is is_noticed


def test_a_budget_is_shared_by_ways_that_are_trained(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    own = ComparisonRows.read(DataFile(written(tmp_path / "rows.jsonl", rows(0, 100))), None, 3)
    settings = ComparisonSettings("bert", base, "digest", own, Hyperparameters(), 0, tmp_path, 1, print)
    run = _Run(settings, tmp_path, TimeLimits(100.0), [], print)
    trained = [WAYS["masked"], WAYS["obfuslm"], WAYS["plain"], WAYS["confidential"]]
    assert run._training_cost(WAYS["masked"]) == 0 and math.isnan(run.seconds_left(trained))
    run._training_seconds.append(20.0)
    assert run._training_cost(WAYS["masked"]) == 20 and run._training_cost(WAYS["linear"]) == 0
    assert run._attack_time(trained) == pytest.approx((100 - 40) / 3, abs=1), "two trainings, and attacks on three"
    assert run._attack_time([]) == pytest.approx(100, abs=1)
    run.stopwatch = replace(run.stopwatch, clock=run.stopwatch.clock - 90)
    assert run._attack_time(trained) == MAX_SHARE_OVER * 100
    assert TimeLimits(1e4).at_most(MIN_ATTACK_SECONDS) == MIN_ATTACK_SECONDS
    begun_earlier = _Run(settings, tmp_path, TimeLimits(100.0, stopwatch=Stopwatch(time.monotonic() - 99)), [], print)
    assert begun_earlier.elapsed_seconds() == pytest.approx(99, abs=1), "reading the rows counts"
    assert run.seconds_left(trained) == pytest.approx(10, abs=1), "never more than the budget leaves"


def test_an_encoder_of_berts_size_is_taken_if_it_is_here_and_costs_what_its_layers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    own = ComparisonRows.read(DataFile(written(tmp_path / "rows.jsonl", rows(0, 100))), None, 3)
    settings = ComparisonSettings("bert", base, "digest", own, Hyperparameters(), 0, tmp_path, 1, print)
    large, small = WAYS["large-encoder"], WAYS["encoder"]
    assert isinstance(large, EncoderWay) and small.relative_training_cost(settings) == 1
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    reason = large.refusal(settings)
    assert reason is not None and "milkglass models demo:mpnet" in reason
    assert large.relative_training_cost(settings) == 0 and not (tmp_path / "cache").exists(), (
        "an estimate fetches no model"
    )
    assert replace(large, model="demo:minilm").relative_training_cost(settings) > 100, (
        "a tiny model has thousands of weights"
    )
    own_size = replace(large, size=range(1, 10**6))
    assert own_size.refusal(settings) is None and own_size.chosen_model(settings) is base
    decoder = replace(settings, base=Checkpoint.open(tiny.save("gpt2", tmp_path / "gpt2")))
    assert own_size.refusal(decoder) == reason, "a decoder of that size is no encoder"
    assert (
        WAYS["alone"].refusal(decoder) is None
        and WAYS["alone"].relative_training_cost(decoder) == 1
        and WAYS["untuned"].relative_training_cost(decoder) == 0
    )


@pytest.mark.slow
def test_attacks_that_the_clock_cut_run_again_with_more_time(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 200))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "rnm", "--json")
    document(call(*run))
    (kept,) = (tmp_path / "out" / "runs").glob("*/ways/rnm.json")
    held = json.loads(kept.read_text("utf-8"))
    assert held["about"]["attack_clock"] is None, "no budget was given"
    held["result"]["reading"]["cut"], held["about"]["attack_clock"] = True, 20.0
    kept.write_text(json.dumps(held))
    assert "content words" not in _attack_lines(call(*run, "--budget", "21s").stderr), "the time is not much longer"
    less_work = ("--attacks", "1s", "--budget", "100s")
    assert "content words" not in _attack_lines(call(*run, *less_work).stderr), "of the other limit there is less"
    held["about"]["attack_clock"], held["about"]["attacks"] = 60.0, 1.0
    kept.write_text(json.dumps(held))
    assert "content words" not in _attack_lines(call(*run, "--budget", "21s").stderr), "less time, though more work"
    held["about"]["attack_clock"] = 20.0
    kept.write_text(json.dumps(held))
    assert "content words" in _attack_lines(call(*run, "--budget", "100s").stderr)


@pytest.mark.slow
def test_what_was_read_once_is_not_taken_back(tmp_path: Path) -> None:
    """Attacks that run again and read less, or a way that does not end again, leave the earlier figures."""
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 200))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "linear,rnm", "--json")
    first = document(call(*run))
    (kept,) = (tmp_path / "out" / "runs").glob("*/ways/rnm.json")
    held = json.loads(kept.read_text("utf-8"))
    held["result"]["reading"]["cut"], held["about"]["attacks"] = True, 1.0
    held["result"]["reading"]["content"]["value"] = 0.99
    kept.write_text(json.dumps(held))
    again = document(call(*run))["ways"][1]["reading"]
    assert first["ways"][1]["reading"]["content"]["value"] < again["content"]["value"] == 0.99
    held["about"]["attack_clock"] = 1e-9
    kept.write_text(json.dumps(held))
    stopped = document(call(*run, "--budget", "1s"))["ways"][1]
    assert stopped["state"] == "done" and stopped["reading"]["content"]["value"] == 0.99
    assert json.loads(kept.read_text("utf-8"))["result"]["reading"]["content"]["value"] == 0.99


def _attack_lines(stderr: str) -> str:
    return "\n".join(line for line in stderr.splitlines() if line.startswith("  rnm: "))


def test_a_budget_that_ends_too_early_leaves_ways_out_and_says_how_to_go_on(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 200))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "linear", "--json")
    (linear,) = document(call(*run, "--budget", "0.01s"))["ways"]
    assert linear["state"] == "not run" and "--budget" in linear["reason"]
    assert document(call(*run))["ways"][0]["state"] == "done"


@pytest.mark.parametrize("ways", ["linear", "plain,encoder"])
def test_the_best_model_with_nothing_sent_is_kept_and_answers(
    ways: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 200))
    kept = tmp_path / "kept"
    result = call("compare", model, data, "--out", tmp_path / "out", "--keep", kept, *SMALL, "--ways", ways, "--json")
    assert document(result)["kept"] == str(kept), result.stderr
    texts = [one["text"] for one in rows(0, 20)]
    answers = kept_model.answers(kept, texts)
    assert {one.label for one in answers} <= {"billing-desk", "clinic-desk"}
    (tmp_path / "ask.txt").write_text("\n".join(texts) + "\n", "utf-8")
    shown = document(call("classify", "--local", kept, "--in", tmp_path / "ask.txt", "--json"))["results"]
    assert [one["label"] for one in shown] == [one.label for one in answers]
    if ways != "linear":
        from transformers import pipeline

        piped = pipeline("text-classification", str(kept))(texts, truncation=True)
        assert [one["label"] for one in piped] == [one.label for one in answers]
        cut = call("classify", "--local", kept, texts[0], "the nurse called again " * 200).stderr
        assert "cut to " in cut and "as in training: text 2" in cut and "text 1" not in cut
        best = [max(one.probabilities.values()) for one in answers]
        assert [one["score"] for one in piped] == pytest.approx(best, abs=1e-5)
    refused(call("classify", "--local", tmp_path, "x"), 3, tmp_path.name)
    refused(call("classify", "x"), 2, "--local")
    for option, value in (
        ("--server", "http://127.0.0.1:9"),
        ("--token-file", tmp_path),
        ("--passphrase-file", tmp_path),
    ):
        refused(call("classify", "--local", kept, "x", option, value), 2, f"{option} is not used with --local")
    monkeypatch.setenv("MILKGLASS_SERVER", "http://127.0.0.1:9")  # as the main job's page exports it
    assert call("classify", "--local", kept, texts[0]).exit_code == 0
    with pytest.raises(ModelNotFound, match="no model that `compare` kept"):
        kept_model.answers(tmp_path, ["x"])
    with pytest.raises(ModelNotFound, match="there is no folder"):
        kept_model.answers(tmp_path / "nowhere", ["x"])


def test_scores_are_compared_by_their_correlation(tmp_path: Path) -> None:
    data = tmp_path / "scores.csv"
    with data.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for place, one in enumerate(rows(0, 200)):
            writer.writerow([one["text"], 1.5 + (one["label"] == "clinic-desk") + place % 7 / 100])
    found = document(call(
        "compare", tiny.save("bert", tmp_path / "m"), data, "--out", tmp_path / "o", *SMALL, "--ways",
        "commonest,linear,cape,plain", "--task", "regression", "--json",
    ))  # fmt: skip
    assert found["measure"] == "pearson" and found["task"] == "regression"
    assert found["ways"][1]["quality"]["value"] > 0.5 and found["ways"][3]["state"] == "done"
    assert found["ways"][2]["name"] == "cape" and found["ways"][2]["state"] == "done"
    assert "--task regression" in found["ways"][2]["command"], found["ways"][2]["command"]
    gap = found["ways"][3]["quality"]["value"] - found["ways"][1]["quality"]["value"]
    assert found["ways"][3]["above"]["value"] == pytest.approx(gap), "the same answer to all has no correlation"
    assert "nan" not in found["verdict"][0] and found["kept_way"] == "linear"


def test_a_kept_model_says_how_good_it_was(tmp_path: Path) -> None:
    mark = {"task": "classification", "max_length": 64, "scale": None, "pairs": False}
    quality = {"value": 0.6, "low": 0.44, "high": 0.74, "rows": 40, "same_answer": 0.45}
    for held_out, note in (
        (None, ""),
        (
            quality,
            "this model had 60 % right (44 to 74) of the 40 rows that it was chosen by; naming the commonest class had "
            "45 %: it is not shown",
        ),
        (
            {**quality, "low": 0.5},
            "60 % right (50 to 74) of the 40 rows that it was chosen by; naming the commonest class had 45 %; the "
            "number",
        ),
        ({**quality, "learnt": False, "low": 0.5}, "had 45 %: it is not shown to have learnt anything; the number"),
        (
            {**quality, "learnt": True},
            "naming the commonest class had 45 %; the number beside an answer is the model's",
        ),
    ):
        learnt = None if held_out is None else held_out.get("learnt")
        shown = None if held_out is None else {name: held_out[name] for name in quality}
        (tmp_path / kept_model.MARK).write_text(json.dumps({**mark, "held_out": shown, "learnt": learnt}), "utf-8")
        written = kept_model.quality_note(tmp_path)
        assert note in written and ("not shown" in written) == ("not shown" in note)
    (tmp_path / kept_model.MARK).write_text(json.dumps({**mark, "task": "regression", "held_out": quality}), "utf-8")
    assert "a correlation of 0.60 (0.44 to 0.74) of the 40 rows that it was chosen by" in kept_model.quality_note(
        tmp_path
    )
    assert "confidence" not in kept_model.quality_note(tmp_path), "a score has none"
    (tmp_path / kept_model.MARK).write_text(json.dumps({**mark, "held_out": quality, "learnt": "no"}), "utf-8")
    with pytest.raises(CorruptCheckpoint, match="learnt"):
        kept_model.quality_note(tmp_path)
    for wrong in ([], {"value": 1}, {**quality, "low": "0.4"}, {**quality, "more": 1}):
        (tmp_path / kept_model.MARK).write_text(json.dumps({**mark, "held_out": wrong}), "utf-8")
        with pytest.raises(CorruptCheckpoint, match="held_out"):
            kept_model.quality_note(tmp_path)


def test_a_kept_model_of_scores_gives_them_in_any_library_in_the_users_unit(tmp_path: Path) -> None:
    from transformers import pipeline

    scores = [{"text": one["text"], "label": 101.5 + place % 7} for place, one in enumerate(rows(0, 100))]
    model, data = tiny.save("bert", tmp_path / "m"), written(tmp_path / "scores.jsonl", scores)
    run = ("compare", model, data, "--out", tmp_path / "o", *SMALL, "--ways", "encoder", "--task", "regression")
    found = document(call(*run, "--json"))
    assert found["kept_way"] == "encoder"
    texts = [one["text"] for one in scores[:5]]
    expected = [one.score for one in kept_model.answers(Path(found["kept"]), texts)]
    quality = found["ways"][0]["quality"]["value"]
    assert f"a correlation of {quality:.2f} (" in call("classify", "--local", found["kept"], *texts).stderr
    piped = pipeline("text-classification", found["kept"], function_to_apply="none")(texts, truncation=True)
    assert [one["score"] for one in piped] == pytest.approx(expected, abs=1e-3)
    assert all(101 < score < 109 for score in expected if score is not None)


RNM = {"sanitizer": "rnm", "epsilon": 3.0}


def read_by(attack: Any, folder: Path, entry: Mapping[str, Any] = RNM, **options: Any) -> Reading:
    """Returns what this attack reads, of replaced words if no other defence is given, after one that undoes nothing."""
    base = Checkpoint.open(tiny.save("bert", folder / "bert"))
    own = ComparisonRows.read(DataFile(written(folder / "rows.jsonl", rows(0, 100))), None, 0)
    settings = ComparisonSettings("m", base, base.digest(), own, Hyperparameters(), 0, folder / "cells", 1, print)
    client, server = defence_of(entry).split(base, own.train, bytes(32), folder / "server")
    cell: Any = SimpleNamespace(name="x", client=client, server=server)
    attacks = {name: ATTACKS[name] for name in ("cluster-solve", "as-it-is")} | {attack.name: attack}
    return readings.attack_halves(settings, cell, [], Budget.of_work(60), folder / "work", attacks=attacks, **options)


def test_an_attack_that_failed_is_named_and_its_way_is_read_at_least_so_far(tmp_path: Path) -> None:
    class Failing(type(ATTACKS["channel"])):  # type: ignore[misc]
        def __call__(self, *arguments: object) -> None:
            raise MemoryError("no room")

    found = read_by(Failing(), tmp_path)
    assert found.cut and any("failed, and may read more" in one for one in found.more)


def test_an_attack_that_lacks_its_model_is_named_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milkglass.attacks.token_ids.decipherment.reader.is_available_offline", lambda name: False)
    found = read_by(ATTACKS["language-model"], tmp_path, {"scheme": "obfuslm", "k": 4, "beta": 0.9})
    assert found.cut and any("milkglass models demo:smollm2" in one for one in found.more)
    (tmp_path / "words").mkdir()
    of_words = read_by(ATTACKS["mask-filling"], tmp_path / "words")
    assert not any("demo:smollm2" in one for one in of_words.more), "there is no mask to be filled"


def test_an_attack_that_never_asks_its_budget_is_ended_by_the_clock(tmp_path: Path) -> None:
    class Endless(type(ATTACKS["channel"])):  # type: ignore[misc]
        def __call__(self, *arguments: object) -> None:
            while True:
                time.sleep(0.01)

    finished = list[Any]()  # the first attack has a minute, however busy the machine is, and the endless one a second
    deadline = Budget(60.0, clock=lambda: 59.0 if finished else 0.0)
    found = read_by(Endless(), tmp_path, clock_seconds=60.0, deadline=deadline, progress=finished.append)
    assert found.cut and found.tokens is not None and found.tokens.value > 0, "what was read before stays"
    assert any("not begun or cut short" in one and ATTACKS["channel"].title in one for one in found.more)


def test_a_way_that_cannot_be_run_here_is_a_row_and_the_others_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'presidio_analyzer'", name="presidio_analyzer")

    monkeypatch.setattr("milkglass.defences.masked_text.analyzer", missing)
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 100))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--json")
    linear, masked, plain = document(call(*run, "--ways", "linear,masked,plain"))["ways"]
    assert masked["state"] == "failed" and "pip install 'milkglass[masking]'" in masked["reason"]
    assert linear["state"] == plain["state"] == "done" and (tmp_path / "out" / "compare.html").is_file()


def test_a_budget_ends_halves_that_are_trained_when_they_are_split_and_a_wait_for_another_run(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 100))
    run = ("compare", model, data, "--out", tmp_path / "out", "--max-length", 64, "--attacks", "2s", "--json")
    begun = time.monotonic()
    (cape,) = document(call(*run, "--epochs", 1000, "--ways", "cape", "--budget", "3s"))["ways"]
    assert cape["state"] == "not run" and "--budget" in cape["reason"] and time.monotonic() - begun < 120
    cells = tmp_path / "cells"
    with pytest.raises(JobFailed, match="time is over"), cell_folder(cells, {}):
        stack = (deadline.until(time.monotonic() + 0.1), cell_folder(cells, {}))
        with stack[0], stack[1]:
            pytest.fail("two runs have one cell")


def test_rows_are_cut_to_what_the_model_reads_however_much_is_asked(tmp_path: Path) -> None:
    from transformers import pipeline

    long_rows = [{**one, "text": one["text"] + " the nurse called again" * 60} for one in rows(0, 100)]
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", long_rows)
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL[:-2], "--ways", "encoder", "--json")
    found = document(call(*run, "--max-length", 1024))
    assert found["settings"]["max_length"] < 1024 and any("all that this model reads" in one for one in found["notes"])
    assert pipeline("text-classification", found["kept"])([long_rows[0]["text"]], truncation=True)


def test_a_file_beside_a_kept_model_is_not_removed(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 100))
    run = ("compare", model, data, "--out", tmp_path / "out", "--ways", "linear")
    kept = Path(document(call(*run, "--json"))["kept"])
    (kept / "notes.txt").write_text("mine")
    refused(call(*run, "--seed", 3), 2, "notes.txt")
    (kept / "notes.txt").unlink()
    assert document(call(*run, "--seed", 3, "--json"))["kept"] == str(kept)
    refused(call(*run, "--keep", data / "kept"), 2, "cannot be made")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_sent_whatever_the_other_trainings_compute_in(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milkglass.compare.prepare.training_dtype", lambda: dtype)
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 120))
    found = document(call("compare", model, data, "--out", tmp_path / "o", *SMALL, "--ways", "cape", "--json"))
    assert found["settings"]["dtype"] == dtype
    assert [(way["name"], way["state"], way["reason"]) for way in found["ways"]] == [("cape", "done", "")]


def test_a_budget_ends_a_comparison_before_a_way_that_would_not_end_in_it(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 200))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "commonest,rnm", "--json")
    found = document(call(*run, "--budget", "0.05s"))
    assert [one["state"] for one in found["ways"]] == ["done", "not run"]
    assert "give a longer --budget" in found["ways"][1]["reason"]


def test_what_cannot_be_compared_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    model = tiny.save("bert", tmp_path / "model")
    few = written(tmp_path / "few.jsonl", rows(0, 40))
    refused(call("compare", model, few), 5, "40 rows, 80")
    refused(call("compare", model, tmp_path / "none.jsonl"), 2, "none.jsonl")
    data = written(tmp_path / "rows.jsonl", rows(0, 100))
    refused(call("compare", model, data, "--ways", "xyz"), 2, "xyz")
    refused(call("compare", model, data, "--budget", "soon"), 2, "soon")
    refused(call("compare", model, data, "--learning-rate", "-1"), 2, "--learning-rate is -1")
    refused(call("compare", model, few, "--epochs", "0"), 2, "--epochs is 0")
    refused(call("compare", model, data, "--keep", tmp_path / "o", "--out", tmp_path / "o"), 2, "--keep")
    other = written(tmp_path / "other.jsonl", [{"text": "a", "label": "new"}, {"text": "b", "label": "newer"}])
    refused(
        call("compare", model, data, "--validation", other),
        5,
        "line 1 of other.jsonl has a label that rows.jsonl lacks, and so have 1 more",
    )
    few_asked = written(tmp_path / "asked.jsonl", rows(1000, 30))
    refused(call("compare", model, data, "--validation", few_asked), 5, "30 rows, 40 are needed")
    assert not list(tmp_path.glob("milkglass-compare"))


def test_a_disk_that_may_be_too_small_is_named_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only models that are still to be trained count."""
    model, out = tiny.save("bert", tmp_path / "model"), tmp_path / "out"
    data = written(tmp_path / "rows.jsonl", rows(0, 100))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=300_000))
    run = ("compare", model, data, "--out", out, *SMALL, "--ways", "commonest,linear")
    assert "warning" not in call(*run).stderr
    told = call(*run[:-1], "linear,coarse-16").stderr
    warning = "warning: the models that are trained may take up to"
    assert re.search(f"{warning} [0-9.]+ MB in {out / 'cells'}, and its disk has 0.3 MB free", told)
    assert told.index(warning) < told.index("16 symbols in place of words: its answers are measured")
    assert "warning" not in call(*run[:-1], "linear,coarse-16").stderr, "both ways are finished"


@pytest.mark.slow
def test_a_finished_comparison_needs_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kept model, too: it is made again only for another folder, and a linear one is made in a moment."""
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 300))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "commonest,linear", "--json")
    before = document(call(*run))
    made = (tmp_path / "out" / "kept" / "linear.json").stat().st_mtime_ns
    after = document(call(*run, "--budget", "0.001s"))
    assert [one["quality"] for one in after["ways"]] == [one["quality"] for one in before["ways"]]
    assert after["kept"] == before["kept"] and after["verdict"] == before["verdict"]
    assert (tmp_path / "out" / "kept" / "linear.json").stat().st_mtime_ns == made
    elsewhere = document(call(*run, "--budget", "0.001s", "--keep", tmp_path / "elsewhere"))
    assert elsewhere["kept"] == str(tmp_path / "elsewhere") and (tmp_path / "elsewhere" / "linear.json").is_file()
    monkeypatch.setattr(run_module, "KEEP_SECONDS", 0.0)
    nowhere = call(*run, "--budget", "0.001s", "--keep", tmp_path / "other")
    assert document(nowhere)["kept"] == "" and not (tmp_path / "other").exists()
    assert any("No model is kept in" in note for note in document(nowhere)["notes"])
    assert "No model is kept in" in nowhere.stderr


@pytest.mark.slow
def test_other_columns_of_a_file_are_other_rows(tmp_path: Path) -> None:
    """Both labels are learnt, and neither has the answers or the kept model of the other."""
    model, path = tiny.save("bert", tmp_path / "model"), tmp_path / "rows.csv"
    made = rows(0, 300)
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Title", "Body", "Topic", "Tone"])
        for number, one in enumerate(made):
            writer.writerow([one["text"], f"much the same, {number}", one["label"], str(rng.integers(2))])
    run = ("compare", model, path, "--out", tmp_path / "out", *SMALL, "--ways", "commonest,linear", "--json")
    first = document(call(*run, "--text-column", "Title", "--label-column", "Topic"))
    for text, label in (("Title", "Tone"), ("Body", "Topic")):
        other = document(call(*run, "--text-column", text, "--label-column", label))
        assert other["origin"]["run"] != first["origin"]["run"]
        assert other["ways"][1]["quality"]["value"] < first["ways"][1]["quality"]["value"] - 0.1
    (clean,) = [note for note in first["notes"] if "rows.jsonl" in note]
    command = f"milkglass data {path} --text-column Title --label-column Topic --out rows.jsonl"
    assert f"`{command}`" in clean and "milkglass data" not in "".join(one["command"] for one in first["ways"])
    assert call(*command.split()[1:-1], tmp_path / "rows.jsonl").exit_code == 0
    again = call(*run, "--text-column", "Title", "--label-column", "Topic")
    assert document(again)["ways"][1]["quality"] == first["ways"][1]["quality"]
    assert "are measured" not in again.stderr.partition("kept")[0]


def test_fewer_ways_in_a_second_run_say_and_keep_what_all_of_them_do(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 300))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--json", "--ways")
    both = document(call(*run, "commonest,linear"))
    made = (tmp_path / "out" / "kept" / "linear.json").stat().st_mtime_ns
    fewer = document(call(*run, "commonest"))
    for name in ("kept", "kept_way", "verdict", "over_commonest"):
        assert fewer[name] == both[name], name
    assert (tmp_path / "out" / "kept" / "linear.json").stat().st_mtime_ns == made
    none = document(call("compare", model, data, "--out", tmp_path / "new", *SMALL, "--json", "--ways", "commonest"))
    assert none["kept"] == "" and none["kept_way"] == "" and not (tmp_path / "new" / "kept").exists()


@pytest.mark.slow
def test_another_public_text_is_another_run(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 300))
    public = [written(tmp_path / f"public{seed}.jsonl", rows(seed, 40)) for seed in (5, 6)]
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "commonest,rnm", "--json", "--public")
    found = [document(call(*run, path)) for path in public]
    assert found[0]["origin"]["run"] != found[1]["origin"]["run"]
    assert [one["name"] for one in found[1]["ways"]] == ["commonest", "rnm"]


def test_texts_without_content_words_are_read_by_their_tokens(tmp_path: Path) -> None:
    """Such as readings of an instrument."""
    model = tiny.save("bert", tmp_path / "model")
    readings = [{"text": f"7 {i % 2} 80 {i * 37 % 200}", "label": str(i % 2)} for i in range(200)]
    data = written(tmp_path / "rows.jsonl", readings)
    found = call("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "commonest,rnm", "--json")
    rnm = document(found)["ways"][1]
    assert rnm["reading"]["tokens"]["value"] > 0 and rnm["reading"]["content"] is None
    assert "of all tokens" in rnm["reading"]["summary"] and "of all tokens" in found.stderr
    hardware = call("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "confidential")
    (row,) = (line for line in hardware.stdout.splitlines() if line.startswith(WAYS["confidential"].title))
    assert "0 % while the hardware holds" in row


@pytest.mark.slow
def test_names_that_cannot_be_recognised_are_said_to_be_unmeasured(tmp_path: Path) -> None:
    model = tiny.save("bert", tmp_path / "model")
    for change in (str, str.lower):
        own = [{**row, "text": change(f"I met Doctor Ruiz and {row['text']}")} for row in rows(0, 200)]
        data = written(tmp_path / f"{change.__name__}.jsonl", own)
        out = tmp_path / f"out-{change.__name__}"
        found = document(call("compare", model, data, "--out", out, *SMALL, "--ways", "linear,rnm,plain", "--json"))
        names = [one["reading"]["names"] for one in found["ways"][1:]]
        has_note = any(sentence.startswith("No name was recognised") for sentence in found["verdict"])
        assert has_note or any("Names were recognised in 80 of 80 texts" in note for note in found["notes"])
        assert [share is None for share in names] == [change is str.lower] * 2 and has_note == (change is str.lower)
        rnm, plain = found["ways"][1:]
        assert 0 < rnm["reading"]["guess"] < 0.5 and plain["reading"]["guess"] is None, "of content words"
        assert (plain["reading"]["content"]["low"], plain["reading"]["content"]["high"]) == (1, 1), "that is no sample"


def test_a_text_in_place_of_the_kept_folder_is_refused_before_stdin_is_read(tmp_path: Path) -> None:
    refused(call("classify", "--local", "a text of mine"), 3, "there is no folder a text of mine")
    refused(call("classify", "--local", tmp_path), 3, "holds no model that `compare` kept")


def test_what_would_be_replaced_is_refused_at_once(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 300))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    for option, path in (("--keep", data), ("--keep", tmp_path / "full"), ("--out", data)):
        found = call("compare", model, data, "--ways", "linear", *SMALL, option, path)
        refused(found, 2, path.name)
        assert "[1 of 1]" not in found.stderr
    refused(call("compare", model, data, "--seed", -1), 2, "--seed")
    assert (tmp_path / "full" / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize("ways", ["commonest,linear", pytest.param("encoder", marks=pytest.mark.slow)])
def test_a_model_of_pairs_is_asked_about_pairs(ways: str, tmp_path: Path) -> None:
    model, kept = tiny.save("bert", tmp_path / "model"), tmp_path / "kept"
    pairs = [{**one, "text_pair": f"{one['text']} again"} for one in rows(0, 200)]
    run = ("--ways", ways, *SMALL, "--json", "--out")
    found = document(
        call("compare", model, written(tmp_path / "pairs.jsonl", pairs), *run, tmp_path / "o", "--keep", kept)
    )
    assert found["kept_way"] == ways.split(",")[-1] and (found["over_commonest"] is not None) == (ways != "commonest")
    assert found["attacked"] == found["rows"], "of half of the rows, both texts"
    refused(call("classify", "--local", kept, "the nurse called"), 2, "was trained on pairs of texts")
    assert call("classify", "--local", kept, "the nurse called", "--pair", "she called again").exit_code == 0
    single = written(tmp_path / "single.jsonl", rows(0, 200))
    document(call("compare", model, single, *run, tmp_path / "p", "--keep", tmp_path / "single"))
    refused(call("classify", "--local", tmp_path / "single", "a", "--pair", "b"), 2, "was trained on single texts")


def test_a_folder_of_another_version_is_not_taken_over(tmp_path: Path) -> None:
    data, out = written(tmp_path / "rows.jsonl", rows(0, 300)), tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text('{"compare": 1}', "utf-8")
    refused(
        call("compare", tiny.save("bert", tmp_path / "bert"), data, "--out", out, *SMALL, "--ways", "linear"), 2,
        "out holds the files of another version",
    )  # fmt: skip
    assert [one.name for one in out.iterdir()] == ["run.json"]


def test_the_options_of_two_halves_are_those_of_the_comparison() -> None:
    """The page's command trains two halves as they were trained here."""
    training = Hyperparameters(learning_rate=1 / 3e4, batch_size=7, n_epochs=4, max_length=99, num_labels=3)
    words = shlex.split(WAYS["cape"].command.format(model="m", rows="r", halves=halves_options(training)))
    command: Any = get_command(app)
    for word in words[1:3]:
        command = command.commands[word]
    options = command.make_context("train", words[3:]).params
    halves = halves_training(training)
    names = ("learning_rate", "batch_size", "epochs", "max_steps", "max_length")
    assert {name: options[name] for name in names} == {name: getattr(halves, name) for name in names}


@pytest.mark.slow
def test_text_that_is_sent_is_counted_in_its_own_bytes(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "bert"), written(tmp_path / "rows.jsonl", rows(0, 300))
    found = document(call("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "plain,rnm", "--json"))
    mean = np.mean([len(row["text"].encode()) for row in rows(0, 300)])
    for way_found in found["ways"]:
        assert way_found["bytes"] == pytest.approx(mean, rel=0.4), way_found["name"]


@pytest.mark.slow
def test_a_comparison_loads_no_code_that_its_digest_leaves_out() -> None:
    """But for the pages, what is left out decides no figure if nothing of it is loaded."""
    loaded = "import milkglass.compare.run, milkglass.compare.prepare, sys; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    folders = [one.replace("/", ".") for one in readings.FOLDERS_WITHOUT_FIGURES if not one.endswith("report")]
    prefixes = tuple(f"milkglass.{folder}." for folder in folders)
    assert [name for name in process.stdout.split() if f"{name}.".startswith(prefixes)] == []


@pytest.mark.slow
def test_results_of_other_code_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade may mend a way or an attack: its page must not show what earlier attacks read."""
    package = Path(readings.__file__).parents[1]
    assert all((package / folder).is_dir() for folder in readings.FOLDERS_WITHOUT_FIGURES)
    model, data = tiny.save("bert", tmp_path / "bert"), written(tmp_path / "rows.jsonl", rows(0, 300))
    run = ("compare", model, data, "--out", tmp_path / "out", *SMALL, "--ways", "commonest,linear", "--json")
    assert "Taken over" not in str(document(call(*run))["notes"])
    assert "Taken over" in str(document(call(*run))["notes"])
    with monkeypatch.context() as patched:
        patched.setattr(readings, "_package_versions", lambda: b"an upgraded library")
        assert "Taken over" not in str(document(call(*run))["notes"])
    monkeypatch.setattr(readings, "source_digest", lambda label, excluded: "of other code")
    assert "Taken over" not in str(document(call(*run))["notes"])


def test_rows_of_one_class_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """What a refused run left would keep the next one from its folder."""
    rows, out = tmp_path / "rows.csv", tmp_path / "kept"
    rows.write_text("text,label\n" + "the nurse called,a\n" * 120, "utf-8")
    refused(call("compare", tiny.save("bert", tmp_path / "bert"), rows, "--out", out), 5, "has 1 label only")
    assert not out.exists()


def test_a_training_that_does_not_fit_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 100))
    monkeypatch.setattr("milkglass.compare.run.memory_bytes", lambda only_available: 1000)
    out = tmp_path / "out"
    result = call("compare", model, data, "--out", out, *SMALL, "--ways", "commonest,linear,rnm,obfuslm")
    assert result.exit_code != 0 and "of memory at least to train (2 ways take more than there is)" in result.stderr
    assert "--ways commonest,linear" in result.stderr
    assert not (out / "runs").exists(), "nothing was begun"
    done = call("compare", model, data, "--out", out, *SMALL, "--ways", "commonest,linear")
    assert done.exit_code == 0, "what is not trained needs no such room"


def test_a_long_cell_breaks_between_its_words_and_not_in_a_figure() -> None:
    assert page._breakable_parts("0 % while the hardware holds") == (
        "<div><span>0 %</span> while the hardware holds</div>"
    )
    assert page._breakable_parts("at least 7 %") == "<div>at least <span>7 %</span></div>"

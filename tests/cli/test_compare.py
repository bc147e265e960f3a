"""`milkglass compare`: both models are trained here, rows are held out from both, and the words follow the figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from milkglass.cli.compare import _document, _words
from milkglass.experiments.procedures.own_rows import (
    COMMONEST,
    PLAIN,
    Compared,
    OwnRows,
    cut_words,
    fall,
    own_answers,
    reported,
)
from milkglass.models.checkpoint import Checkpoint
from milkglass.rows.data_file import DataFile
from milkglass.server.spec import Event
from milkglass.threat.defence import LabelledTexts
from tests import tiny
from tests.cli.kit import call, document, refused
from tests.cli.test_coarse import rows, written
from tests.warm import warm_workers

__all__ = ["warm_workers"]


def test_rows_are_held_out_once(tmp_path: Path) -> None:
    data = written(tmp_path / "rows.jsonl", rows(0, 400))
    found = OwnRows.read(DataFile(data), None, 3)
    assert (len(found.train.texts), len(found.held_out.texts)) == (320, 80)
    assert sorted([*found.train.texts, *found.held_out.texts]) == sorted(one["text"] for one in rows(0, 400))
    assert OwnRows.read(DataFile(data), None, 3).held_out.texts == found.held_out.texts
    given = OwnRows.read(DataFile(data), DataFile(written(tmp_path / "more.jsonl", rows(1, 50))), 3)
    assert (len(given.train.texts), len(given.held_out.texts)) == (400, 50)
    assert given.names == ("billing-desk", "clinic-desk")


def test_rows_that_are_cut_are_reported_with_what_they_cost(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    texts = [*["the wound is open again"] * 5, "the wound is open again " * 40]
    said = cut_words(base, LabelledTexts(texts, [0] * 6), 30)
    assert said.startswith("1 of 6 rows are cut to 30 tokens") and "--max-length" in said
    assert cut_words(base, LabelledTexts(texts[:5], [0] * 5), 30) == ""


def test_the_client_alone_learns_what_words_say(tmp_path: Path) -> None:
    found = OwnRows.read(DataFile(written(tmp_path / "rows.jsonl", rows(0, 400))), None, 0)
    answers, alone = own_answers(found)
    truth = np.asarray(found.held_out.labels)
    assert (answers[alone] == truth).mean() > 0.9 > (answers[COMMONEST] == truth).mean()


def compared(plain: float, scrambled: float, alone: float) -> Compared:
    """1,000 rows of two classes with these accuracies."""
    truth = np.arange(1000) % 2
    answers = {
        name: np.where(np.arange(1000) < 1000 * share, truth, 1 - truth)
        for name, share in ((COMMONEST, 0.5), ("client alone, words", alone), (PLAIN, plain), ("obfuslm", scrambled))
    }
    return Compared(("no", "yes"), truth, answers, "client alone, words")


def test_the_words_follow_the_figures() -> None:
    words = "\n".join(_words(compared(0.9, 0.8, 0.85), "obfuslm"))
    assert "obfuslm costs 10.0 points of accuracy" in words and "5.0 points below what you do alone" in words
    assert "don't send anything" in words
    words = "\n".join(_words(compared(0.9, 0.85, 0.85), "obfuslm"))
    assert "cannot be told apart with these 1,000 rows" in words and "don't send" not in words
    words = "\n".join(_words(compared(0.9, 0.9, 0.7), "obfuslm"))
    assert "cannot be told from chance with these 1,000 rows" in words
    assert "20.0 points above what you do alone" in words and "still falling" not in words
    words = "\n".join(_words(replace(compared(0.9, 0.8, 0.7), falling={PLAIN: (0.91, 0.82)}), "obfuslm"))
    assert "no defence: the loss was still falling when the training ended (0.910, then 0.820" in words
    words = "\n".join(_words(compared(0.8, 0.9, 0.7), "obfuslm"))
    assert "obfuslm is 10.0 points above the plain model" in words and "costs" not in words
    for untrained in (0.5, 0.3):
        words = "\n".join(_words(compared(untrained, 0.9, 0.7), "obfuslm"))
        assert f"not shown to be above naming the commonest class ({100 * untrained:.1f} % beside 50.0 %" in words
        assert "what obfuslm costs is not known" in words and "what you do alone" not in words
    assert [_document(compared(one, 0.9, 0.7), "obfuslm", {})["plain above commonest"] for one in (0.9, 0.5, 0.3)] == [
        True, False, False,
    ]  # fmt: skip
    words = "\n".join(_words(compared(0.5, 0.5, 0.7), "obfuslm"))
    assert "costs is not known" in words and "obfuslm is 20.0 points below what you do alone" in words


def test_a_loss_is_called_falling_only_where_the_noise_of_batches_does_not_explain_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, 40)
    assert fall((noise + 0.8).tolist()) is None
    found = fall((noise + np.linspace(2, 0.8, 40)).tolist())
    assert found is not None and found[0] > found[1]
    assert fall((noise + np.linspace(0.8, 2, 40)).tolist()) is None, "it rises"
    assert fall([3.0, 2.0, 1.0]) is None, "too few to say"
    events = tmp_path / "events.jsonl"
    data = [{"step": 2, "loss": 9.0}, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"eval_loss": 1.0}]
    lines = [Event(time=0.0, message="", data=one).model_dump_json() for one in data]
    events.write_text("\n".join(lines) + '\n{"time": 1, "mes')
    assert reported(tmp_path) == [3.0, 2.0]
    assert reported(tmp_path / "none") == []


def test_both_are_trained_here_and_a_second_run_takes_them(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 300))
    data.write_text(data.read_text("utf-8") + "\n", "utf-8")
    settings = ("--epochs", 2, "--learning-rate", "1e-3", "--scheme", "obfuslm")
    run = ("compare", model, data, "--out", tmp_path / "out", *settings, "--json")
    small = ("--set", "k=4", "--set", "beta=0.9")
    first = call(*run, *small)
    found = document(first)
    assert "no defence (1 of 2): step" in first.stderr and "obfuslm (2 of 2): step" in first.stderr
    assert "train 240 rows twice, in 16 steps (2 epochs) each time" in first.stderr
    assert "1 blank line of rows.jsonl skipped" in first.stderr
    assert re.search(r"out holds \d+ MB of trained models, for a second run: remove it", first.stderr)
    assert list(found["rows"]) == [COMMONEST, next(n for n in found["rows"] if "alone" in n), PLAIN, "obfuslm"]
    assert all(one["rows"] == 60 for one in found["rows"].values())
    assert found["training"] == {"learning_rate": 1e-3, "n_epochs": 2.0, "warmup_ratio": 0.06, "max_length": 512}
    again = call(*run, *small)
    assert document(again) == found and "(1 of 2): step" not in again.stderr
    other = call(*run[:-1], "--set", "k=3", "--set", "beta=0.9")
    assert other.exit_code == 2 and "holds a run of other settings" in other.stderr
    assert "give a new folder with --out" in other.stderr


def test_what_cannot_be_compared_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    model = tiny.save("bert", tmp_path / "model")
    few = written(tmp_path / "few.jsonl", rows(0, 40))
    refused(call("compare", model, few), 5, "few.jsonl has 40 rows, 80 are needed")
    refused(call("compare", model, tmp_path / "none.jsonl"), 2, "there is no file")
    data = written(tmp_path / "rows.jsonl", rows(0, 100))
    refused(call("compare", model, data, "--scheme", "xyz"), 2, "xyz")
    refused(call("compare", model, data, "--learning-rate", "-1"), 2, "--learning-rate is -1")
    refused(call("compare", model, tmp_path / "few.jsonl", "--epochs", "0"), 2, "--epochs is 0, more than 0 is needed")
    other = written(tmp_path / "other.jsonl", [{"text": "a", "label": "new"}, {"text": "b", "label": "newer"}])
    refused(call("compare", model, data, "--validation", other), 2, "not among the training rows'")
    assert not list(tmp_path.glob("milkglass-compare"))


def test_rows_of_one_class_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """What a refused run left would keep the next one from its folder."""
    rows, out = tmp_path / "rows.csv", tmp_path / "kept"
    rows.write_text("text,label\n" + "the nurse called,a\n" * 120, "utf-8")
    refused(call("compare", tiny.save("bert", tmp_path / "bert"), rows, "--out", out), 5, "has 1 label only")
    assert not out.exists()

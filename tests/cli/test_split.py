"""`milkglass split` as a person calls it, on a tiny model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from milkglass.audit.outcome import AttackResult
from milkglass.audit.report.verdict import verdict
from milkglass.metrics.interval import Interval
from tests import tiny
from tests.cli.kit import SECRET, call, document, refused

WORDS = f"the wound on my left arm is open since Monday and {SECRET} said 3 stitches may not be enough".split()
SHORT = ("--epochs", 1, "--batch-size", 8, "--learning-rate", 1e-3, "--max-length", 64)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    tiny.save("bert", folder / "model")
    tiny.save("gpt2", folder / "decoder")
    rng = np.random.default_rng(0)
    rows = [f"{' '.join(rng.choice(WORDS, 6))}\t{'urgent' if n % 2 else 'later'}" for n in range(60)]
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", "utf-8")
    return folder


def train(place: Path, name: str, method: str = "dp-forward", *more: object) -> tuple[object, ...]:
    folders = ("--client", place / f"{name}-c", "--server", place / f"{name}-s")
    return (
        "split",
        "train",
        place / "model",
        "--method",
        method,
        "--data",
        place / "train.tsv",
        *folders,
        *SHORT,
        *more,
    )


@pytest.fixture(scope="module")
def halves(place: Path) -> tuple[Path, Path]:
    method = ("--set", "layer=1", "--set", "epsilon=50")
    result = call(*train(place, "noisy", "dp-forward", *method, "--validation", place / "train.tsv"))
    assert result.exit_code == 0, result.stderr
    assert "guarantee: each text sent is (50, 1e-05)-DP" in result.stdout
    assert re.search(r"correct: \d+\.\d % of 60 texts, disturbed as they are sent\n", result.stdout)
    assert "split serve" in result.stdout and "split audit" in result.stdout
    assert "never give it to the server" in result.stderr
    assert "60 of 60 rows of train.tsv ask the same as rows that are trained with" in result.stderr
    return place / "noisy-c", place / "noisy-s"


def test_a_split_from_the_command_line(halves: tuple[Path, Path]) -> None:
    client, server = halves
    found = document(
        call("split", "classify", client, "--folder", server, "--text", "a wound", "--text", "3", "--json")
    )
    assert [set(one["probabilities"]) for one in found["results"]] == [{"urgent", "later"}] * 2
    lines = call("split", "classify", client, "--folder", server, "--text", "a wound").stdout.splitlines()
    label, share = lines[0].split("\t")
    assert label in ("urgent", "later") and 0.5 <= float(share) <= 1
    assert json.loads((client / "config.json").read_text("utf-8"))["sent"] == 3


def test_texts_from_a_file(halves: tuple[Path, Path], tmp_path: Path) -> None:
    run = ("split", "classify", halves[0], "--folder", halves[1], "--file", tmp_path / "texts")
    (tmp_path / "texts").write_text('an open wound\n{"text": "on Monday"}\n', "utf-8")
    assert len(call(*run).stdout.splitlines()) == 2
    (tmp_path / "texts").write_text("an open wound\n\nmore\n", "utf-8")
    refused(call(*run), 5, "line 2 of texts is blank")
    (tmp_path / "texts").write_text("", "utf-8")
    refused(call(*run), 5, "texts is empty")
    (tmp_path / "dev.tsv").write_text("text\tlabel\na wound\turgent\n", "utf-8")
    assert len(call(*run[:-1], tmp_path / "dev.tsv").stdout.splitlines()) == 1
    (tmp_path / "own.csv").write_text("body;mood\na wound;\n\non Monday;\n", "utf-8-sig")
    assert len(call(*run[:-1], tmp_path / "own.csv", "--text-column", "body").stdout.splitlines()) == 2
    refused(call(*run[:-1], tmp_path / "own.csv"), 5, "the header of own.csv names no column text or sentence")
    refused(call(*run, "--text-column", "body"), 2, "have no columns")
    (tmp_path / "texts").write_text('{"messages": [{"role": "user", "content": "x"}]}\n', "utf-8")
    refused(call(*run), 5, "holds messages")
    (tmp_path / "texts").write_text(f"{SECRET} " * 100 + "\n", "utf-8")
    result = call(*run)
    refused(result, 5, "at most 64 fit")
    assert SECRET not in result.stderr


@pytest.mark.parametrize(("method", "said"), [("cape", "guarantee: none"), ("textmixer", "guarantee: none")])
def test_no_guarantee_is_said_to_be_none(place: Path, method: str, said: str) -> None:
    result = call(*train(place, method, method))
    assert result.exit_code == 0, result.stderr
    assert said in result.stdout and "nothing is proved about what is sent" in result.stdout


def test_a_broken_method_is_warned_of(place: Path) -> None:
    result = call(*train(place, "broken", "textmixer", "--json"))
    assert result.exit_code == 0
    assert "warning: TextMixer's keys can be computed from what it sends" in result.stderr
    assert json.loads(result.stdout)["broken"] and json.loads(result.stdout)["guarantee"] is None


def test_scores_are_split_measured_and_given_in_their_own_unit(place: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [f"{' '.join(rng.choice(WORDS, 6))}\t{100.5 + n % 7}" for n in range(60)]
    data = tmp_path / "scores.tsv"
    data.write_text("\n".join(["sentence\tlabel", *rows]) + "\n", "utf-8")
    client, server = tmp_path / "c", tmp_path / "s"
    run = (
        "split",
        "train",
        place / "model",
        "--method",
        "cape",
        "--data",
        data,
        "--client",
        client,
        "--server",
        server,
    )
    refused(call(*run, *SHORT), 5, "holds numbers with a fraction")
    result = call(*run, *SHORT, "--task", "regression", "--validation", data)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"correlation with the right scores: -?\d\.\d{3} over 60 texts, disturbed", result.stdout)
    classify = ("split", "classify", client, "--folder", server, "--text", "the wound is open", "--text", "on Monday")
    assert all(95 < float(line) < 115 for line in call(*classify).stdout.splitlines())
    found = document(call(*classify, "--json"))
    assert [*found["results"][0]] == ["score"] and len(found["results"]) == 2
    held = b"".join(path.read_bytes() for path in server.iterdir())
    mean = json.loads((client / "config.json").read_text("utf-8"))["scale"][0]
    assert 100.5 < mean < 107.5 and str(mean).encode() not in held, "the unit of the scores stays with the client"
    named = tmp_path / "names.tsv"
    named.write_text("sentence\tlabel\nthe wound\turgent\n", "utf-8")
    again = ("--client", tmp_path / "c2", "--server", tmp_path / "s2", "--task", "regression", "--validation", named)
    refused(call(*run[:7], *again, *SHORT), 5, "not a number")
    assert not (tmp_path / "c2").exists()


def test_train_refuses(place: Path, tmp_path: Path) -> None:
    refused(call(*train(place, "x", "dp-forward", "--set", "epsilonn=8")), 2, "no parameter 'epsilonn'")
    refused(call(*train(place, "x", "dp-forward", "--set", "layer=3")), 3, "the cut comes after layer 3")
    refused(call(*train(place, "x", "dp-forward", "--set", "epsilon=nan")), 2, "epsilon=nan: a finite number above")
    refused(call(*train(place, "x", "dp-forward", "--learning-rate", 0)), 2, "learning_rate is 0.0")
    refused(call(*train(place, "x", "dp-forward", "--learning-rate", "inf")), 2, "learning_rate is inf")
    refused(call(*train(place, "x", "dp-forward", "--max-length", 131)), 2, "this model reads 1 to 130 tokens")
    refused(call(*train(place, "x", "dp-forward", "--data", tmp_path / "none")), 2, "there is no file")
    (tmp_path / "plain.jsonl").write_text('{"text": "a"}\n')
    refused(call(*train(place, "x", "dp-forward", "--data", tmp_path / "plain.jsonl")), 5, "has no labels")
    (tmp_path / "empty.tsv").write_text("")
    refused(call(*train(place, "x", "dp-forward", "--data", tmp_path / "empty.tsv")), 5, "empty.tsv is empty")
    (tmp_path / "ids.tsv").write_text("text\tlabel\n" + "".join(f"a wound\t{n}\n" for n in range(9)))
    result = call(*train(place, "x", "dp-forward", "--data", tmp_path / "ids.tsv"))
    refused(result, 5, "the column label of ids.tsv has 9 labels in 9 rows")
    assert "--label-column" in result.stderr
    (tmp_path / "dev.tsv").write_text(f"text\tlabel\na\t{SECRET}\n")
    result = call(*train(place, "x", "dp-forward", "--validation", tmp_path / "dev.tsv"))
    refused(result, 5, "line 2 of dev.tsv has a label that the training file lacks")
    assert SECRET not in result.stderr
    refused(call(*train(place, "x", "dp-forward", "--client", place)), 2, "exists already")
    refused(call(*train(place, "x", "dp-forward", "--client", place / "x-s" / "c")), 2, "one is in the other")
    swapped = [place / "decoder" if one == place / "model" else one for one in train(place, "x", "dp-forward")]
    refused(call(*swapped), 3, "is a decoder")
    assert call(*train(place, "x", "magic")).exit_code == 2
    assert not [path for path in place.iterdir() if path.name.startswith(("x-", ".milkglass"))]


def test_use_refuses(halves: tuple[Path, Path], place: Path) -> None:
    client, server = halves
    run = ("split", "classify", client)
    refused(call(*run, "--text", "a"), 2, "give --url or --folder")
    refused(call(*run, "--folder", server), 2, "give --text or --file")
    refused(call(*run, "--folder", client, "--text", "a"), 2, "holds the other half")
    refused(call("split", "classify", server, "--folder", server, "--text", "a"), 2, "holds the other half")
    refused(call(*run, "--folder", place / "none", "--text", "a"), 2, "there is no folder")
    refused(call(*run, "--folder", server, "--text", "a", "--pair", "b"), 2, "reads single texts")
    refused(call(*run, "--folder", server, "--text", "a", "--pair", "b", "--pair", "c"), 2, "1 texts and 2 pairs")
    refused(call(*run, "--folder", server, "--text", "a", "--model", place / "decoder"), 4, "another model")
    refused(call(*run, "--url", "http://127.0.0.1:9", "--text", "a"), 6, "does not answer")
    nobody = (*run, "--url", "http://127.0.0.1:9")  # what the texts lack is told before the network is touched
    refused(call(*nobody, "--text", "a", "--text", "a " * 100), 5, "text 2 is ")
    refused(call(*nobody, "--text", "a", "--pair", "b"), 2, "reads single texts")
    refused(call(*nobody, "--text", "a", "--pair", " "), 5, "the second text of text 1 is blank")
    refused(call(*nobody, "--text", " "), 5, "text 1 is blank")
    refused(call("split", "serve", place / "none"), 3, "there is no model folder")
    serve = call("split", "serve", server, "--home", place / "home")
    assert serve.exit_code == 2 and "must not hold a passphrase" in serve.stderr
    refused(call("split", "serve", client, "--home", place / "home", passphrase=None), 2, "holds the other half")
    refused(
        call("split", "serve", place / "model", "--home", place / "home", passphrase=None),
        3,
        "this model is an encoder",
    )
    assert not (place / "home").exists()


def test_an_audit_of_halves(halves: tuple[Path, Path], place: Path, tmp_path: Path) -> None:
    before = (halves[0] / "config.json").read_bytes()
    run = ("split", "audit", *halves, "--text", place / "train.tsv", "--out", tmp_path / "audit")
    result = call(*run, "--budget", "30s")
    assert result.exit_code == 0, result.stderr
    assert SECRET not in result.stderr
    report = json.loads((tmp_path / "audit" / "audit.json").read_text("utf-8"))
    assert report["verdict"] in result.stdout
    assert {"near-hidden", "hidden-words"} <= {one["attack"] for one in report["cells"] if one["state"] == "done"}
    f1 = next(one["measures"]["bag f1"] for one in report["cells"] if one["attack"] == "hidden-words")
    assert f1["low"] < report["floors"]["same words f1"], "these texts have few words"
    assert "Words of a text are named, without their order" not in result.stdout
    assert "words of a text, F1" in result.stdout
    assert "No attack that was run names more words of your texts than anybody would guess" in report["verdict"]
    assert "inversion of states" in report["verdict"], "what was not begun and reads more is named"
    assert "From the hidden states that are sent" in report["verdict"] and "at least" in report["verdict"]
    again = f"to go on where it stopped: milkglass split audit {halves[0]} {halves[1]} --text {place / 'train.tsv'}"
    (advised,) = re.findall(
        re.escape(f"{again} --out {tmp_path / 'audit'} --budget ") + r"(\d+)m$", result.stdout, re.M
    )
    assert f"--budget {advised}m would do" in result.stderr
    assert (tmp_path / "audit" / "work").is_dir()
    assert (report["kept"], report["anyway"], report["distortion"], report["curve"]) == ({}, None, None, [])
    assert report["scheme"]["epsilon"] == 50 and "Lengths are read by anybody" in result.stdout
    page = (tmp_path / "audit" / "audit.html").read_text("utf-8")
    assert "1/k" not in page and "clusters;" not in page and "mean cosine" not in page
    assert "not the secret" in page and "epsilon = 50.0" in page
    assert (halves[0] / "config.json").read_bytes() == before, "an audit sends nothing"
    shutil.rmtree(tmp_path / "audit" / "work")
    refused(call(*run), 2, "holds an audit already")
    refused(call(*run[:-1], tmp_path / "b", "--budget", "soon"), 2, "soon")
    refused(call(*run[:-1], tmp_path / "b", "--public", tmp_path / "none"), 2, "there is no file")
    refused(call("split", "audit", halves[0], halves[0], *run[4:-1], tmp_path / "b"), 2, "holds the other half")
    refused(call("split", "audit", halves[1], halves[1], *run[4:-1], tmp_path / "b"), 2, "holds the other half")
    refused(
        call("split", "audit", halves[0], place / "model", *run[4:-1], tmp_path / "b"), 2, "is not a half of a split"
    )
    assert not (tmp_path / "b").exists()


def test_the_verdict_where_only_words_are_read() -> None:
    bag = {name: Interval(value, value, value, 9) for name, value in (("bag recall", 0.25), ("bag precision", 0.5))}
    bag["bag f1"] = Interval(1 / 3, 0.3, 0.4, 9)
    cell = AttackResult("hidden-words", "Words", "who", "done", measures=bag, costly=True)
    said = verdict(None, {"who": "has text"}, (cell,))
    assert said.startswith("Words of your texts come back, without their order: 25.0 %") and "has text" in said
    assert "says nothing" in verdict(None, {"who": "has text"}, (replace(cell, state="not run", measures={}),))

"""`milkglass audit` as a person calls it, on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
from math import nan
from pathlib import Path

import numpy as np
import pytest

from milkglass.audit.audit import ATTACKING_SHARE, time_to_attack
from milkglass.audit.plan import TimeEstimate
from milkglass.cli.audit import larger_budget
from milkglass.threat.budget import Budget
from tests.cli.kit import SECRET, Owner, call, document, refused

WORDS = f"the wound on my left arm is open since Monday and {SECRET} said 3 stitches may not be enough".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("".join(" ".join(rng.choice(WORDS, rng.integers(5, 12))) + "\n" for _ in range(60)), "utf-8")
    return path


@pytest.mark.parametrize(
    ("enough", "preparation", "larger"),
    [
        (594.0 * ATTACKING_SHARE, 0.0, "10m"), (595.0 * ATTACKING_SHARE, 0.0, "11m"),
        (594.0 * ATTACKING_SHARE, 60.0, "11m"), (60.0 * ATTACKING_SHARE, 1000.0, "2m"), (nan, 60.0, "60m"),
    ],
)  # fmt: skip
def test_the_advised_budget_is_the_one_in_which_nothing_is_late(enough: float, preparation: float, larger: str) -> None:
    """It has room for the preparation and the page. However long those take, attacks have half of a budget."""
    assert larger_budget(TimeEstimate(60.0, 3, (), (), enough), 900.0, preparation) == larger


def test_the_preparation_counts_as_a_part_of_the_budget() -> None:
    now = 0.0
    budget = Budget(60.0, clock=lambda: now)
    now = 18.0
    assert time_to_attack(budget).seconds == pytest.approx(60 - 18 - 6)
    now = 50.0
    assert time_to_attack(budget).seconds == pytest.approx(30), "half of it is for attacks"
    now = 0.0
    longer = Budget(3600.0, clock=lambda: now)
    now = 20.0
    assert time_to_attack(longer).left() == pytest.approx(3600 - 20 - 6)


def test_an_audit_from_the_command_line(encoder: Owner, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "audit"
    run = ("audit", "--key", encoder.path, "--text", texts, "--out", out)
    result = call(*run, "--budget", "10m")
    assert result.exit_code == 0, result.stderr
    assert "of the tokens" in result.stderr
    assert SECRET not in result.stderr
    assert re.search(
        r"about (\d+ min )?\d+ s of processor time for \d+ of them", result.stderr.split("Cluster solve", 1)[0]
    )
    assert {"audit.html", "audit.json"} <= {one.name for one in out.iterdir()}
    assert not (out / "work").exists()
    report = json.loads((out / "audit.json").read_text("utf-8"))
    assert report["verdict"] in result.stdout
    assert "The sample is small: 30 texts" in result.stdout
    assert {"knn+", "matching", "decipherment"} <= {one["attack"] for one in report["cells"] if one["state"] == "done"}

    before = (out / "audit.html").read_bytes()
    refused(call(*run, "--budget", "10m"), 2, "holds an audit already")
    assert (out / "audit.html").read_bytes() == before

    status = document(call("key", "status", encoder.path, "--json"))
    assert status["tokens"] == 0, "an audit sends nothing"
    assert (status["audits"][-1]["texts"], status["audits"][-1]["finished"]) == (30, True)
    assert status["audits"][-1]["tokens"] == report["best"]["measures"]["tokens top-1"]["value"]
    said = call("key", "status", encoder.path).stdout
    assert "no audit" not in said and f"{100 * status['audits'][-1]['tokens']:.1f} %" in said


@pytest.mark.slow
def test_an_audit_that_did_not_finish_says_how_to_go_on(encoder: Owner, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    hard = ("".join(rng.choice([*"abcdefghijklmnopqrstuvwxyz "], 24)) for _ in range(60))  # nobody reads all of it
    (tmp_path / "letters.txt").write_text("\n".join(hard) + "\n")
    out = tmp_path / "audit of mine"
    run = ("audit", "--key", encoder.path, "--text", tmp_path / "letters.txt", "--out", out)
    result = call(*run, "--budget", "0.01s")
    assert result.exit_code == 0, result.stderr
    assert "at least" in result.stdout and "Not finished, and may read more" in result.stdout
    (command,) = re.findall(r"^to go on where it stopped: milkglass (.*)$", result.stdout, re.MULTILINE)
    assert shlex.split(command) == [str(one) for one in (*run, "--budget", "1m")]
    assert not document(call("key", "status", encoder.path, "--json"))["audits"][-1]["finished"]
    assert re.search(r"at least .* not finished", call("key", "status", encoder.path).stdout)
    again = call(*shlex.split(command))
    assert again.exit_code == 0, again.stderr
    assert "goes on" not in result.stderr and re.search(
        r"an audit that was stopped goes on: \d+ of its attacks came to their end, and are kept", again.stderr
    )
    raw = json.loads((out / "audit.json").read_text("utf-8"))
    assert raw["unfinished"] == ["Language model over the candidates"], "all others had their time"
    assert command.replace("1m", "4m") in again.stdout and (out / "work").is_dir()


def test_an_audit_refuses(encoder: Owner, texts: Path, tmp_path: Path) -> None:
    run = ("audit", "--key", encoder.path, "--out", tmp_path / "audit", "--text")
    refused(call(*run, tmp_path / "none"), 2, "there is no file")
    refused(call(*run, tmp_path), 2, "is a folder, not a file")
    refused(call("audit", "--key", tmp_path / "no key", "--text", texts), 4, "there is no key file")
    refused(call(*run, texts, "--budget", "soon"), 2, "soon")
    refused(call(*run, texts, "--rows", 5), 2, "--rows 5 leaves too few")
    refused(call(*run, texts, "--out", texts), 2, "is a file, not a folder")
    refused(call(*run, texts, "--server-transcript", tmp_path), 2, "transcript")
    (tmp_path / "empty.txt").write_text("")
    refused(call(*run, tmp_path / "empty.txt"), 5, "empty.txt is empty")
    refused(call(*run, texts, "--out", texts / "a"), 2, "texts.txt is a file")
    (tmp_path / "short.csv").write_text("body;kind\na;b\n", "utf-8")
    wrong = call(*run, tmp_path / "short.csv")
    refused(wrong, 5, "the header of short.csv names no column text or sentence")
    assert "the columns there are: body, kind; --text-column" in wrong.stderr
    refused(call(*run, texts, "--public", tmp_path / "short.csv"), 5, "the header of short.csv names no column")
    assert not (tmp_path / "audit").exists()

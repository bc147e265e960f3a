"""`milkglass audit` as a person calls it, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.kit import SECRET, Owner, call, document, refused

WORDS = f"the wound on my left arm is open since Monday and {SECRET} said 3 stitches may not be enough".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("".join(" ".join(rng.choice(WORDS, rng.integers(5, 12))) + "\n" for _ in range(60)), "utf-8")
    return path


def test_an_audit_from_the_command_line(encoder: Owner, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "audit"
    run = ("audit", "--key", encoder.path, "--text", texts, "--out", out)
    result = call(*run, "--budget", "20s")
    assert result.exit_code == 0, result.stderr
    assert "of the tokens" in result.stderr
    assert SECRET not in result.stderr
    assert {"audit.html", "audit.json"} <= {one.name for one in out.iterdir()}
    assert not (out / "work").exists()
    report = json.loads((out / "audit.json").read_text("utf-8"))
    assert report["verdict"] in result.stdout
    assert {"knn+", "matching", "decipherment"} <= {one["attack"] for one in report["cells"] if one["state"] == "done"}

    before = (out / "audit.html").read_bytes()
    refused(call(*run, "--budget", "20s"), 2, "holds an audit already")
    assert (out / "audit.html").read_bytes() == before

    status = document(call("key", "status", encoder.path, "--json"))
    assert status["tokens"] == 0, "an audit sends nothing"


def test_an_audit_refuses(encoder: Owner, texts: Path, tmp_path: Path) -> None:
    run = ("audit", "--key", encoder.path, "--out", tmp_path / "audit", "--text")
    refused(call(*run, tmp_path / "none"), 2, "there is no file")
    refused(call(*run, tmp_path), 2, "is a folder, not a file")
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

"""What the guides show in Python is run unchanged, and figures are those of recipes/results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from milkglass.client.key.file import write_key
from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.remote.remote import Remote
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny
from tests.server.kit import TOKEN
from tests.server.real import Server
from tests.warm import warm_jobs

__all__ = ["warm_jobs"]

ROOT = Path(__file__).parents[2]
PASSPHRASE = "correct horse battery"
URL = "https://gpu.example:8420"
TEXTS = {"urgent": "the wound is open again", "billing": "please send the receipt again"}


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def test_the_lines_of_the_whole_job_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,), (proxied,) = (python_blocks(f"docs/{name}.md") for name in ("whole-job", "proxy"))
    assert "127.0.0.1:8422/v1" in proxied  # tests/proxy runs it
    assert URL in code and len(code.strip().splitlines()) <= 6
    monkeypatch.chdir(tmp_path)
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    key = new_key(base, str(base.folder), ObfusLM(4, 0.1, 0.9), base.digest())
    write_key(tmp_path / "clinic.mgkey", key, PASSPHRASE)
    scramble(base, key, tmp_path / "scrambled")
    rows = [{"text": text, "label": label} for label, text in TEXTS.items()] * 4
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    worker = (sys.executable, "-m", "milkglass.server.training")
    with Server(tmp_path / "home", in_thread=True, worker=worker, training_threads=1) as server:
        with Remote(server.url, TOKEN) as remote:
            remote.upload_model(tmp_path / "scrambled", "clinic")
        exec(code.replace(URL, server.url), {"passphrase": PASSPHRASE, "token": TOKEN})
    label, probability = capsys.readouterr().out.split()
    assert label in TEXTS and 0.5 <= float(probability) <= 1


def test_the_python_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save("bert", tmp_path / "my-model")
    words = np.random.default_rng(0).choice([word for text in TEXTS.values() for word in text.split()], (12, 6))
    rows = [{"text": f"{text} {' '.join(more)}", "label": one} for more in words for one, text in TEXTS.items()]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    worker = (sys.executable, "-m", "milkglass.server.training")
    with Server(tmp_path / "home", in_thread=True, worker=worker, training_threads=1) as server:
        names = {"passphrase": PASSPHRASE, "token": TOKEN}
        for code in python_blocks("docs/python.md"):
            exec(code.replace(URL, server.url).replace("k=10, epsilon=0.1", "4, 0.1, 0.9"), names)
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[0] in TEXTS and said[-1] == "text 2 is empty | leave empty texts out"


def test_the_page_of_ones_own_defence_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save("bert", tmp_path / "my-model")
    rows = [f"{text}, and so on {number}" for number in range(20) for text in tiny.TEXTS]
    names = {"private": rows[:30], "public": rows[30:]}
    for code in python_blocks("docs/own-defence.md"):
        exec(code, names)
    verdict, best, alone = capsys.readouterr().out.splitlines()[-3:]
    assert verdict and float(best.split()[-1]) > 0.9, "ids cross as they are"
    assert float(alone) == 1


@pytest.mark.parametrize("page", ["README.md", "THREATS.md", "docs/evidence.md"])
def test_a_share_is_filled_in_or_dated(page: str) -> None:
    """A share that was written by hand stands beside filled ones, as a setting, or says when it was measured."""
    blocks = re.split(r"\n\s*\n|\n(?=- )|\n(?=\|)", (ROOT / page).read_text("utf-8"))
    sourced = re.compile(r"<!-- figure |docs/log\.md|\b20\d\d-\d\d-\d\d\b|, 1/k \|")
    assert not [one for one in blocks if re.search(r"\d %", one) and not sourced.search(one)]


def test_figures_are_those_of_the_results() -> None:
    program = [sys.executable, str(ROOT / "recipes" / "fill_figures.py"), "--check"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<!-- figure " in (ROOT / "README.md").read_text("utf-8")

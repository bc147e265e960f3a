"""`milkglass.audit_key`: what the command runs, from a program."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import milkglass
from milkglass.audit import key_audit
from milkglass.client.key import usage
from milkglass.errors import MilkglassError, UsageError, WrongPassphrase
from milkglass.progress import Progress
from milkglass.rows.data_file import DataFile
from tests.cli.kit import PASSPHRASE, Owner, call

TEXT = "the wound on my left arm is open since monday and the nurse said three stitches may not be enough"


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    return Owner(tmp_path_factory.mktemp("owner"), "bert")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [{"note": " ".join(rng.choice(TEXT.split(), rng.integers(5, 12)))} for _ in range(60)]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
    return path


@pytest.mark.slow
def test_it_finds_what_the_command_finds(owner: Owner, texts: Path, tmp_path: Path) -> None:
    threads, stages = torch.get_num_threads(), list[str]()

    def stage(name: str, size: int) -> Progress:
        stages.append(name)
        return lambda amount: None

    read = DataFile(texts, "note")
    torch.manual_seed(5)  # dropout's generator is the process's own
    result = milkglass.audit_key(owner.path, PASSPHRASE, read, tmp_path / "own", budget="10m", seed=3, stage=stage)
    assert torch.get_num_threads() == threads and "attack" in stages
    assert not result.unfinished and (tmp_path / "own" / "audit.html").is_file()
    (record,) = usage.read(owner.path).audits
    assert result.best is not None and record["tokens"] == result.best.value("tokens top-1") > 0.5
    words = ("--text", texts, "--text-column", "note", "--out", tmp_path / "command", "--budget", "10m", "--seed", 3)
    torch.manual_seed(5)
    done = call("audit", "--key", owner.path, *words)
    assert done.exit_code == 0, done.stderr
    own, command = (json.loads((tmp_path / name / "audit.json").read_text("utf-8")) for name in ("own", "command"))

    def measured(report: dict[str, object]) -> list[object]:
        return [{name: one[name] for name in ("attack", "adversary", "state", "measures")} for one in report["cells"]]  # type: ignore[attr-defined]

    assert measured(own) == measured(command) and own["verdict"] == command["verdict"]
    with pytest.raises(UsageError, match="own holds an audit"):
        milkglass.audit_key(owner.path, PASSPHRASE, read, tmp_path / "own")


def test_a_larger_budget_goes_on(owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the processor's seconds: a minute by the clock is too little for a second attack on a busy machine
    monkeypatch.setattr(key_audit, "time", SimpleNamespace(monotonic=time.process_time))
    rng = np.random.default_rng(1)
    hard = ("".join(rng.choice([*"abcdefghijklmnopqrstuvwxyz "], 24)) for _ in range(60))  # nobody reads all of it
    (tmp_path / "letters.txt").write_text("\n".join(hard) + "\n")
    run = (owner.path, PASSPHRASE, str(tmp_path / "letters.txt"), tmp_path / "audit")
    first = milkglass.audit_key(*run, budget="0.01s")
    assert first.unfinished and (tmp_path / "audit" / "work").is_dir()
    again = milkglass.audit_key(*run, budget="60s")
    assert not {*first.unfinished} <= {*again.unfinished}  # which one it ends with is a matter of the machine


def test_it_refuses_before_it_works(owner: Owner, texts: Path, tmp_path: Path) -> None:
    read = DataFile(texts, "note")
    out = tmp_path / "audit"
    for bad, message in (
        ({"max_rows": 5}, "max_rows=5"), ({"budget": "soon"}, "soon"),
        ({"public": tmp_path / "none.txt"}, r"none\.txt"), ({"server_transcript": tmp_path}, "transcript"),
    ):  # fmt: skip
        with pytest.raises(MilkglassError, match=message):
            milkglass.audit_key(owner.path, PASSPHRASE, read, out, **bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=rf"{re.escape(str(texts))} is a file"):
        milkglass.audit_key(owner.path, PASSPHRASE, read, texts)
    with pytest.raises(WrongPassphrase):
        milkglass.audit_key(owner.path, "another one", read, out)
    assert not out.exists()

"""The whole demo, made short. Slow: two real models, a real server."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from milkglass.demo.run import run_demo
from milkglass.demo.workplace import read_rows
from milkglass.errors import UsageError
from tests import tiny


def test_a_wrong_folder_is_refused_before_anything_heavy(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with pytest.raises(UsageError):
        run_demo(tmp_path, console=Console(file=io.StringIO()))


def test_the_server_is_given_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached model has one, for the client."""
    cached = tiny.save("llama-tied", tmp_path / "cached")
    has = {path.name for path in cached.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja"} < has
    given: list[str] = []

    class Enough(Exception):
        pass

    class Given:
        def __init__(self, home: Path, base_models: Sequence[Path], log: Path) -> None:
            given.extend(path.name for folder in base_models for path in folder.rglob("*"))
            raise Enough

    monkeypatch.setattr("milkglass.models.resolve.resolve", lambda ref: cached)
    monkeypatch.setattr("milkglass.demo.service.Service", Given)
    with pytest.raises(Enough):
        run_demo(tmp_path / "out", console=Console(file=io.StringIO()))
    assert sorted(given) == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_from_end_to_end(tmp_path: Path) -> None:
    said = io.StringIO()
    out = tmp_path / "out"
    result = run_demo(out, quick=True, console=Console(file=said, width=100))
    told = json.loads((out / "result.json").read_text("utf-8"))
    assert told["asked"] == result.asked == 24
    assert "What the server saw" in (out / "index.html").read_text("utf-8")
    assert "Obfuscation is not encryption" in said.getvalue()
    assert len(result.generated) == 2
    for run in (result.classifier, result.generator):
        assert 1 / run.vocabulary < run.recovery.vocabulary_top1 < 0.3
        assert run.recovery.vocabulary_top1 <= run.recovery.vocabulary_top3
    nothing_private_on(out)


def nothing_private_on(out: Path) -> None:
    """The server's folder and log hold no key, no tokenizer, and no run of words of the private texts."""
    files = [path for room in ("server", "bases") for path in (out / room).rglob("*") if path.is_file()]
    files.append(out / "server.log")
    assert not [path for path in files if re.search(r"mgkey|tokenizer|vocab|merges", path.name)]
    held = b"".join(path.read_bytes() for path in files)
    assert len(held) > 10_000  # the training data and the logs are there
    for name in ("tickets_train.jsonl", "tickets_test.jsonl", "replies_train.jsonl"):
        for row in read_rows(name):
            text = row.get("text") or row["input"]
            middle = text[len(text) // 3 :][:20].encode()
            assert middle not in held, "a private text lies on the server"

"""The demo: its folder, what its server gets, its page, and the whole of it (slow: two real models)."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from milkglass.demo import run
from milkglass.demo.page import DemoResult, ModelRun, render
from milkglass.demo.run import MARKER_FILE, read_data_rows, run_demo
from milkglass.errors import UsageError
from milkglass.system import core_count
from tests import tiny

HOSTILE = '<script>alert("1")</script>{{ 7 * 7 }}'


class Enough(Exception):
    """Raised where a test has seen enough."""


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that a server would be given; the demo ends there."""
    cached, names = tiny.save("llama-tied", tmp_path / "cached"), list[str]()

    class Given:
        def __init__(self, home: Path, base_models: Sequence[Path], log: Path) -> None:
            names.extend(path.name for folder in base_models for path in folder.rglob("*"))
            raise Enough

    monkeypatch.setattr("milkglass.models.resolve.resolve_model", lambda ref: cached)
    monkeypatch.setattr(run, "ServerProcess", Given)
    return names


def test_a_folder_with_other_things_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not lose")
    with pytest.raises(UsageError):
        run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(UsageError):
        run_demo(tmp_path / "thesis.txt")


def test_the_server_is_given_no_tokenizer(tmp_path: Path, given: list[str]) -> None:
    """The cached model has one, for the client."""
    with pytest.raises(Enough):
        run_demo(tmp_path / "out")
    assert sorted(given) == ["config.json", "generation_config.json", "model.safetensors"]


def test_an_earlier_demo_is_replaced_and_models_go(
    tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(run, "LARGE_FILE_BYTES", 100)
    with pytest.raises(Enough):
        run_demo(out)
    (out / "client" / "old").touch()
    (out / "index.html").touch()
    with pytest.raises(Enough):
        run_demo(out)
    left = {path.name for path in out.rglob("*") if path.is_file()}
    assert left <= {MARKER_FILE, "config.json", "generation_config.json"}, "the passphrase and models are removed"
    for folder in (out, out / "client"):
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


def test_the_model_that_the_comparison_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LARGE_FILE_BYTES", 2)
    with run._demo_folder(tmp_path / "out"):
        comparison = tmp_path / "out" / "client" / "comparison"
        for name in ("kept", "cells"):
            (comparison / name).mkdir(parents=True)
            (comparison / name / "model.safetensors").write_bytes(b"large")
    assert (comparison / "kept" / "model.safetensors").is_file()
    assert not (comparison / "cells" / "model.safetensors").exists()


class Tags(HTMLParser):
    """Collects tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.links = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("href", "src")]


def result() -> DemoResult:
    """A run whose texts are hostile."""
    piece = {"text": HOSTILE, "right": True, "original": HOSTILE, "joined": False}
    audit = {"verdict": HOSTILE, "examples": [{"original": HOSTILE, "pieces": [piece], "sent": [*range(200)]}]}
    run = ModelRun("sorting", HOSTILE, ("--key", Path("k")), "ft-1", audit, {"original model": 9_000_000}, 12.0)
    asked = [{"text": HOSTILE, "truth": "a", "label": "a", "answer": HOSTILE}] * 2
    interval = {"value": 0.5, "low": 0.4, "high": 0.6, "units": 2}
    ways = [
        {"title": HOSTILE, "state": "done", "quality": interval, "reading": None},
        {"title": "sent", "state": "done", "quality": interval, "reading": {"content": interval, "cut": True}},
        {"title": "unfinished way", "state": "not run", "quality": None, "reading": None},
    ]
    return DemoResult("0.1", 100.0, {"ways": ways, "verdict": [HOSTILE]}, run, asked, run, asked)


def test_the_page_escapes_texts_and_asks_nobody(tmp_path: Path) -> None:
    page, tags = render(result()), Tags()
    tags.feed(page)
    assert "script" not in tags.tags and "<script" not in page and "{{ 7 * 7 }}" in page
    assert set(tags.links) == {"client/sorting-audit/audit.html", "client/comparison/compare.html"}
    assert "at least 50 % of names and content words read" in page and "nothing is sent" in page
    assert "unfinished way" not in page
    assert "and 110 more" in page
    result().write(tmp_path / "result.json")
    document = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert (document["correct"], document["answered"], document["compared"]["verdict"]) == (2, 0, [HOSTILE])


def test_an_audit_has_more_time_on_a_busy_machine() -> None:
    assert run.audit_seconds(False, 0.0) == run.audit_seconds(False, float(core_count())) == 25
    assert run.audit_seconds(True, 2.0 * core_count()) == 40 and run.audit_seconds(True, 99.0 * core_count()) == 80


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_demo(out, is_quick=True)
    assert len(done.classified) == 120 and len(done.generated) == 2
    assert "Obfuscation is not encryption" in (out / "index.html").read_text("utf-8")
    for model_run in (done.sorting, done.writing):
        assert (out / "client" / f"{model_run.name}-audit" / "audit.html").is_file()
        assert (out / "client" / "comparison" / "compare.html").is_file()
        assert model_run.audit["examples"] and all(one["sent"] for one in model_run.audit["examples"])
    nothing_private_on(out)


def nothing_private_on(out: Path) -> None:
    """The server's folder and log hold no key, no tokenizer, and no run of words of the private texts."""
    files = [path for room in ("server", "bases") for path in (out / room).rglob("*") if path.is_file()]
    files.append(out / "server.log")
    assert not [path for path in files if re.search(r"mgkey|tokenizer|vocab|merges", path.name)]
    held = b"".join(path.read_bytes() for path in files)
    assert len(held) > 10_000  # the training data and the logs are there
    for name in ("tickets_train.jsonl", "tickets_test.jsonl", "replies_train.jsonl"):
        for row in read_data_rows(name):
            text = row.get("text") or row["input"]
            middle = text[len(text) // 3 :][:20].encode()
            assert middle not in held, "a private text lies on the server"

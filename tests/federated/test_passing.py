"""A site's preparation that is interrupted loses a few texts at most, and goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.federated import ghost_stage
from milkglass.federated.ghost_stage import TEXTS_PER_PART, parts_folder
from milkglass.federated.prepare import prepare_site, require_match
from milkglass.federated.rows import load_rows, report_of
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.selection import SelectionSettings
from tests import tiny
from tests.federated.kit import World, rows_file

LABELS = {"no": 0, "yes": 1}
ROWS = 2 * TEXTS_PER_PART + 1


class Interrupts:
    """Lets some parts be done."""

    def __init__(self, parts: int) -> None:
        self.left = parts

    def __call__(self, texts: int) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows_file(tmp_path / "long.jsonl", ROWS, 0)
    return tmp_path / "long.jsonl"


def interrupted(there: World, source: Path, site: Path, seed: int | None, ghost: Ghost | None = None) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare_site(source, site, LABELS, there.model, ghost or there.ghost, seed, Interrupts(2))


def made_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of GHOST is given from now on."""
    counts, real = list[int](), ghost_stage._make_part
    monkeypatch.setattr(ghost_stage, "_make_part", lambda ghost, texts: counts.append(len(texts)) or real(ghost, texts))
    return counts


def test_it_goes_on_and_the_result_is_the_same(
    there: World, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, site, ghost = (
        tmp_path / "whole",
        tmp_path / "x" / "site",
        replace(there.ghost, selection=SelectionSettings("random")),
    )
    prepare_site(source, whole, LABELS, there.model, ghost, 7)
    interrupted(there, source, site, 7, ghost)
    assert not site.exists() and parts_folder(site).stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in parts_folder(site).iterdir()} == {0o600}
    counts = made_again(monkeypatch)
    prepare_site(source, site, LABELS, there.model, ghost, 7)
    assert counts == [1], "two parts were there"
    assert load_rows(site).digest() == load_rows(whole).digest() and report_of(site) == report_of(whole)
    assert [one.name for one in site.parent.iterdir()] == ["site"]


def test_a_seed_that_was_drawn_is_kept_until_all_is_done(there: World, source: Path, tmp_path: Path) -> None:
    line = source.read_text("utf-8").splitlines()[0]
    source.write_text("\n".join([line] * ROWS) + "\n", "utf-8")
    site, ghost = tmp_path / "site", replace(there.ghost, selection=SelectionSettings("random"))
    interrupted(there, source, site, None, ghost)
    assert json.loads((parts_folder(site) / "job.json").read_text("utf-8"))["seed"] is not None
    rows = prepare_site(source, site, LABELS, there.model, ghost, None)
    assert len({one.tobytes() for one in rows.ids}) == 1, "one text has one shadow, whatever part it stands in"
    assert not parts_folder(site).exists()


def test_parts_of_another_job_and_damaged_ones_are_refused(there: World, source: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    interrupted(there, source, site, 7)
    with pytest.raises(UsageError, match="unfinished run"):
        prepare_site(source, site, LABELS, there.model, there.ghost, 8)
    source.write_text(source.read_text("utf-8").replace('"text": "', '"text": "a ', 1), "utf-8")
    with pytest.raises(UsageError, match="unfinished run"):
        prepare_site(source, site, LABELS, there.model, there.ghost, 7)
    rows_file(source, ROWS, 0)
    part = sorted(parts_folder(site).glob("[0-9]*.json"))[0]
    for damaged in ('{"ids": [], "tally": {}}', "{"):
        part.write_text(damaged, "utf-8")
        with pytest.raises(CorruptCheckpoint, match=r"part 0 of \.site\.parts"):
            prepare_site(source, site, LABELS, there.model, there.ghost, 7)
    part.unlink()
    assert len(prepare_site(source, site, LABELS, there.model, there.ghost, 7)) == ROWS


def test_what_died_after_the_folder_had_its_name_goes(
    there: World, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with monkeypatch.context() as patched:
        patched.setattr(ghost_stage.FinishedParts, "remove", lambda self: None)
        prepare_site(source, site, LABELS, there.model, there.ghost, None)
    assert parts_folder(site).is_dir()
    assert '"seed": null' in (parts_folder(site) / "job.json").read_text("utf-8")
    with pytest.raises(UsageError, match="site exists"):
        prepare_site(source, site, LABELS, there.model, there.ghost, None)
    assert not parts_folder(site).exists()


def test_rows_of_another_model_or_text_are_not_taken_up(there: World, source: Path, tmp_path: Path) -> None:
    prepare_site(source, tmp_path / "plain", LABELS, there.model, None, 7)
    prepare_site(source, tmp_path / "ghost", LABELS, there.model, there.ghost, 7)
    other = tiny.save("gpt2", tmp_path / "other")
    for name, way, not_it in (("plain", None, "states"), ("ghost", "states", None)):
        require_match(source, tmp_path / name, LABELS, way, there.model)
        with pytest.raises(UsageError, match=f"{name} .*--plain"):
            require_match(source, tmp_path / name, LABELS, not_it, there.model)
    with pytest.raises(UsageError, match="another model"):
        require_match(source, tmp_path / "ghost", LABELS, "states", other)
    with pytest.raises(UsageError, match="--selection states, not nearest"):
        require_match(source, tmp_path / "ghost", LABELS, "nearest", there.model)
    lines = source.read_text("utf-8").splitlines()
    source.write_text("\n".join([lines[2], lines[1], lines[0], *lines[3:]]) + "\n", "utf-8")  # of the same classes
    with pytest.raises(UsageError, match=r"long\.jsonl has changed"):
        require_match(source, tmp_path / "ghost", LABELS, "states", there.model)
    (tmp_path / "ghost" / "texts.mark").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"ghost .*texts\.mark"):
        require_match(source, tmp_path / "ghost", LABELS, "states", there.model)
    rows_file(source, ROWS, 2)
    with pytest.raises(UsageError, match="other rows"):
        require_match(source, tmp_path / "plain", LABELS, None, there.model)


def test_a_run_has_one_seed_and_its_sites(tmp_path: Path) -> None:
    for _ in range(2):
        ghost_stage.begin_or_continue_run(tmp_path / "sites", ["b", "a"], 7)
    assert (tmp_path / "sites" / "begun.json").stat().st_mode & 0o777 == 0o600
    for other in (None, 0):
        with pytest.raises(UsageError, match="with --seed 7"):
            ghost_stage.begin_or_continue_run(tmp_path / "sites", ["a", "b"], other)
    with pytest.raises(UsageError, match="without c"):
        ghost_stage.begin_or_continue_run(tmp_path / "sites", ["a", "b", "c"], 7)
    (tmp_path / "sites" / "begun.json").write_text("{")
    with pytest.raises(CorruptCheckpoint, match=r"begun\.json"):
        ghost_stage.begin_or_continue_run(tmp_path / "sites", ["a", "b"], 7)
    ghost_stage.begin_or_continue_run(tmp_path / "more", ["a"], None)
    with pytest.raises(UsageError, match="without --seed"):
        ghost_stage.begin_or_continue_run(tmp_path / "more", ["a"], 0)


def test_plain_takes_up_no_shadows(there: World, source: Path, tmp_path: Path) -> None:
    interrupted(there, source, tmp_path / "site", 7)
    with pytest.raises(UsageError, match="unfinished preparation"):
        prepare_site(source, tmp_path / "site", LABELS, there.model, None, 7)
    assert parts_folder(tmp_path / "site").is_dir()

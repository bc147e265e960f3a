"""`milkglass federated`, from the command line."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

from safetensors.torch import load_file

from tests import tiny
from tests.cli.kit import call, document, refused
from tests.federated.kit import NAMES, SECRET, World, equal, rows_file

FEW = ("--rounds", "2", "--batch-size", "3", "--lr", "0.1", "--seed", "7")


def test_a_run_from_files_to_weights(there: World, tmp_path: Path, cache: None) -> None:
    out = tmp_path / "run"
    words = ("federated", "run", there.files, "--model", there.model, "--out", out, "--plain")
    result = call(*words, *FEW)
    assert result.exit_code == 0, result.stderr
    assert "warning: --plain" in result.stderr and "2 rounds of fedsgd over 3 sites" in result.stdout
    assert "loss before" in result.stdout and "no site sends it" in result.stdout
    assert "before the gradients: nothing" in result.stdout and "guarantee: none" in result.stdout
    names = {f"updates/round-{n}/{site}.{kind}" for n in (0, 1) for site in NAMES for kind in ("json", "safetensors")}
    assert names == {str(one.relative_to(out)) for one in out.glob("updates/*/*")}
    every = [one for one in out.rglob("*") if one.is_file()]
    assert all(SECRET.encode() not in one.read_bytes() for one in every) and SECRET not in result.stdout
    more = document(call(*words, *FEW, "--json", "--rounds", "3"))
    assert len(more["losses"]) == 3 and all(0 < one < 5 for one in more["losses"])
    assert more["rounds"] == 3 and more["missing"] == [[], [], []] and more["ghost"] is False
    whole = tmp_path / "whole"
    again = document(call(*words[:-3], "--out", whole, "--plain", *FEW, "--json", "--rounds", "3"))
    assert equal(load_file(more["weights"]), load_file(again["weights"]))


def test_a_site_that_was_prepared_elsewhere(there: World, tmp_path: Path, cache: None) -> None:
    """Its rows with GHOST are the ones that a run with the same seed makes; a run with --plain refuses them."""
    out = tmp_path / "sites" / "a"
    words = ("federated", "prepare", there.files / "a.jsonl", "--model", there.model, "--labels", "no, yes")
    result = call(*words, "--out", out, "--seed", 7)
    assert result.exit_code == 0 and "prepared 5 texts for site a" in result.stdout
    tokens = json.loads((out / "report.json").read_text())["tokens"]
    assert f"{tokens['fell_back']:,} of {tokens['all']:,} tokens" in result.stdout
    assert f"{tokens['one_shadow']:,} ({100 * tokens['one_shadow_share']:.1f} %) have one shadow" in result.stdout
    assert json.loads((out / "stamp.json").read_text())["method"] == "ghost"
    refused(call(*words, "--out", out, "--seed", 7), 2, f"{out} exists")
    run = ("federated", "run", there.files, "--model", there.model, "--out", tmp_path, "--plain", *FEW)
    result = call(*run)
    assert result.exit_code == 2 and f"{out} " in result.stderr and "of --plain" in result.stderr


def test_with_ghost_and_a_shield(there: World, tmp_path: Path, cache: None) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number, name in enumerate("ab"):
        rows_file(files / f"{name}.jsonl", 2, number)
    words = ("federated", "run", files, "--model", there.model, "--out", tmp_path / "run", "--rounds", 1)
    found = document(call(*words, "--method", "fedavg", "--shield", "dp-sgd", "--json"))
    assert found["ghost"] and found["shield"] == "dp-sgd" and found["shield_guarantee"].startswith("(9.998")
    assert found["shield_spent"].startswith("(9.998") and "after 1 round," in found["shield_spent"]
    assert all(found["ghost_reports"][name]["texts"] == 2 for name in "ab")
    again = call(*words[:-2], "--rounds", 10, "--method", "fedavg", "--shield", "dp-sgd")
    assert "all together: (46.2" in again.stdout and "DP after 10 rounds" in again.stdout
    assert "- site a: " in again.stdout and "have one shadow" in again.stdout
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert all((tmp_path / "run" / "sites" / name / "stamp.json").is_file() for name in "ab")
    result = call(*words, "--method", "fedavg", "--shield", "dp-sgd", "--seed", 0)
    refused(result, 2, "without --seed")
    rows_file(files / "c.jsonl", 2, 2)
    refused(call(*words, "--method", "fedavg", "--shield", "dp-sgd"), 2, "without c")
    assert not (tmp_path / "run" / "sites" / "c").exists()
    (files / "c.jsonl").unlink()
    (tmp_path / "run" / "sites" / "b" / "stamp.json").unlink()
    refused(call(*words, "--method", "fedavg", "--shield", "dp-sgd", "--rounds", 11), 2, "of --plain")


def test_the_nearest_shadows_are_a_fast_preparation_that_is_recorded(there: World, tmp_path: Path, cache: None) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name, text in zip("ab", tiny.TEXTS, strict=False):  # of one word: each token is visited more than once
        rows = [{"text": text.split()[i % 2], "label": ["no", "yes"][i % 2]} for i in range(4)]
        (files / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("federated", "run", files, "--model", there.model, "--out", tmp_path / "run", *FEW, "--rounds", 1)
    fast = call(*words, "--selection", "nearest")
    assert fast.exit_code == 0, fast.stderr
    assert "--selection nearest" in fast.stderr and "in about" not in fast.stderr
    assert "ghost, selection nearest; guarantee: none" in fast.stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["selection"] == "nearest"
    assert json.loads((tmp_path / "run" / "sites" / "a" / "stamp.json").read_text())["selection"]["way"] == "nearest"
    refused(call(*words), 2, "--selection nearest, not states")
    audit = ("federated", "audit", tmp_path / "run", "--model", there.model, "--site", "a", "--budget", "1s")
    audit = (*audit, "--text", files / "a.jsonl", "--attacks", "free-tokens")
    assert document(call(*audit, "--json"))["selection"] == "nearest"
    assert "selection of shadows: nearest" in call(*audit).stdout
    slow = call(*words[:5], "--out", tmp_path / "slow", *FEW, "--rounds", 1)
    assert slow.exit_code == 0, slow.stderr
    assert "8 texts " in slow.stderr and "in about" in slow.stderr
    assert "selection" not in json.loads((tmp_path / "slow" / "run.json").read_text())["settings"], "as it always was"


def test_a_temporary_folder_is_no_site(there: World, tmp_path: Path) -> None:
    for name in ("north", ".south.tmp"):
        (tmp_path / "run" / "sites" / name).mkdir(parents=True)
    run = ("federated", "audit", tmp_path / "run", "--model", there.model, "--text", there.files / "a.jsonl")
    result = call(*run, "--site", "east")
    refused(result, 2, "site east")
    assert result.stderr.rstrip().endswith(": north")


def test_a_run_that_was_stopped_in_its_preparation_says_which_sites_are_missing(there: World, tmp_path: Path) -> None:
    sites = tmp_path / "run" / "sites"
    (sites / "north").mkdir(parents=True)
    (sites / ".south.parts").mkdir()
    (sites / "begun.json").write_text(json.dumps({"seed": None, "sites": ["north", "south", "west"]}))
    run = ("federated", "audit", tmp_path / "run", "--model", tmp_path / "unread", "--text", there.files / "a.jsonl")
    for site in ("south", "west"):
        result = call(*run, "--site", site)
        refused(result, 2, f"site {site}: ")
        assert "interrupted" in result.stderr
    result = call(*run, "--site", "none")
    refused(result, 2, "site none")
    assert "interrupted" not in result.stderr and result.stderr.rstrip().endswith(": north")
    result = call(*run, "--site", "north")
    refused(result, 2, f"{tmp_path / 'run'} was stopped")
    assert "run.json" in result.stderr and "`milkglass federated run`" in result.stderr
    (sites / "begun.json").write_text("{")
    result = call(*run, "--site", "west")
    refused(result, 2, "site west")
    assert "interrupted" not in result.stderr
    other = call(*run[:2], tmp_path, *run[3:], "--site", "a", "--rows", sites)
    refused(other, 2, f"{tmp_path} is not a run: ")
    assert "run.json" in other.stderr


def test_what_is_refused(there: World, tmp_path: Path) -> None:
    run = ("federated", "run", "--model", there.model, "--out", tmp_path / "run")
    refused(call(*run, tmp_path / "none"), 2, f"no folder {tmp_path / 'none'}")
    refused(call(*run, tmp_path), 2, "0 sites")
    refused(call(*run, there.files, "--rounds", 0), 2, "--rounds is 0")
    refused(call(*run, there.files, "--batch-size", 0), 2, "--batch-size is 0")
    refused(call(*run, there.files, "--lr", "nan"), 2, "--lr is nan")
    refused(call(*run, there.files, "--shield", "fog"), 2, "defence 'fog'")
    result = call(*run, there.files, "--shield", "gaussian:levle=1")
    refused(result, 2, "'levle'")
    assert "level (" in result.stderr and "; 0.05)" in result.stderr and "clip (" in result.stderr
    refused(call(*run, there.files, "--shield", "gaussian:level=much"), 2, "level=much")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    refused(call(*run[:-1], tmp_path / "other", there.files), 2, f"{tmp_path / 'other'} is not a run")
    refused(call(*run[:-1], tmp_path / "other" / "letter.txt", there.files), 2, "letter.txt is a file")
    (tmp_path / "run" / "sites" / "gone").mkdir(parents=True)
    refused(call(*run, there.files), 2, "with gone,")
    shutil.rmtree(tmp_path / "run")
    prepare = ("federated", "prepare", there.files / "a.jsonl", "--model", there.model, "--out", tmp_path / "a")
    refused(call(*prepare, "--labels", "no"), 2, "--labels ")
    refused(call(*prepare, "--labels", "no,no"), 2, "--labels ")
    refused(call(*prepare, "--labels", "no,maybe"), 5, "line 2 of a.jsonl")
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.jsonl").write_text(f'{{"text": "{SECRET}"}}\n')
    result = call(*run, tmp_path / "texts")
    refused(result, 5, "a.jsonl has no labels")
    assert SECRET not in result.stderr and not (tmp_path / "run").exists()


def test_the_next_command_names_the_columns_that_were_read(there: World, tmp_path: Path, cache: None) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number, name in enumerate("ab"):
        rows = map(json.loads, rows_file(tmp_path / f"{name}.jsonl", 4, number).read_text().splitlines())
        lines = [json.dumps({"said": row["text"], "mood": row["label"]}) for row in rows]
        (files / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    columns = ("--text-column", "said", "--label-column", "mood")
    result = call(
        "federated", "run", files, "--model", there.model, "--out", tmp_path / "run", "--plain", *FEW, *columns
    )
    assert result.exit_code == 0, result.stderr
    command = result.stdout.partition("what the server read: milkglass ")[2].partition("\n")[0]
    audited = call(*shlex.split(command), "--attacks", "free-tokens", "--budget", "5s")
    assert audited.exit_code == 0, audited.stderr

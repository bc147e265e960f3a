"""GHOST as a whole: texts and data sets to shadows, kept searches, interruptions, what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from milkglass.errors import CodecError, CorruptCheckpoint, EmptyText, IdOutOfRange, TooLong, UsageError
from milkglass.models.array_cache import DIGEST_METADATA_KEY, content_digest
from milkglass.rows.blocks import row_format_of
from milkglass.sanitizers.files import report_path
from milkglass.sanitizers.ghost import files, search
from milkglass.sanitizers.ghost.files import GhostJob, sanitize_dataset
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.search import ShadowSearchSettings
from milkglass.sanitizers.ghost.selection import SelectionSettings
from milkglass.sanitizers.table import WordVectors
from milkglass.sequences import Sequences
from tests import tiny
from tests.cli.kit import call, document, refused

SECRET = "zanzibar"
SEARCH = ShadowSearchSettings(10, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama-tied", tmp_path_factory.mktemp("ghost") / "model")


@pytest.fixture(scope="module")
def ghost(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Ghost:
    return Ghost.open(folder, SEARCH, SelectionSettings(), cache_folder=tmp_path_factory.mktemp("kept"))


def lines_file(path: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    words = " ".join(tiny.TEXTS).split()
    rows = [{"text": " ".join(rng.choice(words, 2)), "label": i % 2} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(ghost: Ghost, source: Path, out: Path, seed: int | None = 3) -> dict[str, Any]:
    return sanitize_dataset(ghost, GhostJob.of(source, row_format_of(source), out), seed)


# --- texts ------------------------------------------------------------------------------------------------------------
def test_shadows_are_shadows_and_their_text_is_read_from_them(ghost: Ghost) -> None:
    found = ghost.sanitize(tiny.TEXTS)
    for text, one in zip(tiny.TEXTS, found, strict=True):
        assert len(one.ids) == len(one.original) == len(ghost.tokenizer(text)["input_ids"])
        pairs = zip(one.original.tolist(), one.ids.tolist(), strict=True)
        assert all(after in ghost.candidates.of(before) and after != before for before, after in pairs)
        assert one.text == ghost.tokenizer.decode(one.ids).strip() != text
        assert one.choice.loss is not None and one.choice.loss_history[-1] < one.choice.loss_history[0]


def test_other_sentences_and_their_lengths_change_nothing(ghost: Ghost) -> None:
    texts = ["the nurse", "a fever", "please move my appointment"]
    together = ghost.sanitize(texts)
    for text, one in zip(texts, together, strict=True):
        assert ghost.sanitize([text])[0].ids.tolist() == one.ids.tolist()
    assert ghost.shadows(ghost.encode(texts)).ids.tolist() == [i for one in together for i in one.ids.tolist()]


def test_special_tokens_stay_and_text_that_looks_like_one_does_not(ghost: Ghost) -> None:
    ids = np.array([1, 40, 3, 50, 2])
    shadow = ghost.shadows(Sequences.of([ids])).ids
    assert shadow[[0, 2, 4]].tolist() == [1, 3, 2] and shadow[1] != 40 and shadow[3] != 50
    assert not {0, 1, 2, 3} & {*ghost.encode(["a </s> <pad> b"]).ids.tolist()}


def test_the_ways_of_table_7(ghost: Ghost) -> None:
    ids = ghost.encode(tiny.TEXTS)
    first = replace(ghost, selection=SelectionSettings("nearest"), network=None).shadows(ids)
    assert first.ids.tolist() == [ghost.candidates.of(one)[0] for one in ids.ids.tolist()]
    drawn = [
        replace(ghost, selection=SelectionSettings("random"), network=None, seed=s).choices(ids) for s in (0, 0, 1)
    ]
    flat = [[i for one in some for i in one.ids.tolist()] for some in drawn]
    assert flat[0] == flat[1] != flat[2] and drawn[0][0].loss is None


def test_what_texts_and_ids_are_refused(ghost: Ghost) -> None:
    with pytest.raises(EmptyText, match="text 2 "):
        ghost.sanitize(["a", ""])
    with pytest.raises(TooLong, match=r"text 2 .*\b128\b") as caught:
        ghost.sanitize(["a", f"{SECRET} " * 200])
    assert SECRET not in str(caught.value)
    for bad in (-1, 300):
        with pytest.raises(IdOutOfRange, match="0 to 299"):
            ghost.shadows(Sequences.of([[5, bad]]))
    with pytest.raises(EmptyText):
        ghost.shadows(Sequences.of([[5], []]))
    with pytest.raises(UsageError, match="no model"):
        replace(ghost, network=None).shadows(Sequences.of([[5]]))
    assert ghost.sanitize([]) == [] and "987654" not in repr(replace(ghost, seed=987654))


# --- kept searches ----------------------------------------------------------------------------------------------------
def test_the_digest_follows_everything_that_a_search_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    table, texts = WordVectors(("a", "b", "c"), rng.normal(size=(3, 4)).astype(np.float32)), ["a", "b", "c"]
    changes = {"k": 71, "overlap": 0.2, "indirect": False, "direct": False, "lemma": False, "language": "de"}
    assert changes.keys() == asdict(ShadowSearchSettings()).keys()
    given = [(table, texts, replace(ShadowSearchSettings(), **{name: value})) for name, value in changes.items()]
    given += [
        (table, texts, ShadowSearchSettings()),
        (replace(table, vectors=table.vectors + np.float32(1e-6)), texts, ShadowSearchSettings()),
        (replace(table, special=np.array([True, False, False])), texts, ShadowSearchSettings()),
        (replace(table, words=("a", "b", "d")), texts, ShadowSearchSettings()),
        (table, ["a", "b", "d"], ShadowSearchSettings()),
    ]  # fmt: skip
    names = [search.search_digest(*one) for one in given]
    monkeypatch.setattr(search, "version", lambda package: "0.0")
    names.append(search.search_digest(table, texts, ShadowSearchSettings()))
    assert len({*names}) == len(names)
    monkeypatch.undo()
    assert search.search_digest(replace(table, name="other"), texts, ShadowSearchSettings()) == names[6]


def test_a_search_is_made_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ghost.open(folder, SEARCH, SelectionSettings("nearest"), cache_folder=tmp_path)
    kept = list(tmp_path.iterdir())
    assert len(kept) == 1 and kept[0].suffix == ".safetensors"
    monkeypatch.setattr("milkglass.sanitizers.ghost.ghost.find_shadows", None)  # would fail if it were called
    again = Ghost.open(folder, SEARCH, SelectionSettings("nearest"), cache_folder=tmp_path)
    for name in vars(first.candidates):
        np.testing.assert_array_equal(getattr(first.candidates, name), getattr(again.candidates, name))
    monkeypatch.undo()
    Ghost.open(folder, replace(SEARCH, k=11), SelectionSettings("nearest"), cache_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    raw, right = kept[0].read_bytes(), load_file(kept[0])
    wrong = [
        {**right, "ids": right["ids"] + np.int32(300)},
        {**right, "starts": right["starts"][::-1].copy()},
        {**right, "reach": right["reach"][:-1]},
        {**right, "fallen": right["reach"]},
        {name: right[name] for name in ("ids", "starts")},
    ]
    for bad in (raw[:-9], b"", *(save(one, {DIGEST_METADATA_KEY: content_digest(one)}) for one in wrong)):
        kept[0].write_bytes(bad)
        with pytest.raises(CorruptCheckpoint, match=r"\.safetensors of the cache"):
            Ghost.open(folder, SEARCH, SelectionSettings("nearest"), cache_folder=tmp_path)


# --- data sets --------------------------------------------------------------------------------------------------------
def test_ids_stand_beside_the_text_and_other_fields_stay(ghost: Ghost, tmp_path: Path) -> None:
    source, out = lines_file(tmp_path / "in.jsonl", 12), tmp_path / "out.jsonl"
    more = [{"text": "fever", "text_pair": "scan"}, {"messages": [{"role": "user", "content": "scan"}]}, {"text": " "}]
    source.write_text(source.read_text() + "".join(json.dumps(row) + "\n" for row in more))
    report = run(ghost, source, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    before = [json.loads(line) for line in source.read_text().splitlines()]
    shadows = replace(ghost, seed=3).sanitize([old["text"] for old in before[:12]])
    for old, new, shadow in zip(before[:12], rows[:12], shadows, strict=True):
        assert [*new] == ["text", "label", "ids"] and new["label"] == old["label"]
        assert new["ids"] == shadow.ids.tolist() and new["text"] == shadow.text != old["text"]
    assert [*rows[12]] == ["text", "text_pair", "text_ids", "text_pair_ids"]
    assert [*rows[13]["messages"][0]] == ["role", "content", "ids"] and rows[14] == {"text": "", "ids": []}
    tokens = report["tokens"]
    assert tokens["all"] == sum(len(row["ids"]) for row in rows[:12]) + sum(
        len(one) for one in (rows[12]["text_ids"], rows[12]["text_pair_ids"], rows[13]["messages"][0]["ids"])
    )
    assert tokens["replaced"] == tokens["all"] - tokens["special"] and tokens["replaced_share"] == 1
    assert (report["rows"], report["texts"], report["empty_texts"]) == (15, 15, 1)
    assert report["fields_left_as_they_are"] == ["label"]
    fell = ghost.candidates.fell_back
    assert report["vocabulary"]["fell_back"] == fell.sum() and 0 <= tokens["fell_back_share"] < 1
    own = [i for row in before[:12] for i in ghost.tokenizer(row["text"])["input_ids"]]
    own += [i for text in ("fever", "scan", "scan") for i in ghost.tokenizer(text)["input_ids"]]
    alone = [one for one in own if len(ghost.candidates.of(one)) == 1 and not ghost.candidates.is_fixed[one]]
    assert tokens["one_shadow"] == len(alone) and tokens["one_shadow_share"] == len(alone) / len(own)
    every = [one for one in range(300) if len(ghost.candidates.of(one)) == 1 and not ghost.candidates.is_fixed[one]]
    assert report["vocabulary"]["one_shadow"] == len(every) > 0
    assert 0 <= report["likeness"]["rouge-1"] < 0.3 and report["guarantee"] is None and report["seed_given"]
    assert json.loads(report_path(out).read_text()) == report and out.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".*"))


def test_tables_and_lines(ghost: Ghost, tmp_path: Path) -> None:
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["label", "sentence"], ["a,b", "the nurse"], ["c", ""]])
    run(ghost, tmp_path / "in.csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["label", "sentence", "ids"] and rows[1][0] == "a,b" and rows[2] == ["c", "", ""]
    assert [*map(int, rows[1][2].split())] == replace(ghost, seed=3).sanitize(["the nurse"])[0].ids.tolist()
    (tmp_path / "in.tsv").write_text("sentence1\tsentence2\tlabel\nthe scan\tthe test\t1\n")
    run(ghost, tmp_path / "in.tsv", tmp_path / "out.tsv")
    head, row = (line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines())
    assert head == ["sentence1", "sentence2", "label", "sentence1_ids", "sentence2_ids"] and row[2] == "1"
    (tmp_path / "in.txt").write_text("the nurse\n\n")
    run(ghost, tmp_path / "in.txt", tmp_path / "lines.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [*rows[0]] == ["text", "ids"] and rows[1] == {"text": "", "ids": []}


@pytest.mark.parametrize("seed", [3, None])
def test_an_interrupted_run_goes_on_to_the_same_end(
    ghost: Ghost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    monkeypatch.setattr(files, "ROWS_A_PART", 3)
    source, out = lines_file(tmp_path / "in.jsonl", 11), tmp_path / "out.jsonl"
    work, calls = files._sanitize, list[int]()

    def until(last: int) -> Any:
        def stop(ghost: Ghost, job: GhostJob, part: Any) -> Any:
            calls.append(part.number)
            if part.number == last:
                raise KeyboardInterrupt
            return work(ghost, job, part)

        return stop

    monkeypatch.setattr(files, "_sanitize", until(2))
    with pytest.raises(KeyboardInterrupt):
        run(ghost, source, out, seed)
    parts = tmp_path / ".out.jsonl.parts"
    assert not out.exists() and parts.stat().st_mode & 0o777 == 0o700
    assert all(one.stat().st_mode & 0o777 == 0o600 for one in parts.iterdir())
    kept = json.loads((parts / "job.json").read_text())["seed"]
    assert (kept is None) == (seed == 3), "who gave a seed gives it again: it is kept nowhere"
    drawn = int(kept or 3)
    monkeypatch.setattr(files, "_sanitize", until(-1))
    report = run(ghost, source, out, seed)
    assert calls == [0, 1, 2, 2, 3], "what was done is not done again"
    assert not parts.exists() and "seed" not in report and report["seed_given"] == (seed == 3)
    whole = run(ghost, source, tmp_path / "whole.jsonl", drawn)
    assert out.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert {**whole, "seed_given": seed == 3} == report


def test_a_death_when_the_file_has_its_name_leaves_no_seed_and_the_next_call_cleans(
    ghost: Ghost, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = lines_file(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    parts, seen = tmp_path / ".out.jsonl.parts", list[bool]()
    own = files.new_file

    def dying(self: Any) -> None:
        raise KeyboardInterrupt

    def watched(path: Path) -> Any:
        seen.append(json.loads((parts / "job.json").read_text())["seed"] is None)
        return own(path)

    with monkeypatch.context() as patch:
        patch.setattr(files.FinishedParts, "remove", dying)
        patch.setattr(files, "new_file", watched)
        with pytest.raises(KeyboardInterrupt):
            run(ghost, source, out, None)
    assert seen == [True, True], "the seed goes before anything appears"
    assert out.is_file() and (parts / "00000000.json").is_file()
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    before = out.read_bytes()
    refused(call("sanitize", "--method", "ghost", "--embeddings", folder, source, out), 2, f"{out} exists")
    assert not parts.exists() and out.read_bytes() == before


def test_a_death_before_the_file_has_its_name_needs_no_seed_to_go_on(
    ghost: Ghost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = lines_file(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    part = tmp_path / ".out.jsonl.parts" / "00000000.json"

    def dying(path: Path) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "new_file", dying)
        with pytest.raises(KeyboardInterrupt):
            run(ghost, source, out, None)
    made = json.loads(part.read_text())["rows"]
    part.rename(tmp_path / "aside")
    with pytest.raises(CorruptCheckpoint, match=r"part 0 of \.out\.jsonl\.parts .*gone"):
        run(ghost, source, out, None)
    (tmp_path / "aside").rename(part)
    run(ghost, source, out, None)
    assert out.read_text() == made and not part.parent.exists()


def test_a_death_between_the_report_and_the_file_goes_on(
    ghost: Ghost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = lines_file(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    own = files.new_file

    @contextmanager
    def dying(path: Path) -> Iterator[Any]:
        with own(path) as file:
            yield file
            if path == out:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "new_file", dying)
        with pytest.raises(KeyboardInterrupt):
            run(ghost, source, out, None)
    assert files.report_path(out).is_file() and not out.exists()
    report = run(ghost, source, out, None)
    assert out.is_file() and json.loads(files.report_path(out).read_text()) == report
    assert not (tmp_path / ".out.jsonl.parts").exists()


def test_an_unfinished_run_of_another_job_is_not_thrown_away(
    ghost: Ghost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ROWS_A_PART", 2)
    source, out = lines_file(tmp_path / "in.jsonl", 4), tmp_path / "out.jsonl"
    work = files._sanitize

    def once(ghost: Ghost, job: GhostJob, part: Any) -> Any:
        if part.number:
            raise KeyboardInterrupt
        return work(ghost, job, part)

    monkeypatch.setattr(files, "_sanitize", once)
    with pytest.raises(KeyboardInterrupt):
        run(ghost, source, out)
    monkeypatch.setattr(files, "_sanitize", work)
    other = replace(ghost, selection=SelectionSettings(beams=2))
    for one, seed in ((other, 3), (ghost, 4), (ghost, None)):
        with pytest.raises(UsageError, match=r"\.out\.jsonl\.parts .*unfinished"):
            run(one, source, out, seed)
    (tmp_path / ".out.jsonl.parts" / "00000000.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match=r"part 0 of \.out\.jsonl\.parts .*damaged"):
        run(ghost, source, out)
    (tmp_path / ".out.jsonl.parts" / "00000000.json").unlink()
    assert run(ghost, source, out)["rows"] == 4


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (['{"text": "a"}', '{"text": "' + "zanzibar " * 200 + '"}'], r"line 2 of in\.jsonl .*\d tokens"),
        (['{"text": "a", "ids": "zanzibar"}'], r"line 1 of in\.jsonl .*ids"),
        (['{"text": "a"}', '{"label": "zanzibar"}'], r"line 2 of in\.jsonl .*no text"),
    ],
)
def test_bad_rows_are_told_before_anything_is_done(ghost: Ghost, tmp_path: Path, rows: list[str], error: str) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(CodecError, match=error) as caught:
        run(ghost, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert SECRET not in str(caught.value) and [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]


def test_names_that_do_not_fit_and_files_that_are_there(ghost: Ghost, tmp_path: Path) -> None:
    source = lines_file(tmp_path / "in.jsonl", 1)
    with pytest.raises(UsageError, match=r"out\.csv .*json"):
        run(ghost, source, tmp_path / "out.csv")
    (tmp_path / "in.csv").write_text("text,ids\na,1\n")
    with pytest.raises(UsageError, match=r"in\.csv .*column of ids"):
        run(ghost, tmp_path / "in.csv", tmp_path / "out.csv")
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        run(ghost, source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "mine"


# --- from the command line --------------------------------------------------------------------------------------------
def test_from_the_command_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    source = lines_file(tmp_path / "in.jsonl", 6)
    words = ("sanitize", "--method", "ghost", "--embeddings", folder, source)
    options = (
        "--k",
        10,
        "--set",
        "overlap=0.5",
        "--set",
        "lemma=false",
        "--set",
        "direct=false",
        "--set",
        "beams=2",
        "--seed",
        5,
    )
    report = document(call(*words, tmp_path / "out.jsonl", *options, "--json"))
    assert report["search"] == {**ShadowSearchSettings(10, 0.5).document(), "lemma": False, "direct": False}
    assert report["selection"] == SelectionSettings(beams=2).document() and report["model"] == "model"
    assert report["tokens"]["replaced_share"] == 1 and report["out"] == str(tmp_path / "out.jsonl")
    ghost = Ghost.open(
        folder, ShadowSearchSettings(10, 0.5, lemma=False, direct=False), SelectionSettings(beams=2), seed=5
    )
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["ids"] for row in rows] == [one.ids.tolist() for one in ghost.sanitize(texts)]
    result = call(*words, tmp_path / "b.jsonl", "--k", 10, "--set", "selection=nearest")
    assert result.exit_code == 0 and "100.0 % of" in result.stdout and "ROUGE-1, METEOR" in result.stdout
    assert "loss" not in result.stdout and "guarantee: none" in result.stdout
    assert "`ids`" in result.stderr


def test_long_rows_are_cut_and_named_before_the_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    source, out = lines_file(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with source.open("a") as file:
        file.write(json.dumps({"text": "the nurse " * 300}) + "\n")
    words = ("sanitize", "--method", "ghost", "--embeddings", folder, source, out, "--set", "selection=nearest")
    done = call(*words, "--k", 10)
    assert done.exit_code == 0, done.stderr
    limit = Ghost.open(folder, ShadowSearchSettings(10)).limit
    said = done.stderr.splitlines()
    assert said[0] == f"cut to {limit} tokens, which is what {folder} takes: line 4 of in.jsonl"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 4 and len(rows[3]["ids"]) == limit


def test_what_the_command_line_refuses(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    source, out = lines_file(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    words = ("sanitize", "--method", "ghost", "--embeddings", folder)
    for option in (("--epsilon", 2), ("--workers", 2), ("--keep-stopwords",), ("--allow", "a")):
        refused(call(*words, source, out, *option), 2, f"for {option[0]}")
    refused(call("sanitize", "--method", "custext", source, out, "--set", "beams=2"), 2, "'beams'")
    refused(call(*words, "-"), 2, "stdin")
    refused(call(*words, source), 2, "no OUT")
    refused(call(*words, tmp_path / "none", out), 2, f"no file {tmp_path / 'none'}")
    refused(call(*words, source, out, "--set", "without=all"), 2, "'without'")
    refused(call(*words, source, out, "--set", "language=xx"), 2, "language 'xx'")
    refused(call(*words, source, out, "--k", 0), 2, "k=0")
    refused(call("sanitize", "--method", "ghost", "--table", tmp_path / "no", source, out), 3, f"{tmp_path / 'no'}")
    (tmp_path / "blank.jsonl").write_text("\n")
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "a b"}\n{"text"\n')
    none = ("sanitize", "--method", "ghost", "--embeddings", tmp_path / "no model")  # what needs none is told first
    for name in ("blank.jsonl", "blank.txt"):
        refused(call(*none, tmp_path / name, out), 5, f"{name} has no")
    refused(call(*none, tmp_path / "broken.jsonl", out), 5, "line 2 of broken.jsonl")
    refused(call(*none, source, source / "out.jsonl"), 2, f"no folder {source}")
    assert not out.exists() and not list(tmp_path.glob(".out*"))

"""`milkglass reproduce` and `milkglass data` as a person calls them, on tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.cli.kit import SECRET, call, document, refused
from tests.experiments.running import figures as figures_of
from tests.experiments.running import run

MIDDLE = """attacks = ["knn", "cluster-solve"]
[public]
same = ["rest"]
[variants."k=4"]
k = 4
epsilon = 1.0
beta = 0.9
[variants."k=8"]
k = 8
epsilon = 1.0
beta = 0.9
[published]
"tokens top-1, knn, model only, k=4" = 99.5
"tokens top-1, knn, model only, k=8" = 98.5
[why]
"tokens top-1, knn, *" = "a tiny random model"
[asked]
"tokens top-1, knn, model only, k=4" = "at least 0"
[quick]
rows = 10
variants = ["k=4"]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tiny.save("bert", folder / "base")
    (folder / "cola").mkdir()
    rows = [f"gj04\t{i % 2}\t\t{text} {i}\n" for i in range(6) for text in tiny.TEXTS]
    for name in ("train", "dev"):
        (folder / "cola" / f"{name}.tsv").write_text("".join(rows), "utf-8")
    return folder


@pytest.fixture(scope="module")
def recipe(data: Path) -> Path:
    path = data / "small.toml"
    head = f'kind = "attacks"\npaper = "none"\nmodel = "{data / "base"}"\nseed = 3\nprivate = "cola:train"\nrows = 16\n'
    path.write_text(head + MIDDLE, "utf-8")
    return path


@pytest.fixture(scope="module")
def done(data: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("full") / "run"
    result = call("reproduce", recipe, "--data", data, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "k=4: knn (model only), " in result.stderr  # as it goes
    assert result.stdout.splitlines()[0] == "small"
    assert "paper 99.50" in result.stdout and "asked: at least 0" in result.stdout
    assert result.stdout.splitlines()[-3:] == [str(out / f"small.{kind}") for kind in ("json", "md", "html")]
    return out


def figures(path: Path) -> dict[str, Any]:
    return figures_of(json.loads(path.read_text("utf-8")))


def test_a_run_leaves_figures_and_tables(done: Path) -> None:
    found = json.loads((done / "small.json").read_text("utf-8"))
    assert found["recipe"] == "small" and "quick" not in found and found["private"] == "cola:train"
    one = figures_of(found)["tokens top-1, knn, model only, k=4"]
    assert (one["published"], one["asked"], one["why"]) == (99.5, "at least 0", "a tiny random model")
    assert 0 <= one["measured"] <= 100
    assert figures_of(found)["private tokens, k=4"]["measured"] > 0
    assert "a tiny random model" in (done / "small.md").read_text("utf-8")
    assert "a tiny random model" in (done / "small.html").read_text("utf-8")
    assert done.stat().st_mode & 0o777 == 0o700  # guesses at texts lie in it


def test_a_run_goes_on_and_is_the_modules(done: Path, data: Path, recipe: Path) -> None:
    before = figures(done / "small.json")
    found = document(call("reproduce", recipe, "--data", data, "--out", done, "--json"))
    assert found["files"][0] == str(done / "small.json")
    assert figures_of(found) == before  # the seconds too: nothing was done again
    assert run(recipe, data, done, 1) == 0
    assert figures(done / "small.json") == before


def test_a_quick_run_is_never_taken_for_a_full_one(done: Path, data: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = call("reproduce", recipe, "--data", data, "--out", out, "--quick")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[0] == "small (quick)"
    names = {one.name for one in out.iterdir()}
    assert names == {
        "run.json",
        "begun.json",
        "used.json",
        "k=4",
        "small.quick.json",
        "small.quick.md",
        "small.quick.html",
    }
    found = json.loads((out / "small.quick.json").read_text("utf-8"))
    assert found["recipe"] == "small.quick"
    assert found["quick"] == {"rows": 10, "variants": ["k=4"]} and found["rows"] == 10
    one = figures_of(found)["tokens top-1, knn, model only, k=4"]
    assert one["published"] == 99.5 and "asked" not in one
    assert not [name for name in figures_of(found) if name.endswith("k=8")]
    assert "A quick run" in (out / "small.quick.html").read_text("utf-8")
    refused(call("reproduce", recipe, "--data", data, "--out", out), 2, "holds a run of other settings")
    assert {one.name for one in out.iterdir()} == names
    before = (done / "small.json").read_bytes()
    refused(call("reproduce", recipe, "--data", data, "--out", done, "--quick"), 2, "holds a run of other settings")
    assert (done / "small.json").read_bytes() == before
    assert not list(done.glob("*.quick.*"))


def test_a_quick_run_of_other_settings_is_another(data: Path, recipe: Path, tmp_path: Path) -> None:
    words = ("--data", data, "--out", tmp_path / "run", "--quick")
    other = tmp_path / "small.toml"
    other.write_text(recipe.read_text("utf-8"), "utf-8")
    assert call("reproduce", other, *words).exit_code == 0
    other.write_text(recipe.read_text("utf-8").replace("rows = 10", "rows = 11"), "utf-8")
    refused(call("reproduce", other, *words), 2, "holds a run of other settings, model or data: quick")


def test_what_cannot_be_run_leaves_nothing(data: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    there = ("--data", data, "--out", out)
    refused(call("reproduce", tmp_path / "no.toml", *there), 2, "there is no file")
    refused(call("reproduce", recipe, "--data", tmp_path / "no", "--out", out), 2, "there is no folder")
    refused(call("reproduce", recipe, "--data", tmp_path, "--out", out), 2, "has no train split of cola")
    bare = tmp_path / "bare.toml"
    bare.write_text(recipe.read_text("utf-8").split("[quick]")[0], "utf-8")
    refused(call("reproduce", bare, *there, "--quick"), 2, "bare.toml has no table [quick]")
    bare.write_text('kind = "dance"\n', "utf-8")
    refused(call("reproduce", bare, *there), 2, "bare.toml is of the kind 'dance'")
    refused(call("reproduce", recipe, "--data", data, "--out", bare), 2, "is a file, not a folder")
    assert not out.exists()


def test_what_is_missing_is_told_before_experiments_are_imported(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "milkglass.experiments.reproduce", None)
    no = ("--data", tmp_path / "no", "--out", tmp_path / "run")
    missing = call("reproduce", recipe, *no)
    refused(missing, 2, f"there is no folder {tmp_path / 'no'}")
    assert "give --data a folder that holds one for each data set" in missing.stderr
    (tmp_path / "bad.toml").write_text("kind", "utf-8")
    refused(call("reproduce", tmp_path / "bad.toml", *no), 2, "bad.toml is not TOML")


TRAINING = """kind = "classification"
paper = "none"
model = "{model}"
seed = 3
[data]
train = "cola:train"
validation = "cola:validation"
[training]
max_steps = 40
batch_size = 4
[variants.plain]
[variants.obfuslm]
k = 4
epsilon = 1.0
beta = 0.9
[quick]
training.max_steps = 2
"""


@pytest.mark.slow
def test_a_training_on_a_data_set_by_name(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "cola.toml"
    path.write_text(TRAINING.format(model=data / "base"), "utf-8")
    words = ("reproduce", path, "--data", data, "--out", tmp_path / "run", "--quick")
    result = call(*words)
    assert result.exit_code == 0, result.stderr
    assert "plain: step 2 of 2" in result.stderr or "plain: evaluation" in result.stderr
    found = json.loads((tmp_path / "run" / "cola.quick.json").read_text("utf-8"))
    assert found["training"]["max_steps"] == 2 and found["quick"] == {"training": {"max_steps": 2}}
    assert {"accuracy, plain", "matthews, plain", "matthews, obfuslm"} <= set(figures_of(found))
    assert -100 <= figures_of(found)["matthews, obfuslm"]["measured"] <= 100
    refused(call(*words[:-1]), 2, "holds a run of other settings")


# --- data -------------------------------------------------------------------------------------------------------------
def test_the_data_sets_are_listed() -> None:
    assert "cola" in call("data").stdout
    found = document(call("data", "--json"))["data_sets"]
    assert {one["name"]: one["metrics"] for one in found}["mrpc"] == ["accuracy", "f1"]


def test_a_data_set_by_name_becomes_json_lines(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ("data", "cola", "--from", data, "--split", "validation", "--rows", 3, "--out", out)
    assert document(call(*words, "--json")) == {"out": str(out), "rows": 3}
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert rows[0] == {"text": f"{tiny.TEXTS[0]} 0", "label": "unacceptable"}
    assert len(rows) == 3
    refused(call(*words), 2, "exists already")


def test_a_table_of_ones_own_becomes_json_lines(tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text(f'who,body,kind\n1,"a wound, {SECRET}",hurt\n2,the bill,money\n', "utf-8")
    out = tmp_path / "out.jsonl"
    columns = ("--text-column", "body", "--label-column", "kind")
    assert call("data", mine, *columns, "--out", out).stdout == (
        f"2 rows in {out}; text from body, label from kind; not read: who\n"
    )
    assert json.loads(out.read_text("utf-8").splitlines()[0]) == {"text": f"a wound, {SECRET}", "label": "hurt"}
    refused(call("data", mine, "--out", tmp_path / "b.jsonl"), 5, "the header of mine.csv names no column text or sent")
    wrong = call("data", mine, "--text-column", "text", "--out", tmp_path / "b.jsonl")
    refused(wrong, 5, "the header of mine.csv names no column text")
    assert "the columns there are: who, body, kind" in wrong.stderr and SECRET not in wrong.stderr
    assert not (tmp_path / "b.jsonl").exists()


def test_columns_of_known_names_are_taken_and_told(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine.tsv", tmp_path / "out.jsonl"
    mine.write_text("id\tsentence\tlabel\n7\tthe bill\tmoney\n", "utf-8")
    answer = document(call("data", mine, "--out", out, "--json"))
    assert answer["columns"] == {"text": "sentence", "label": "label", "text_pair": None}
    assert json.loads(out.read_text("utf-8")) == {"text": "the bill", "label": "money"}
    other = call("data", mine, "--label-column", "id", "--out", tmp_path / "ids.jsonl").stdout
    assert other.endswith("; text from sentence, label from id; not read: label\n")
    plain = call("data", mine, "--text-column", "label", "--out", tmp_path / "plain.jsonl").stdout
    assert plain.endswith("; text from label; no labels (--label-column); not read: id, sentence\n")
    again = call(
        "data", mine, "--text-column", "sentence", "--delimiter", "tab", "--out", tmp_path / "tab.jsonl"
    ).stdout
    assert again.endswith("; text from sentence, label from label; not read: id\n")


def test_semicolons_and_a_json_list_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("text;label\na wound, open;hurt\n\nthe bill;money\n", "utf-8-sig")
    done = call("data", tmp_path / "mine.csv", "--out", tmp_path / "a.jsonl")
    assert done.stdout.endswith("; text from text, label from label\n")
    assert "1 blank line of mine.csv skipped" in done.stderr
    (tmp_path / "alpaca.json").write_text(json.dumps([{"instruction": "Sum.", "input": "", "output": "So."}]), "utf-8")
    done = call("data", tmp_path / "alpaca.json", "--out", tmp_path / "b.jsonl")
    assert done.stdout == f"1 rows in {tmp_path / 'b.jsonl'}; messages from instruction, input (if any) and output\n"
    assert json.loads((tmp_path / "b.jsonl").read_text("utf-8"))["messages"][1]["content"] == "So."
    again = call("data", tmp_path / "b.jsonl", "--out", tmp_path / "c.jsonl").stdout
    assert again == f"1 rows in {tmp_path / 'c.jsonl'}; messages from messages\n"
    texts = ("data", tmp_path / "alpaca.json", "--text-column", "instruction", "--out", tmp_path / "d.jsonl")
    assert call(*texts).stdout.endswith(
        "; text from instruction; no labels (--label-column); not read: input, output\n"
    )
    assert json.loads((tmp_path / "d.jsonl").read_text("utf-8")) == {"text": "Sum."}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cola",), "--out is missing"),
        (("cola", "--out", "x.jsonl"), "where is the data set"),
        (("cola", "--hub", "--from", ".", "--out", "x.jsonl"), "both --from and --hub were given"),
        (("imdb", "--from", ".", "--out", "x.jsonl"), "there is no data set 'imdb'"),
        (
            ("cola", "--from", ".", "--text-column", "t", "--out", "x.jsonl"),
            "cola is a data set, whose columns are known",
        ),
        (("a.csv", "--out", "x.jsonl"), "there is no file a.csv"),
        (("cola", "--from", "none", "--out", "x.jsonl"), "there is no folder none"),
        (("a.csv", "--from", ".", "--text-column", "t", "--out", "x.jsonl"), "--from and --hub are for data sets"),
        (("a.csv", "--text-column", "t", "--pair-column", "t", "--out", "x.jsonl"), "the column t was given twice"),
        (("cola", "--from", ".", "--out", "x.csv"), "would be JSON Lines under another name"),
        (("cola", "--from", ".", "--out", "no/x.jsonl"), "there is no folder no"),
    ],
)
def test_words_that_make_no_sense(words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    refused(call("data", *words), 2, message)
    assert not list(tmp_path.iterdir())

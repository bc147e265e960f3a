"""A recipe in full and quick, where its data comes from, and reasons for figures."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.kinds.attacks import AttackRecipe
from milkglass.experiments.kinds.classification import ClassificationRecipe
from milkglass.experiments.recipe import read_settings, reason_for
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.reproduce import RECIPE_CLASSES
from milkglass.experiments.runs import newest_metrics_text
from tests.experiments.running import figures as figures_of
from tests.experiments.test_recipes import ALL, RUN, result_of, shipped

BASE = """kind = "attacks"
paper = "p"
model = "m"
seed = 1
private = "a.txt"
rows = 100
attacks = ["knn"]
[public]
one = ["rest"]
two = ["b.txt"]
[variants.x]
k = 4
epsilon = 1.0
[variants.y]
k = 8
epsilon = 1.0
[published]
"f, x" = 1.5
"f, y" = 2.5
[asked]
"f, x" = "at least 1"
"""


def recipe(folder: Path, more: str = "", base: str = BASE) -> Path:
    path = folder / "r.toml"
    path.write_text(base + more, "utf-8")
    return path


def test_quick_is_laid_over(tmp_path: Path) -> None:
    path = recipe(tmp_path, '[quick]\nrows = 9\nvariants = ["y"]\npublic.two = ["c.txt"]\n')
    full, quick = read_settings(path), read_settings(path, quick=True)
    assert "quick" not in full
    assert full == {**tomllib.loads(BASE), "name": "r"}
    assert quick["name"] == "r.quick"
    assert quick["rows"] == 9
    assert quick["variants"] == {"y": {"k": 8, "epsilon": 1.0}}
    assert quick["public"] == {"one": ["rest"], "two": ["c.txt"]}
    assert quick["published"] == full["published"]
    assert "asked" not in quick  # it holds for the full run
    assert quick["quick"] == {"rows": 9, "variants": ["y"], "public": {"two": ["c.txt"]}}
    assert {key: quick[key] for key in ("kind", "seed", "private")} == {
        key: full[key] for key in ("kind", "seed", "private")
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", r"r\.toml .*\[quick\]"),
        ("[quick]\nseed = 2\n", r"\[quick\] .*change seed"),
        ('[quick.published]\n"f, x" = 9.0\n', r"\[quick\] .*change published"),
        ('[quick]\nprivate = "other.txt"\n', r"\[quick\] .*change private"),
        ('[quick]\nvariants = ["z"]\n', r"\[quick\] .*'z'.*variants"),
    ],
)
def test_quick_settings_that_cannot_be(more: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read_settings(recipe(tmp_path, more), quick=True)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("kind = ", r"r\.toml .*TOML"),
        (BASE.replace("seed = 1\n", ""), "no seed"),
        ("rowz = 3\n" + BASE, "no rowz"),
    ],
)
def test_a_file_that_is_no_recipe(base: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        AttackRecipe.read(recipe(tmp_path, base=base))
    with pytest.raises(UsageError, match=r"no recipe .*other\.toml"):
        read_settings(tmp_path / "other.toml")


def test_a_training_that_cannot_be_is_told_in_words(tmp_path: Path) -> None:
    base = 'kind = "classification"\npaper = "p"\nmodel = "m"\nseed = 1\n[variants.plain]\n'
    base += '[data]\nvalidation = "b"\ntrain = "a"\n'
    with pytest.raises(UsageError, match=r"training: batch_size: .*\b1\b"):
        ClassificationRecipe.read(recipe(tmp_path, "[training]\nbatch_size = 0\n", base))
    assert ClassificationRecipe.read(recipe(tmp_path, "", base)).training.num_labels == 2
    assert (
        ClassificationRecipe.read(recipe(tmp_path, "", base.replace('"a"', '"ag_news:train"'))).training.num_labels == 4
    )


READERS: dict[str, Any] = dict(RECIPE_CLASSES)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_shipped_recipe_has_a_quick_setting(path: Path) -> None:
    kind = tomllib.loads(path.read_text("utf-8"))["kind"]
    full, quick = READERS[kind].read(path), READERS[kind].read(path, quick=True)
    assert (full.name, quick.name) == (path.stem, f"{path.stem}.quick")
    assert full.quick is None and quick.quick
    assert quick.published == full.published and quick.paper == full.paper
    if kind == "comparison":
        assert set(quick.defences) <= set(full.defences) and len(quick.seeds) in (
            1,
            8,
        )  # figures that depend on the key have eight
        assert all(entry.get("rows", 10_000) <= 10_000 for entry in quick.data.values())
        return
    if kind in ("gradients", "shared-training"):
        assert set(quick.defences) <= set(full.defences) and quick.model.startswith("demo:")
        return
    if kind == "attacks":
        assert quick.rows <= 2000
    elif kind in ("classification", "generation"):
        assert quick.training.max_steps is not None and quick.training.max_steps <= 200
    if kind not in ("bilstm", "overhead"):
        assert set(quick.variants) <= set(full.variants) and quick.seed == full.seed


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_published_figure_of_a_shipped_recipe_has_a_reason(path: Path) -> None:
    """Of a quick run; a full one is of the paper's own model, or has the reasons as well."""
    recipe = RECIPE_CLASSES[tomllib.loads(path.read_text("utf-8"))["kind"]].read(path, quick=True)
    assert all(reason_for(name, recipe.why) for name in recipe.published)
    if not recipe.quick or not str(tomllib.loads(path.read_text("utf-8"))["model"]).startswith("hf:"):
        full = RECIPE_CLASSES[tomllib.loads(path.read_text("utf-8"))["kind"]].read(path)
        assert all(reason_for(name, full.why) for name in full.published)


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_every_reason_of_a_shipped_recipe_is_about_a_figure(path: Path) -> None:
    quick = result_of(path).name.endswith(".quick.json")
    recipe, measured = (
        RECIPE_CLASSES[tomllib.loads(path.read_text("utf-8"))["kind"]].read(path, quick),
        figures_of(shipped(path)),
    )
    for pattern in recipe.why:
        assert any(reason_for(name, {pattern: "r"}) for name in recipe.published if name in measured), pattern


# --- figures ----------------------------------------------------------------------------------------------------------
def test_figures_stand_beside_what_was_published_and_asked(tmp_path: Path) -> None:
    why = '[why]\n"f, x" = "another model"\n"f, *" = "less data"\n"g, *" = "not of a published figure"\n'
    full = AttackRecipe.read(recipe(tmp_path, why))
    found = full.figures([*f(x=1.23456, y=2.0), ResultRecord(measure="g", value=3.0, variant="y")])
    assert figures_of({"figures": [one.to_json() for one in found]}) == {
        "f, x": {"measured": 1.23, "published": 1.5, "asked": "at least 1", "why": "another model"},
        "f, y": {"measured": 2.0, "published": 2.5, "why": "less data"},
        "g, y": {"measured": 3.0},
    }
    with pytest.raises(UsageError, match="'f, y'"):
        full.figures(f(x=1.0))


def f(**values: float) -> list[ResultRecord]:
    return [ResultRecord(measure="f", value=value, variant=name) for name, value in values.items()]


def test_a_quick_run_may_measure_less_but_for_what_it_is_asked_itself(tmp_path: Path) -> None:
    quick = AttackRecipe.read(recipe(tmp_path, '[quick]\nvariants = ["x"]\n'), quick=True)
    (found,) = quick.figures(f(x=1.0))
    assert (found.value, found.published, found.asked) == (1.0, 1.5, "")
    asked = AttackRecipe.read(recipe(tmp_path, '[quick.asked]\n"f, x" = "some"\n'), quick=True)
    assert asked.figures(f(x=1.0))[0].asked == "some"
    with pytest.raises(UsageError, match=r"r\.quick .*'f, x'"):
        asked.figures(f(y=1.0))


def test_only_a_star_is_a_pattern() -> None:
    assert reason_for("a [b]?, c", {"a [b]?, *": "r"}) == "r"
    assert reason_for("a b!, c", {"a [b]?, *": "r"}) is None
    assert reason_for("a", {"*": "all", "a": "own"}) == "own"


# --- data -------------------------------------------------------------------------------------------------------------
def test_data_by_name_and_by_path(tmp_path: Path) -> None:
    (tmp_path / "cola").mkdir()
    train = tmp_path / "cola" / "train.tsv"
    train.write_text("s\t1\t\tIt works.\ns\t0\t*\tWorks it.\n", "utf-8")
    (tmp_path / "plain.txt").write_text("one\ntwo\n", "utf-8")
    assert data_refs.parse_named_split("cola/train.tsv") is None
    assert [one.label for one in data_refs.load_examples(tmp_path, "cola:train")] == ["acceptable", "unacceptable"]
    assert [one.text for one in data_refs.load_examples(tmp_path, "plain.txt")] == ["one", "two"]
    out = data_refs.rows_file(tmp_path, "cola:train", tmp_path / "run" / "data")
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert rows == [{"text": "It works.", "label": "acceptable"}, {"text": "Works it.", "label": "unacceptable"}]
    assert data_refs.class_numbers("cola:train", ()) == {"unacceptable": 0, "acceptable": 1}  # not by the alphabet
    before = data_refs.file_digests(tmp_path, ["cola:train", "plain.txt"])
    train.write_text("s\t1\t\tIt works!\n", "utf-8")
    after = data_refs.file_digests(tmp_path, ["cola:train", "plain.txt"])
    assert before["plain.txt"] == after["plain.txt"]
    assert before["cola:train"] != after["cola:train"]
    with pytest.raises(UsageError, match="data set 'imdb'"):
        data_refs.load_examples(tmp_path, "imdb:train")
    with pytest.raises(UsageError, match=r"other\.txt"):
        data_refs.file_digests(tmp_path, ["other.txt"])


def test_scores_are_not_trained_as_classes(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t2.5\n", "utf-8")
    with pytest.raises(UsageError, match="stsb .*regression"):
        data_refs.rows_file(tmp_path, "stsb:train", tmp_path / "data")


def test_what_a_worker_told_last(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert newest_metrics_text(tmp_path) == ""
    old = '{"time": 1, "type": "metrics", "message": "step 1 of 9, loss 2.0000", "data": {"step": 1}}\n'
    path.write_text(old + '{"time": 2, "message": "checkpoint at step 1"}\n{"time": 3, "type": "metr', "utf-8")
    assert newest_metrics_text(tmp_path) == "step 1 of 9, loss 2.0000"
    assert newest_metrics_text(tmp_path, len(old)) == ""


def test_measures_of_a_data_set_come_from_the_models_own_answers(tmp_path: Path) -> None:
    """A tiny classifier: what is counted is what the model says, padded batches and all."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from milkglass.experiments.kinds.classification import predicted_classes
    from milkglass.metrics.glue import MEASURES
    from tests import tiny
    from tests.server.kit import rows_file

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny.save("bert", tmp_path / "base"), num_labels=2
    ).eval()
    model.save_pretrained(tmp_path / "tuned")
    draw = np.random.default_rng(0)
    rows = [draw.integers(5, 300, size).tolist() for size in draw.integers(3, 20, 150)]
    with torch.inference_mode():
        logits = torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])
    own = (logits[:, 1] - logits[:, 0]).numpy()
    truth = draw.integers(0, 2, len(rows))
    (tmp_path / "v.safetensors").write_bytes(rows_file(rows, truth.tolist()))
    guess, labels = predicted_classes(tmp_path / "tuned", tmp_path / "v.safetensors", 64)
    assert np.array_equal(labels, truth)
    assert np.array_equal(guess, (own > 0).astype(int))
    assert MEASURES["accuracy"](guess, labels, draw).value == pytest.approx(float(((own > 0) == truth).mean()))

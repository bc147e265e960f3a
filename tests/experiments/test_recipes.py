"""Recipes: the shipped ones are well-formed, and a small one runs end to end with the server's own worker."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from milkglass.errors import UsageError
from milkglass.experiments.__main__ import run
from milkglass.experiments.attacks import AttackRecipe
from milkglass.experiments.attacks import split as split_texts
from milkglass.experiments.recipe import Recipe
from tests import tiny

FOLDER = Path(__file__).parents[2] / "recipes"
ALL = sorted(FOLDER.glob("*.toml"))
ATTACKS = [path for path in ALL if tomllib.loads(path.read_text("utf-8"))["kind"] == "attacks"]
TRAININGS = [path for path in ALL if path not in ATTACKS]


def shipped(path: Path) -> dict[str, Any]:
    return json.loads((path.parent / "results" / f"{path.stem}.json").read_text("utf-8"))


def test_no_result_is_left_of_a_recipe_that_is_gone() -> None:
    assert {path.stem for path in (FOLDER / "results").glob("*.json")} == {path.stem for path in ALL}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_shipped_recipe_opens_with_its_command(path: Path) -> None:
    first = path.read_text("utf-8").splitlines()[0]
    assert first.startswith(f"# python -m milkglass.experiments recipes/{path.name} ")


@pytest.mark.parametrize("path", TRAININGS, ids=lambda path: path.stem)
def test_a_shipped_result_is_of_the_recipe_as_it_stands(path: Path) -> None:
    recipe, result = Recipe.read(path), shipped(path)
    assert recipe.variants["plain"] == {}
    assert len(recipe.variants) > 1
    assert result["seed"] == recipe.seed
    assert result["training"] == recipe.training.model_dump()
    assert result["variants"] == {name: dict(parameters) for name, parameters in recipe.variants.items()}


@pytest.mark.parametrize("path", ATTACKS, ids=lambda path: path.stem)
def test_a_shipped_result_is_of_the_attack_recipe_as_it_stands(path: Path) -> None:
    recipe, result = AttackRecipe.read(path), shipped(path)
    for name in ("model", "seed", "private", "rows", "order"):
        assert result[name] == getattr(recipe, name)
    assert result["attacks"] == list(recipe.attacks)
    assert result["public"] == {who: list(names) for who, names in recipe.public.items()}
    assert result["variants"] == {name: dict(one) for name, one in recipe.variants.items()}
    for name, words in recipe.asked.items():
        assert result["figures"][name]["asked"] == words
    for name, value in recipe.published.items():
        assert result["figures"][name]["published"] == value


def write_recipe(folder: Path, kind: str) -> Path:
    model = tiny.save("bert" if kind == "classification" else "llama-tied", folder / "base")
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(tiny.TEXTS * 2)]
    if kind == "generation":
        rows = [{"instruction": text, "input": "", "output": text[:20]} for text in tiny.TEXTS]
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = folder / "small.toml"
    path.write_text(
        f"""
kind = "{kind}"
paper = "none"
model = "{model}"
seed = 3
[data]
train = "train.jsonl"
validation = "validation.jsonl"
[training]
max_steps = 2
batch_size = 4
lora_rank = 4
full_first = 1
full_last = 0
[evaluation]
answers = 2
new_tokens = 3
[variants.plain]
[variants.obfuslm]
k = 4
epsilon = 1.0
beta = 0.9
[published]
"accuracy loss" = 2.91
"""
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "generation"])
def test_a_recipe_runs_and_goes_on_where_it_stopped(kind: str, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, kind)
    assert run(path, tmp_path, tmp_path / "run", at_once=2) == 0
    first = json.loads((tmp_path / "run" / "result.json").read_text())
    assert run(path, tmp_path, tmp_path / "run", at_once=2) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == first
    path.write_text(path.read_text().replace("k = 4", "k = 5"))
    with pytest.raises(UsageError, match="a run of other settings"):
        run(path, tmp_path, tmp_path / "run", at_once=2)
    names = set(first["figures"])
    if kind == "classification":
        knn = {f"knn {over}{top}" for over in ("", "running ") for top in ("top-1", "top-3")}
        assert names == {"accuracy, plain", "accuracy, obfuslm", "accuracy loss"} | knn
        assert first["figures"]["accuracy loss"]["published"] == 2.91
    else:
        assert names == {
            f"{what}, {variant} {when}"
            for what in ("loss", "rouge-1")
            for variant in ("plain", "obfuslm")
            for when in ("before", "after")
        }


def test_a_small_attack_recipe_runs_and_goes_on(tmp_path: Path) -> None:
    model = tiny.save("bert", tmp_path / "base")
    texts = [f"{text} {number}" for number in range(8) for text in tiny.TEXTS]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", "utf-8")
    path = tmp_path / "small.toml"
    path.write_text(
        f"""
kind = "attacks"
paper = "none"
model = "{model}"
seed = 3
private = "texts.txt"
rows = 20
attacks = ["knn", "cluster-solve", "matching", "decipherment"]
curve = true
[public]
same = ["rest"]
[variants."k=4"]
k = 4
epsilon = 1.0
beta = 0.9
[asked]
"tokens top-1, decipherment, same, k=4" = "at least 1"
""",
        "utf-8",
    )
    assert run(path, tmp_path, tmp_path / "out", 1) == 0
    figures = json.loads((tmp_path / "out" / "small.json").read_text("utf-8"))["figures"]
    solved = figures["tokens top-1, decipherment, same, k=4"]
    assert solved["asked"] == "at least 1"
    assert solved["measured"] > figures["tokens top-1, knn, model only, k=4"]["measured"]
    assert [name for name in figures if name.startswith("content, same, k=4, after ")]
    again = (tmp_path / "out" / "small.json").stat().st_mtime_ns
    assert run(path, tmp_path, tmp_path / "out", 1) == 0
    assert (tmp_path / "out" / "small.json").stat().st_mtime_ns > again


def test_a_private_text_is_never_public(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(f"text {i}" for i in range(50)) + "\n", "utf-8")
    recipe = AttackRecipe("r", "", "", 1, "texts.txt", 20, "random", {"same": ["rest"]}, [], {}, {}, {})
    private, public = split_texts(recipe, tmp_path)
    assert len(private) == 20
    assert len(public["same"]) == 30
    assert not {one.text for one in private} & {one.text for one in public["same"]}
    with pytest.raises(UsageError, match="50 private rows of 50 leave no rest"):
        split_texts(replace(recipe, rows=50), tmp_path)

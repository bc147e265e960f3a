"""Recipes: the shipped ones are well-formed, and a small one runs end to end with the server's own worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milkglass.errors import UsageError
from milkglass.experiments.__main__ import run
from milkglass.experiments.recipe import Recipe
from tests import tiny

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_opens_with_its_command(path: Path) -> None:
    first = path.read_text("utf-8").splitlines()[0]
    assert first.startswith(f"# python -m milkglass.experiments recipes/{path.name} ")
    recipe = Recipe.read(path)
    assert recipe.variants["plain"] == {}
    assert len(recipe.variants) > 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_result_is_of_the_recipe_as_it_stands(path: Path) -> None:
    recipe = Recipe.read(path)
    result = json.loads((path.parent / "results" / f"{path.stem}.json").read_text("utf-8"))
    assert result["seed"] == recipe.seed
    assert result["training"] == recipe.training.model_dump()
    assert result["variants"] == {name: dict(parameters) for name, parameters in recipe.variants.items()}


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

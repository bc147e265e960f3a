from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from milkglass.client.training_request import training_defaults

RECIPE = tomllib.loads((Path(__file__).parents[2] / "recipes" / "training_defaults.toml").read_text("utf-8"))


@pytest.mark.parametrize("data", [*RECIPE["data"]])
def test_the_grid_measures_the_default(data: str) -> None:
    rows = RECIPE["data"][data]["rows"]
    measured = RECIPE["training"] | RECIPE["defences"]["the default"]["training"]
    ours = training_defaults("classification", rows, {}, has_validation=False)
    assert ours == {name: measured[name] for name in ("learning_rate", "warmup_ratio", "n_epochs")}


@pytest.mark.parametrize(("rows", "epochs"), [(10, 10), (320, 10), (500, 7), (1000, 4), (1100, 3), (10**6, 3)])
def test_few_rows_have_more_epochs(rows: int, epochs: int) -> None:
    assert training_defaults("classification", rows, {}, has_validation=True)["n_epochs"] == epochs


def test_what_is_given_stands() -> None:
    given = {"n_epochs": 2.0, "learning_rate": None, "batch_size": 8}
    ours = training_defaults("classification", 1000, given, has_validation=False)
    assert (ours["n_epochs"], ours["learning_rate"], ours["batch_size"]) == (2.0, 1e-4, 8)
    assert "early_stopping" not in ours
    assert training_defaults("causal-lm", 1000, given, has_validation=True) == {"n_epochs": 2.0, "batch_size": 8}

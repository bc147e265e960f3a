"""docs/flower.md: what a user copies is what the app has."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from milkglass.federated import app
from milkglass.federated.site import FederatedTraining

PAGE = (Path(__file__).parents[2] / "docs" / "flower.md").read_text("utf-8")
OWN = {"model", "out", "classes", "sites", "seed"}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_module_names_what_there_is() -> None:
    (code,) = blocks("python")
    tree = ast.parse(code)
    (imported,) = [one for one in tree.body if isinstance(one, ast.ImportFrom)]
    assert imported.module == app.__name__
    assert all(callable(getattr(app, one.name)) for one in imported.names)
    made = {one.targets[0].id: one.value.func.id for one in tree.body if isinstance(one, ast.Assign)}  # type: ignore[attr-defined]
    assert made == {"client": "client_app", "server": "server_app"}, (
        "each on a line of its own: Flower reads the source"
    )


def test_the_configuration_is_one_that_the_server_takes() -> None:
    project, superlink = (tomllib.loads(one) for one in blocks("toml"))
    flower = project["tool"]["flwr"]["app"]
    assert flower["components"] == {"serverapp": "milkglass_app:server", "clientapp": "milkglass_app:client"}
    config = flower["config"]
    training = {name: one for name, one in config.items() if name not in OWN}
    assert {*training} <= {one.name for one in fields(FederatedTraining)} and FederatedTraining(**training)
    assert {"model", "out", "classes", "sites"} <= {*config}
    address = superlink["superlink"][superlink["superlink"]["default"]]["address"]
    assert address.startswith("127.0.0.1:") and PAGE.count(address) == 3
    assert f"--port {address.rpartition(':')[2]}" in PAGE


@pytest.mark.parametrize("words", ["federated prepare", "federated audit"])
def test_options_of_commands_exist(words: str) -> None:
    from tests.cli.kit import call

    (line,) = re.findall(rf"^milkglass {words} .*$", PAGE, re.MULTILINE)
    shown = call(*words.split(), "--help").stdout
    assert all(option in shown for option in re.findall(r"--[a-z]+", line))

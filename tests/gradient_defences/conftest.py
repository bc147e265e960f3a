"""Tiny models whose gradients are shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from milkglass.threat.training_step import SharedStep, Task
from tests import tiny
from tests.gradient_defences.kit import CASES


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in {name for name, _ in CASES}:
        tiny.save(name, root / name)
    return root


@pytest.fixture(params=CASES, ids="-".join)
def step(request: pytest.FixtureRequest, home: Path) -> SharedStep:
    name, task = request.param
    return SharedStep.open(home / name, task)


@pytest.fixture
def bert(home: Path) -> SharedStep:
    task: Task = "classification"
    return SharedStep.open(home / "bert", task)

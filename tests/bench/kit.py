"""Programs of bench/, which are no package: loaded as they are run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parents[2] / "bench"


def program(name: str) -> ModuleType:
    made = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module

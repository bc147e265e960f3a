"""The literal programs of reference/, which are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "reference"


def literal(name: str) -> Any:
    """reference/NAME.py as a module."""
    label = f"reference_{name}"
    if label not in sys.modules:
        spec = importlib.util.spec_from_file_location(label, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[label] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[label])
    return sys.modules[label]

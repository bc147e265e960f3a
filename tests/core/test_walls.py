"""The walls of the house (docs/design.md): dependencies point inward."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "milkglass"
ROOMS = {  # a room (or file), and what it must not import
    "server": ("client", "schemes", "sanitizers", "encoders", "attacks", "cli", "demo", "experiments"),
    "attacks": (
        *("client", "schemes", "sanitizers", "encoders", "defence", "defences"),
        *("server", "cli", "demo", "experiments", "truth", "audit"),
    ),
    "threat.py": (
        "client",
        "schemes",
        "sanitizers",
        "server",
        "attacks",
        "truth",
        "metrics",
        "audit",
        "cli",
        "experiments",
    ),
    "schemes": ("client", "server", "attacks", "cli", "demo", "experiments", "architectures", "models"),
    "architectures": ("client", "schemes", "server", "attacks", "cli", "demo", "experiments"),
    "datasets": ("server", "attacks", "schemes", "cli", "demo", "experiments"),
    "sanitizers": ("client", "server", "attacks", "schemes", "cli", "demo", "experiments"),
    "encoders": ("server", "attacks", "schemes", "sanitizers", "cli", "demo", "experiments", "audit"),
    "gradients": (
        *("client", "schemes", "sanitizers", "server", "attacks", "cli", "demo", "experiments", "audit", "federated"),
        *("defence", "defences"),
    ),
    "federated": ("schemes", "encoders", "server", "attacks", "cli", "demo", "experiments", "defence", "defences"),
    "defence.py": ("client", "schemes", "sanitizers", "encoders", "server", "attacks", "cli", "experiments"),
    "split": ("attacks", "schemes", "sanitizers", "cli", "demo", "experiments"),
    "metrics": ("client", "server", "attacks", "schemes", "cli", "demo", "experiments"),
    "client": ("server.app", "server.training", "attacks", "cli", "demo", "experiments"),
    "accounting.py": ("client", "schemes", "encoders", "gradients", "server", "attacks", "cli", "experiments"),
    "checkpoint.py": ("client", "schemes", "server", "attacks", "architectures", "cli"),
    "tensorheader.py": ("client", "schemes", "server", "attacks", "architectures", "cli", "checkpoint"),
    "tensorfile.py": ("client", "schemes", "server", "attacks", "architectures", "cli", "checkpoint"),
    "staging.py": ("client", "schemes", "server", "attacks", "architectures", "cli"),
    "errors.py": ("",),
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("milkglass.") for name in found if name.split(".")[0] == "milkglass"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_nothing_from_outside_its_walls(room: str) -> None:
    place = SOURCE / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    for path in files:
        used = imports(path)
        bad = {n for n in used for wall in ROOMS[room] if n == wall or n.startswith(wall + ".") or wall == ""}
        assert not bad, f"{path.relative_to(SOURCE)} imports {sorted(bad)}"


def test_no_scheme_names_a_model() -> None:
    names = ("bert", "llama", "gpt2", "mistral", "qwen", "gemma", "model_type")
    for path in (SOURCE / "schemes").glob("*.py"):
        text = path.read_text("utf-8").lower()
        assert not [name for name in names if name in text.replace("invbert", "")], path.name


def test_the_literal_programs_import_nothing_of_milkglass() -> None:
    for path in (SOURCE.parents[1] / "reference").glob("*.py"):
        if path.name != "write_vectors.py":
            assert not imports(path), path.name


def test_nothing_unsafe_is_called() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text("utf-8")
        assert "import pickle" not in text
        assert "trust_remote_code=True" not in text


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, milkglass.cli.main; print(','.join(m for m in ('torch', 'transformers') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""

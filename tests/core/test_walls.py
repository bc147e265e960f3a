"""The walls of the house (docs/design.md): dependencies point inward, and each room names what it may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "milkglass"

# A room, or a file of the root, and the rooms that it may import. A file of the root that imports only errors.py may be
# imported by every room: GROUND.
GROUND = {
    *("accounting", "catalogue", "deadline", "errors", "files", "papers", "parameters", "progress", "sequences"),
    *("system", "unique_keys", "extras", "plots", "device"),
}
ALLOWED = {
    "models": "",
    "rows": "",
    "noise": "",
    "metrics": "",
    "nearest": "",
    "schemes": "nearest",
    "threat": "metrics models noise",
    "sanitizers": "metrics models nearest noise rows",
    "gradient_defences": "noise threat",
    "hidden_states": "models noise rows threat",
    "attacks": "models nearest noise threat",
    "client": "models noise rows schemes server.spec",
    "server": "models threat",
    "defences": "client hidden_states models noise sanitizers schemes threat",
    "federated": "gradient_defences models noise rows sanitizers threat",
    "audit": (
        "attacks client defences federated gradient_defences hidden_states metrics models rows sanitizers schemes"
        " threat"
    ),
    "engines": "client models",
    "attest": "server",
    "proxy": "attest client engines rows server",
    "monitor": "attacks audit client models proxy rows threat",
    "enclave": "attest client models noise rows sanitizers",
    "split": "attest audit client defences enclave hidden_states metrics models noise rows server threat",
    "experiments": (
        "attacks audit client defences enclave gradient_defences hidden_states metrics models noise rows sanitizers"
        " schemes server server.spec threat"
    ),
    "compare": ("attacks audit client defences experiments metrics models rows sanitizers server server.spec threat"),
    "demo": "audit metrics models",
    "cli": (
        "attacks attest audit client compare demo enclave engines experiments federated gradient_defences hidden_states"
        " lab metrics models monitor proxy rows sanitizers schemes server server.spec split threat"
    ),
    "lab": (
        "attacks audit client compare defences engines gradient_defences hidden_states models noise sanitizers schemes"
        " threat"
    ),
    "__init__": "audit client models proxy rows schemes",
}
# Files of an allowed room that a room must not import all the same.
DENIED = {
    "attacks": {"threat.truth", "threat.defence"},  # an attack neither grades itself nor holds a defence
}
GAME = {"threat.attack", "threat.guess", "threat.knowledge", "threat.observations"}  # import neither truth nor metrics
SUBROOMS = (
    "attacks",
    "client",
    "server",
    "models",
    "audit",
    "sanitizers",
    "experiments",
)  # whose folders form no circle


def imports(path: Path) -> set[str]:
    """Full names that a file imports of milkglass, without that word."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("milkglass.") for name in names if name.split(".")[0] == "milkglass"}


def room_of(name: str) -> str:
    """server/spec.py is the contract of client and server, and a room by itself here."""
    return "server.spec" if f"{name}.".startswith("server.spec.") else name.split(".")[0]


def files_of(room: str) -> list[Path]:
    folder = SOURCE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{room}.py"]


def module_of(name: str) -> str:
    """The module of an imported name, by its path without a suffix."""
    parts = name.split(".")
    while parts and not (SOURCE.joinpath(*parts).is_dir() or SOURCE.joinpath(*parts).with_suffix(".py").is_file()):
        parts.pop()
    return "/".join(parts)


def denied(name: str, refused: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{one}.") for one in refused)


@pytest.mark.parametrize("room", DENIED)
def test_a_room_imports_no_file_that_is_denied_to_it(room: str) -> None:
    for path in files_of(room):
        bad = {name for name in imports(path) if denied(name, DENIED[room])}
        assert not bad, f"{path.relative_to(SOURCE)} imports {sorted(bad)}"


@pytest.mark.parametrize("name", sorted(GAME))
def test_what_an_attack_uses_of_the_game_knows_no_truth(name: str) -> None:
    names = imports(SOURCE.joinpath(*name.split(".")).with_suffix(".py"))
    assert not {one for one in names if denied(one, {"threat.truth", "threat.defence", "metrics"})}


def test_the_walls_see_an_import_of_the_truth(tmp_path: Path) -> None:
    for line in (
        "from milkglass.threat.truth import Truth",
        "from milkglass.threat import truth",
        "import milkglass.threat.truth",
    ):
        (tmp_path / "x.py").write_text(line + "\n")
        assert any(denied(name, DENIED["attacks"]) for name in imports(tmp_path / "x.py")), line


def test_every_room_has_a_row() -> None:
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms == set(ALLOWED) | GROUND


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_what_its_row_allows_and_no_more(room: str) -> None:
    allowed = set(ALLOWED[room].split())
    used = set()
    for path in files_of(room):
        names = {room_of(name) for name in imports(path)} - {room, "__version__", *([f"{room}.spec"])}
        assert names <= allowed | GROUND, f"{path.relative_to(SOURCE)} imports {sorted(names - allowed - GROUND)}"
        used |= names
    assert allowed <= used, f"{room} need not be allowed {sorted(allowed - used)}"


@pytest.mark.parametrize("name", sorted(GROUND))
def test_the_ground_imports_nothing_above_it(name: str) -> None:
    assert {room_of(one) for one in imports(SOURCE / f"{name}.py")} <= GROUND


def test_no_rooms_form_a_circle() -> None:
    TopologicalSorter({room: set(row.split()) for room, row in ALLOWED.items()}).prepare()  # raises CycleError


def test_no_files_form_a_circle() -> None:
    """Imports for type checkers alone count too: two files that name each other are one conversation."""
    graph = {}
    for path in SOURCE.rglob("*.py"):
        if path.name != "__init__.py":
            own = str(path.relative_to(SOURCE).with_suffix(""))
            graph[own] = {module_of(name) for name in imports(path)} - {own, ""}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("room", SUBROOMS)
def test_no_folders_of_a_room_form_a_circle(room: str) -> None:
    graph: dict[str, set[str]] = {}
    for folder in [path for path in (SOURCE / room).iterdir() if (path / "__init__.py").is_file()]:
        names: set[str] = set()
        for path in folder.rglob("*.py"):
            for name in imports(path):
                parts = name.split(".")
                if parts[0] == room and len(parts) > 2 and (SOURCE / room / parts[1]).is_dir():
                    names.add(parts[1])
        graph[folder.name] = names - {folder.name}
    TopologicalSorter(graph).prepare()


def test_no_scheme_names_a_model() -> None:
    names = ("bert", "llama", "gpt2", "mistral", "qwen", "gemma", "model_type")
    for path in (SOURCE / "schemes").glob("*.py"):
        text = path.read_text("utf-8").lower()
        assert not [name for name in names if name in text.replace("invbert", "")], path.name


def test_no_class_name_has_two_meanings() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: places for name, places in homes.items() if len(places) > 1}


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
    code = (
        "import sys; from milkglass.cli.commands import COMMANDS; [entry.load() for entry in COMMANDS.values()]\n"
        "print(','.join(m for m in ('torch', 'transformers', 'scipy', 'sklearn', 'psutil') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == ""


def test_private_files_and_folders_are_made_in_one_place() -> None:
    """Modes are bits of files.py; a script of the enclave's must be executable, and an open token is closed."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and node.value in (0o600, 0o700):
                written = ast.get_source_segment(text, node) or ""
                found |= {(path.relative_to(SOURCE).as_posix(), written)} if written.startswith("0o") else set()
            if isinstance(node, ast.Attribute) and node.attr == "O_EXCL":
                found.add((path.relative_to(SOURCE).as_posix(), node.attr))
    elsewhere = {one for one in found if one[0] != "files.py"}
    assert elsewhere == {("enclave/folder.py", "0o700"), ("server/settings.py", "0o600")}
    assert ("files.py", "0o700") in found and ("files.py", "O_EXCL") in found

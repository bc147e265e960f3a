"""The table of commands, and what the list of commands imports."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from milkglass import cli
from milkglass.cli import commands
from milkglass.cli.commands import COMMANDS
from milkglass.cli.main import app
from milkglass.system import LIBRARY_DEFAULTS

HEAVY = (
    *("torch", "transformers", "numpy", "pyarrow", "jinja2", "scipy", "asyncio"),
    *(f"milkglass.cli.{entry.module}" for entry in COMMANDS.values()),
)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["no-such-command"]])
def test_the_list_of_commands_imports_no_command(words: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['milkglass', *{words}]\nfrom milkglass.cli.main import main\n"
        f"try: main()\nexcept SystemExit: pass\nprint([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_every_command_sets_the_defaults_of_the_libraries_before_they_load(given: dict[str, str]) -> None:
    """Of OpenMP, which PyTorch brings, and oneDNN. A user's own setting stays."""
    code = (
        "import json, os, sys\nfrom milkglass.cli import main\n"
        "main.app = lambda **_: print(json.dumps([dict(os.environ), 'torch' in sys.modules]))\nmain.main()"
    )
    environment = {name: value for name, value in os.environ.items() if name not in LIBRARY_DEFAULTS}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, env=environment | given
    )
    variables, is_torch_loaded = json.loads(done.stdout)
    assert {name: variables[name] for name in LIBRARY_DEFAULTS} == LIBRARY_DEFAULTS | given
    assert not is_torch_loaded


@pytest.mark.parametrize("name", COMMANDS)
def test_each_entry_loads_a_command_of_its_name(name: str) -> None:
    command = COMMANDS[name].load()
    assert command.name == name and command.help
    assert hasattr(command, "commands") == COMMANDS[name].is_group


def test_each_line_of_the_list_is_a_whole_summary() -> None:
    lines = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout.splitlines()
    for entry in COMMANDS.values():
        assert any(line.split() == [entry.name, *entry.summary.split()] for line in lines), entry.name


def test_each_file_of_a_command_is_in_the_table() -> None:
    """A file is in the table, or another file of the room imports it."""
    folder = Path(inspect.getfile(cli)).parent
    texts = {path.stem: path.read_text("utf-8") for path in folder.glob("*.py")}
    listed = {entry.module for entry in COMMANDS.values()} | {"__init__", "main"}
    assert not [
        name
        for name in texts.keys() - listed
        if not any(re.search(rf"milkglass\.cli(\.| import ){name}\b", text) for text in texts.values())
    ]


def test_a_wrong_name_is_told_the_nearest_one() -> None:
    result = CliRunner().invoke(app, ["obfuscat"])
    assert result.exit_code == 2 and "obfuscate" in result.stderr


def test_a_command_that_lacks_a_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(commands, "import_module", lacking)
    monkeypatch.setattr(commands.LazyCommands, "__getitem__", lambda self, name: COMMANDS[name].load())
    result = CliRunner().invoke(app, ["audit"])
    assert result.exit_code == 2 and "audit needs torch" in result.stderr and "milkglass[audit]" in result.stderr


def test_a_fault_of_a_commands_module_is_not_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: commands.CommandEntry) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(commands.CommandEntry, "load", faulty)
    monkeypatch.setattr(commands.LazyCommands, "__getitem__", lambda self, name: COMMANDS[name].load())
    result = CliRunner().invoke(app, ["audit"])
    assert isinstance(result.exception, KeyError)

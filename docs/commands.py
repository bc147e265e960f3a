"""Fills the table of commands in cli.md from what --help says of each. `make figures` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import typer.main

from milkglass.cli.main import app

PAGE = Path(__file__).with_name("cli.md")
BEGIN, END = "<!-- commands -->\n", "<!-- end commands -->"


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """Yields each command without subcommands: its name, and the first paragraph of its help on one line."""
    below = getattr(command, "commands", None)
    if below is None:
        yield name, " ".join((command.help or "").split("\n\n")[0].split())
        return
    for word, one in below.items():
        yield from leaves(one, f"{name} {word}".strip())


def commands() -> str:
    """Returns the table."""
    lines = ["| command | what it does |", "|---|---|"]
    for name, text in leaves(typer.main.get_command(app), ""):
        lines.append(f"| `{name}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """Returns the page with the commands of today."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + commands() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")

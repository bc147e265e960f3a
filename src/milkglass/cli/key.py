"""`milkglass key status`: what a key file is for, and how much of its budget is spent."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from milkglass.cli.options import AsJson
from milkglass.cli.terminal import emit, moment, table
from milkglass.client import usage
from milkglass.errors import KeyFileError

NEVER = "no audit yet: `milkglass audit` measures after how much text an attacker reads how much"
FRESH = "every text under one key is a piece of the same cipher; give the next job a new key, or less text"

keys = typer.Typer(help="Look after a key file.", no_args_is_help=True)


@keys.callback()
def group() -> None:
    """Look after a key file."""


@keys.command()
def status(
    key: Annotated[Path, typer.Argument(help="The key file. Its passphrase is not needed.")], as_json: AsJson = False
) -> None:
    """How much text was encoded under a key on this machine, and what audits say that this gives away."""
    if not key.is_file():
        raise KeyFileError(f"there is no key file at {key}", "give the file that `milkglass obfuscate` wrote")
    from milkglass.client.key import require_key_file

    require_key_file(key)
    used = usage.read(key)
    passed = [{"attacker": who, "share": share, "tokens": tokens} for who, share, tokens in used.passed()]
    emit(as_json, {"key": str(key), **asdict(used), "passed": passed}, lambda: words(used))


def words(used: usage.Usage) -> str:
    lines = [f"encoded under this key, on this machine: {used.tokens:,} tokens in {used.texts:,} texts"]
    if not used.audited:
        return "\n".join([*lines, NEVER])
    lines.append(f"last audit: {moment(used.audited)}")
    rows: list[tuple[str, ...]] = [("attacker", "reads of the content tokens", "within", "")]
    for who, shares in used.spent.items():
        for share, tokens in shares.items():
            rows.append((who, share, f"{tokens:,} tokens", "passed" if used.tokens >= tokens else ""))
    none = (
        f"with up to {used.measured:,} tokens no attacker of an audit read 10 % of the content; more was not measured"
    )
    lines.append(table(rows) if len(rows) > 1 else none)
    if used.tokens > used.measured:
        lines.append(f"audits went up to {used.measured:,} tokens: more is encoded by now, audit again")
    return "\n".join([*lines, *warning(used)])


def warning(used: usage.Usage) -> list[str]:
    """What to say when the budget that audits measured is spent."""
    return [
        f"warning: at {tokens:,} tokens the attacker with {who} reads {share} of what carries content; {FRESH}"
        for who, share, tokens in used.passed()
    ]


def register(app: typer.Typer) -> None:
    app.add_typer(keys, name="key")

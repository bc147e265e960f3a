"""Checks of an audit before anything large is imported or read."""

from __future__ import annotations

from pathlib import Path

from milkglass import files
from milkglass.errors import UsageError
from milkglass.threat.budget import Budget


def require_audit(out: Path, budget: str) -> None:
    """Raises UsageError if the audit cannot be written to `out`, would overwrite another, or `budget` is invalid."""
    if (out / "audit.json").exists() and not (out / "work").exists():
        raise UsageError(f"{out} holds an audit already", "give another folder with --out, or remove that one first")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, not a folder", "give another --out")
    files.require_writable(out)
    Budget.parse(budget)

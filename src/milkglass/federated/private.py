"""Folders and files of a run, closed to others. What this module does not know: what is in them."""

from __future__ import annotations

from pathlib import Path


def folder(path: Path) -> None:
    """The folder and those above it that are missing, mode 0700: `mkdir(parents=True)` leaves those above it open."""
    if not path.is_dir():
        folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def closed(path: Path) -> Path:
    """A file that a library wrote with a mode of its own: 0600."""
    path.chmod(0o600)
    return path

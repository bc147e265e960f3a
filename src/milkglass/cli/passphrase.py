"""Where the passphrase comes from: --passphrase-file, then $MILKGLASS_PASSPHRASE, then a prompt. Never an argument:
arguments stand in the shell's history and in the list of processes.
"""

from __future__ import annotations

import os
from pathlib import Path

from milkglass.cli.terminal import note
from milkglass.errors import UsageError

VARIABLE = "MILKGLASS_PASSPHRASE"
ATTEMPTS = 3  # at typing a new passphrase twice alike


def passphrase(file: Path | None, creating: bool = False) -> str:
    """Asked twice when `creating`, until both are the same. Raises UsageError when there is nobody to ask."""
    if file is not None:
        return _from_file(file)
    if given := os.environ.get(VARIABLE):
        return _required(given)
    if not _has_terminal():
        raise UsageError(
            "no passphrase was given, and there is no terminal to ask at",
            f"use --passphrase-file, or set {VARIABLE}",
        )
    import getpass

    if not creating:
        return _required(getpass.getpass("Passphrase of the key: "))
    for left in reversed(range(ATTEMPTS)):
        first = _required(getpass.getpass("New passphrase for the key: "))
        if getpass.getpass("The same again: ") == first:
            return first
        if left:
            note("the two passphrases differ; once more")
    raise UsageError(f"the two passphrases differed {ATTEMPTS} times", "try again, or use --passphrase-file")


def _from_file(file: Path) -> str:
    """The file's first line; a warning when others may read it."""
    if not file.is_file():
        raise UsageError(f"there is no passphrase file {file}", "give a file with the passphrase on its first line")
    if file.stat().st_mode & 0o077:
        note(f"warning: other users may read {file}; run: chmod 600 {file}")
    lines = file.read_text("utf-8").splitlines()
    return _required(lines[0] if lines else "")


def _required(text: str) -> str:
    if not text:
        raise UsageError("the passphrase is empty", "give one of several words: it guards all your fine-tunes")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError("the passphrase is not UTF-8 text", "give it in UTF-8")
    return text


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True

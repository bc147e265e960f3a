"""Gets the passphrase of a key: from --passphrase-file, then $MILKGLASS_PASSPHRASE, then a prompt.

It is never an argument, because the shell's history and the list of processes show arguments. A new passphrase must be
strong, unless the user accepts a weak one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from milkglass import files
from milkglass.cli.ui.terminal import note
from milkglass.errors import UsageError, WrongPassphrase

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey

T = TypeVar("T")
PASSPHRASE_VARIABLE = "MILKGLASS_PASSPHRASE"
ATTEMPTS = 3  # how often a passphrase may be typed until it opens the key, or is strong and typed twice alike
TERMINAL = "/dev/tty"

WeakPassphrase = Annotated[
    bool, typer.Option("--weak-passphrase", help="Take a weak passphrase for a new key, with a warning.")
]
GeneratePassphrase = Annotated[
    bool,
    typer.Option(
        "--generate-passphrase",
        help="Draw ten random words for a new key: written to --passphrase-file, a new file, or shown on the terminal.",
    ),
]


def open_with_passphrase(file: Path | None, open_with: Callable[[str], T]) -> tuple[T, str]:
    """Opens an existing key with its passphrase, and returns both. A wrong one that was typed is asked for again.

    Args:
        file: holds the passphrase on its first line. None: it comes from the environment or a prompt.
        open_with: opens the key with a passphrase. Raises WrongPassphrase.

    Raises:
        UsageError: no passphrase was given, and there is no terminal to ask at.
        WrongPassphrase: the message names the source of the passphrase, unless it was typed.
    """
    import getpass

    passphrase = _given_passphrase(file)
    for attempts_left in reversed(range(ATTEMPTS)):
        attempt = _require_passphrase(getpass.getpass("Passphrase of the key: ")) if passphrase is None else passphrase
        try:
            return open_with(attempt), attempt
        except WrongPassphrase as error:
            if passphrase is not None:
                source = str(file) if file else PASSPHRASE_VARIABLE
                raise WrongPassphrase(f"{error.message} (it was taken from {source})", error.hint) from None
            if not attempts_left:
                raise
            note(f"{error.message}; type it again")
    raise AssertionError("the last attempt returns or raises")


def new_passphrase(file: Path | None, allow_weak: bool = False, generate: bool = False) -> str:
    """Returns the passphrase of a new key. A prompt asks twice, and generates one if nothing is typed.

    Args:
        file: holds the passphrase on its first line; with `generate` it is written there. None: it comes from the
            environment or a prompt, and a generated one is shown on the terminal.
        allow_weak: whether a weak passphrase is taken, with a warning.
        generate: whether the passphrase is drawn at random.

    Raises:
        WeakPassphrase: it is weak.
        UsageError: there is no terminal to ask or show it at, or the file cannot be read or written.
    """
    if generate:
        return _generate(file, allow_weak)
    passphrase = _given_passphrase(file)
    if passphrase is None:
        return _ask_new(allow_weak)
    return _accept_new(passphrase, allow_weak)


def another_passphrase(file: Path | None, generate: bool, key: UnlockedKey) -> str:
    """Returns another passphrase for an open key, or for a part of it. Raises UsageError if it is the old one."""
    new = new_passphrase(file, generate=generate)
    if key.seal.matches(new):
        raise UsageError("the new passphrase is the old one", "give another, or --generate")
    return new


def require_another_source(file: Path | None) -> None:
    """Raises UsageError if the new passphrase would come from the environment, as the old one does.

    It is asked before a key is opened. `file` holds the new passphrase, if there is one.
    """
    if file is None and os.environ.get(PASSPHRASE_VARIABLE):
        raise UsageError(
            f"no new passphrase was given, and {PASSPHRASE_VARIABLE} holds the old one", "give --new-passphrase-file"
        )


def _given_passphrase(file: Path | None) -> str | None:
    """Returns the passphrase from the file or the environment. None: it must be asked for."""
    if file is not None:
        return _from_file(file)
    if passphrase := os.environ.get(PASSPHRASE_VARIABLE):
        return _require_passphrase(passphrase)
    if not _has_terminal():
        raise UsageError(
            "no passphrase was given, and there is no terminal to ask at",
            f"use --passphrase-file, or set {PASSPHRASE_VARIABLE}",
        )
    return None


def _ask_new(allow_weak: bool) -> str:
    """Asks for a new passphrase until one is accepted and typed twice alike. Raises UsageError after ATTEMPTS."""
    import getpass

    from milkglass.client.key.passphrases import weakness

    fault = advice = ""
    for _ in range(ATTEMPTS):
        if fault:
            note(f"{fault}{advice}")
        entered = getpass.getpass("New passphrase for the key (empty: generate one): ")
        if not entered:
            return _show_passphrase()
        weakness_found = None if allow_weak else weakness(_require_passphrase(entered))
        if weakness_found is not None:
            fault, advice = weakness_found, "; use four or more unrelated words, or press Enter for a generated one"
        elif getpass.getpass("The same again: ") != entered:
            fault, advice = "the two passphrases differ", "; type both again"
        else:
            return _accept_new(_require_passphrase(entered), allow_weak)
    raise UsageError(f"{fault}, after {ATTEMPTS} attempts", "try again, or use --generate-passphrase")


def _accept_new(passphrase: str, allow_weak: bool) -> str:
    """Returns the passphrase. Raises WeakPassphrase for a weak one, or with `allow_weak` warns of it."""
    from milkglass.client.key.passphrases import require_strong, weakness

    if not allow_weak:
        require_strong(passphrase)
    elif fault := weakness(passphrase):
        note(f"warning: {fault}")
    return passphrase


def _generate(file: Path | None, allow_weak: bool) -> str:
    """Draws a passphrase, and writes it to the file or shows it on the terminal. Raises UsageError for want of both."""
    if allow_weak:
        raise UsageError("--generate-passphrase and --weak-passphrase exclude each other", "leave one out")
    if file is not None:
        return _write_passphrase(file)
    if os.environ.get(PASSPHRASE_VARIABLE):
        raise UsageError(f"{PASSPHRASE_VARIABLE} is set, so no passphrase is generated", f"unset {PASSPHRASE_VARIABLE}")
    if not _has_terminal():
        raise UsageError(
            "there is no terminal to show a generated passphrase on",
            "use --passphrase-file FILE: the passphrase is written to it",
        )
    return _show_passphrase()


def _write_passphrase(file: Path) -> str:
    """Generates a passphrase and writes it to a new file of mode 0600."""
    from milkglass.client.key.passphrases import generate_passphrase

    passphrase = generate_passphrase()
    try:
        files.write(file, passphrase + "\n", replace=False)
    except FileExistsError:
        raise UsageError(
            f"{file} exists already",
            "give a new file, or leave --generate-passphrase out to use the passphrase in this one",
        ) from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror})", "give a file in a folder of yours") from None
    note(f"a passphrase was generated and written to {file}: keep a copy of it away from the key")
    return passphrase


def _show_passphrase() -> str:
    """Generates a passphrase and shows it on the terminal only: standard error may be a log."""
    from milkglass.client.key.passphrases import generate_passphrase

    passphrase = generate_passphrase()
    _show(f"The passphrase of the new key, write it down now:\n\n  {passphrase}\n\n")
    return passphrase


def _show(text: str) -> None:
    with open(os.open(TERMINAL, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8") as terminal:  # noqa: PTH123
        terminal.write(text)


def _from_file(file: Path) -> str:
    """Returns the file's first line, with a warning if others may read the file."""
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} is not a regular file", "write the passphrase into a file, on its first line")
    if not file.is_file():
        raise UsageError(f"there is no passphrase file {file}", "give a file with the passphrase on its first line")
    if file.stat().st_mode & 0o077:
        note(f"warning: other users may read {file}; run: chmod 600 {file}")
    lines = file.read_text("utf-8").splitlines()
    return _require_passphrase(lines[0] if lines else "")


def _require_passphrase(text: str) -> str:
    """Returns the passphrase. Raises UsageError if it is empty or not UTF-8 text."""
    if not text:
        raise UsageError("the passphrase is empty", "give one of several words: it guards all your fine-tunes")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError("the passphrase is not UTF-8 text", "give it in UTF-8")
    return text


def _has_terminal() -> bool:
    try:
        os.close(os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True

"""Gets the passphrase of a key: from --passphrase-file, else from $MILKGLASS_PASSPHRASE, else from a prompt.

The passphrase is never an argument, because the shell's history and the list of processes show arguments. A new
passphrase must be strong, unless the user accepts a weak one.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from milkglass import files
from milkglass.cli.ui.terminal import note
from milkglass.errors import UsageError, WrongPassphrase
from milkglass.rows.lines import BYTE_ORDER_MARK

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey

Result = TypeVar("Result")
PASSPHRASE_VARIABLE = "MILKGLASS_PASSPHRASE"
MAX_ATTEMPTS = 3  # how often a passphrase is asked for until it opens the key, or is strong and typed twice alike
TERMINAL_DEVICE = "/dev/tty"

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


def open_with_passphrase(file: Path | None, open_with: Callable[[str], Result]) -> tuple[Result, str]:
    """Opens existing keys with a passphrase. A wrong passphrase that was typed is asked for again.

    Args:
        file: holds the passphrase on its first line. None: it comes from the environment or a prompt.
        open_with: opens the keys with a passphrase. Raises WrongPassphrase.

    Returns:
        What `open_with` returned, and the passphrase.

    Raises:
        UsageError: the file does not exist, the passphrase is empty or not UTF-8, or there is no terminal to ask at.
        WrongPassphrase: the passphrase is wrong. The message names its source, unless it was typed.
    """
    import getpass

    passphrase = _passphrase_without_prompt(file)
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        candidate = (
            _require_passphrase(getpass.getpass("Passphrase of the key: ")) if passphrase is None else passphrase
        )
        try:
            return open_with(candidate), candidate
        except WrongPassphrase as error:
            if passphrase is not None:
                source = str(file) if file else PASSPHRASE_VARIABLE
                raise WrongPassphrase(f"{error.message} (it was taken from {source})", error.hint) from None
            if not attempts_left:
                raise
            note(f"{error.message}; type it again")
    raise AssertionError("the last attempt returns or raises")


def new_passphrase(file: Path | None, allows_weak: bool = False, generate: bool = False) -> str:
    """Returns the passphrase of a new key. A prompt asks twice, and generates a passphrase if nothing is typed.

    Args:
        file: holds the passphrase on its first line; with `generate` it is a new file to write it to. None: the
            passphrase comes from the environment or a prompt, and a generated one is shown on the terminal.
        allows_weak: whether a weak passphrase is taken, with a warning.
        generate: whether the passphrase is drawn at random.

    Raises:
        WeakPassphrase: the passphrase of the file or the environment is weak.
        UsageError: there is no terminal to ask or show it at, the file cannot be read or written, or both `allows_weak`
            and `generate` are set.
    """
    if generate:
        return _generate_passphrase(file, allows_weak)
    passphrase = _passphrase_without_prompt(file)
    if passphrase is None:
        return _ask_new(allows_weak)
    return _accept_new(passphrase, allows_weak)


def another_passphrase(file: Path | None, generate: bool, key: UnlockedKey) -> str:
    """Returns a new passphrase for an open key, or for its codec. Raises UsageError if it is the key's own."""
    passphrase = new_passphrase(file, generate=generate)
    if key.seal.matches(passphrase):
        raise UsageError("the new passphrase is the old one", "give another, or --generate")
    return passphrase


def require_another_source(file: Path | None) -> None:
    """Raises UsageError if the new passphrase would come from the environment, which holds the old one.

    Commands call it before they open a key.

    Args:
        file: holds the new passphrase. None: the environment or a prompt would give it.
    """
    if file is None and os.environ.get(PASSPHRASE_VARIABLE):
        raise UsageError(
            f"{PASSPHRASE_VARIABLE} holds the old passphrase, and no file is named for the new one",
            "give --new-passphrase-file",
        )


def _passphrase_without_prompt(file: Path | None) -> str | None:
    """Returns the passphrase of the file, else of the environment. None: it must be asked for.

    Raises UsageError if it must be asked for and there is no terminal, and what `_read_passphrase_file` raises.
    """
    if file is not None:
        return _read_passphrase_file(file)
    if passphrase := os.environ.get(PASSPHRASE_VARIABLE):
        return _require_passphrase(passphrase)
    if not _has_terminal():
        raise UsageError(
            "no passphrase was given, and there is no terminal to ask at",
            f"use --passphrase-file, or set {PASSPHRASE_VARIABLE}",
        )
    return None


def _ask_new(allows_weak: bool) -> str:
    """Asks for a new passphrase until it is strong enough and typed twice alike. If nothing is typed, generates one.

    Raises UsageError after MAX_ATTEMPTS.
    """
    import getpass

    from milkglass.client.key.passphrases import weakness

    fault = advice = ""
    for _ in range(MAX_ATTEMPTS):
        if fault:
            note(f"{fault}{advice}")
        candidate = getpass.getpass("New passphrase for the key (empty: generate one): ")
        if not candidate:
            return _generate_to_terminal()
        weakness_found = None if allows_weak else weakness(_require_passphrase(candidate))
        if weakness_found is not None:
            fault, advice = weakness_found, "; use four or more unrelated words, or press Enter for a generated one"
        elif getpass.getpass("The same again: ") != candidate:
            fault, advice = "the two passphrases differ", "; type both again"
        else:
            return _accept_new(_require_passphrase(candidate), allows_weak)
    raise UsageError(f"{fault}, after {MAX_ATTEMPTS} attempts", "try again, or use --generate-passphrase")


def _accept_new(passphrase: str, allows_weak: bool) -> str:
    """Returns the passphrase of a new key, and with `allows_weak` warns of a weak one.

    Raises:
        WeakPassphrase: it is weak.
        UsageError: it has letters that nobody sees or types, so that the key would not open by what is seen.
    """
    from milkglass.client.key.passphrases import require_strong, weakness

    if any(letter == BYTE_ORDER_MARK or unicodedata.category(letter) == "Cc" for letter in passphrase):
        raise UsageError(
            "the new passphrase holds a byte order mark or a control character, which nobody can type",
            "save its file as plain UTF-8 without a byte order mark, or type it anew",
        )
    if not allows_weak:
        require_strong(passphrase)
    elif fault := weakness(passphrase):
        note(f"warning: {fault}")
    return passphrase


def _generate_passphrase(file: Path | None, allows_weak: bool) -> str:
    """Generates a passphrase, and writes it to the file, or without a file to the terminal.

    Raises UsageError if weak passphrases are allowed, or if without a file the environment holds a passphrase or there
    is no terminal.
    """
    if allows_weak:
        raise UsageError("--generate-passphrase and --weak-passphrase exclude each other", "leave one out")
    if file is not None:
        return _generate_to_file(file)
    if os.environ.get(PASSPHRASE_VARIABLE):
        raise UsageError(f"{PASSPHRASE_VARIABLE} is set, so no passphrase is generated", f"unset {PASSPHRASE_VARIABLE}")
    if not _has_terminal():
        raise UsageError(
            "there is no terminal to show a generated passphrase on",
            "use --passphrase-file FILE: the passphrase is written to it",
        )
    return _generate_to_terminal()


def _generate_to_file(file: Path) -> str:
    """Generates a passphrase and writes it to a new file of mode 0600. Raises UsageError if that fails."""
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


def _generate_to_terminal() -> str:
    """Generates a passphrase and shows it on the terminal, not on stderr, which may be a log."""
    from milkglass.client.key.passphrases import generate_passphrase

    passphrase = generate_passphrase()
    _write_to_terminal(f"The passphrase of the new key, write it down now:\n\n  {passphrase}\n\n")
    return passphrase


def _write_to_terminal(text: str) -> None:
    """Writes text to the terminal of this process, wherever stdout and stderr go."""
    with open(os.open(TERMINAL_DEVICE, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8") as terminal:  # noqa: PTH123
        terminal.write(text)


def _read_passphrase_file(file: Path) -> str:
    """Returns the file's first line, and warns if other users may read the file.

    Raises UsageError if there is no such file, or its first line is empty.
    """
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
    """Returns whether this process has a terminal to ask at, whatever stdin and stderr are."""
    try:
        os.close(os.open(TERMINAL_DEVICE, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True

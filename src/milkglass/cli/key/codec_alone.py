"""`milkglass key for-codec`: the part of a key that a worker needs which only encodes and decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milkglass.cli.key.commands import keys
from milkglass.cli.ui.options import AsJson, KeyOptions, PassphraseFile
from milkglass.cli.ui.passphrase import another_passphrase, require_another
from milkglass.cli.ui.terminal import emit, note
from milkglass.client.key import usage
from milkglass.errors import KeyExists, KeyFileError

READS = "it reads every text under this key, as the key does; it makes no key for a job and scrambles no model"


@keys.command("for-codec")
def for_codec(
    key: Annotated[Path, typer.Argument(help="The key file.")],
    out: Annotated[Path, typer.Option("--out", help="The new file, under a passphrase of its own.")],
    new_passphrase_file: Annotated[
        Path | None,
        typer.Option("--new-passphrase-file", help="A file with the passphrase of OUT; with --generate one to write."),
    ] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Draw the passphrase of OUT.")] = False,
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a key's codec alone, for a worker that only encodes and decodes.

    `encode`, `decode`, `classify`, `generate`, `chat` and `proxy` take it as --key. It holds the permutation and label
    names, and no root secret: `obfuscate`, `verify`, `audit` and `key for-job` refuse it.
    """
    from milkglass.client.key.file import read_key, write_key

    if out.exists():
        raise KeyExists(f"{out} exists already", "give another file: no key is ever overwritten")
    require_another(new_passphrase_file)
    unlocked = KeyOptions(key, None, passphrase_file).open()
    codec = unlocked.key.codec_alone()
    fresh = another_passphrase(new_passphrase_file, generate, unlocked)
    write_key(out, codec, fresh)
    if read_key(out, fresh).identifier != unlocked.key.identifier:
        raise KeyFileError(f"{out} is not the codec that was written", "another program wrote there; give another name")
    usage.handed_on(out, key)
    note(READS)
    emit(
        as_json, {"codec": str(out), "key": str(key), "key_id": codec.identifier}, f"wrote the codec of {key} to {out}"
    )

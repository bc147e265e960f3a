"""`milkglass key for-codec`, `show`, `backup` and `rotate`.

A codec for a worker that only encodes and decodes, what a key belongs to, a copy that was opened, another passphrase.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass import files
from milkglass.cli.key.commands import EQUALLY, keys
from milkglass.cli.ui.options import AsJson, KeyOptions, PassphraseFile
from milkglass.cli.ui.passphrase import VARIABLE, another_passphrase, require_another
from milkglass.cli.ui.terminal import emit, note
from milkglass.client.key import usage
from milkglass.errors import KeyFileError, UsageError

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey

KeyPath = Annotated[Path, typer.Argument(help="The key file.")]
READS = "it reads every text under this key, as the key does; it makes no key for a job and scrambles no model"


@keys.command("for-codec")
def for_codec(
    key: KeyPath,
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
    from milkglass.client.key.file import UnlockedKey, require_free

    require_free(out)
    require_another(new_passphrase_file)

    unlocked = KeyOptions(key, None, passphrase_file).open()
    codec = unlocked.key.codec_alone()
    fresh = another_passphrase(new_passphrase_file, generate, unlocked)
    if UnlockedKey.new(out, codec, fresh).again().identifier != unlocked.key.identifier:
        raise KeyFileError(f"{out} is not the codec that was written", "another program wrote there; give another name")
    usage.handed_on(out, key)
    note(READS)
    if codec.info.responses is not None:
        note(EQUALLY.format(key=key))
    emit(
        as_json, {"codec": str(out), "key": str(key), "key_id": codec.identifier}, f"wrote the codec of {key} to {out}"
    )


@keys.command()
def show(key: KeyPath, passphrase_file: PassphraseFile = None, as_json: AsJson = False) -> None:
    """Show a key's identifier, model and scheme, and the jobs whose label names it knows. No secret."""
    unlocked = KeyOptions(key, None, passphrase_file).open()
    document = shown(unlocked)
    emit(
        as_json,
        document,
        lambda: "\n".join(f"{name.replace('_', ' ')}: {_word(one)}" for name, one in document.items()),
    )


def shown(unlocked: UnlockedKey) -> dict[str, Any]:
    """Nothing here reads a text or makes the key again. Label names are private, so that they are counted."""
    key, info = unlocked.key, unlocked.key.info
    jobs = {**info.labels_by_job, **info.scales_by_job}
    return {
        "key_id": key.identifier,
        "holds": "the codec alone" if key.secret is None else "the whole key",
        "model": info.model,
        "model_digest": key.model_digest,
        "kind": info.kind,
        "tokens": len(key.first),
        "ids": len(key.sigma),
        "scheme": info.public_scheme,
        "made_for_job": None if info.job is None else info.job["name"],
        "label_names": len(info.labels or {}),
        "jobs_with_labels": list(jobs),
        "uploads": info.uploads,
    }


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(
            str(one) if name == "name" else f"{name}={one}" for name, one in value.items() if one is not None
        )
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


@keys.command()
def backup(
    key: KeyPath,
    out: Annotated[Path, typer.Argument(help="The copy; it is sealed with the same passphrase.")],
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy a key file, and open the copy: that shows that the passphrase is right and that the copy can be read.

    Keep it on another disk, and the passphrase elsewhere. What was counted under the key stays with the original.
    """
    if out.is_dir():
        out = out / key.name
    from milkglass.client.key.file import require_free

    require_free(out)
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", "make it, or is the disk not mounted?")
    unlocked = KeyOptions(key, None, passphrase_file).open()
    files.write(out, key.read_bytes(), replace=False)
    copied = unlocked.again(out)
    if copied.identifier != unlocked.key.identifier:
        raise KeyFileError(f"{out} is not the key that was copied", "another program wrote there; give another name")
    document = {"key": str(key), "backup": str(out), "key_id": copied.identifier, "sha256": files.sha256(out)}
    emit(
        as_json, document, f"copied {key} to {out} and opened it: key {copied.identifier}, SHA-256 {document['sha256']}"
    )


@keys.command()
def rotate(
    key: KeyPath,
    new_passphrase_file: Annotated[
        Path | None,
        typer.Option("--new-passphrase-file", help="A file with the new passphrase; with --generate one to write."),
    ] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Draw the new passphrase.")] = False,
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Seal a key with another passphrase. The key stays the same, and so do the models that were made with it.

    Run this while no other command uses the key: one that was begun cannot write its label names afterwards. Copies
    that were made before still open with the old passphrase: destroy them. Where the key itself may be known,
    make another with `milkglass key for-job` or `milkglass obfuscate`, scramble the model anew, and train it again.
    """
    require_another(new_passphrase_file)
    from milkglass.client.key.file import leftovers

    left = leftovers(key)
    unlocked = KeyOptions(key, None, passphrase_file).open()  # removes them
    for one in left:
        does = f"{one} cannot be removed: remove it" if one.exists() else f"removed {one}"
        note(f"{does}, which a command left that was ended while it wrote the key")
    unlocked.sealed_with(another_passphrase(new_passphrase_file, generate, unlocked))
    note("copies that were made before still open with the old passphrase")
    if os.environ.get(VARIABLE):
        note(f"{VARIABLE} still holds the old passphrase: give commands the new one")
    emit(as_json, {"key": str(key), "key_id": unlocked.key.identifier}, f"{key} opens with the new passphrase alone")

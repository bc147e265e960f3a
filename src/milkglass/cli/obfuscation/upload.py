"""`milkglass upload`: hand a scrambled model, or training rows that were scrambled here, to a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.ui.options import AsJson, KeyOptions, PassphraseFile, ServerOptions, Yes, refuse_unused, with_options
from milkglass.cli.ui.terminal import bars, cell, confirm, emit, megabytes, moment, note, table
from milkglass.errors import KeyForOtherModel, RemoteError, UsageError

KEY_ID = "milkglass_key_id"  # in a scrambled model's config.json

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey
    from milkglass.client.remote.remote import Remote


@with_options
def upload(
    path: Annotated[
        Path, typer.Argument(help="A folder that `obfuscate` wrote, or a Parquet file that `encode` wrote.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="The model's name there  [default: a random one]")] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="The model's key file, which notes the name."),
    ] = None,
    passphrase_file: PassphraseFile = None,
    *,
    server: ServerOptions,
    as_json: AsJson = False,
) -> None:
    """Upload a scrambled folder, a delta, or a Parquet file; goes on where an interrupted upload stopped.

    Refused before anything is sent: a folder with a tokenizer, with a config that scrambling would have changed, or
    with weights that are not the model's; a Parquet file without the mark that `encode` leaves beside its own.
    """
    _require_ours(path, name)
    unlocked = _key_of(path, key, passphrase_file)
    from milkglass.client.obfuscate.upload_check import is_plain, others_in

    with server.open() as remote, bars(as_json) as stage:
        if path.is_dir():
            for other in others_in(path):
                note(f"not sent: {other}, which is not a file of the model")
            repeats = name is not None and is_plain(name) and _is_there(remote, name)
            model = remote.upload_model(path, name, stage)
            if unlocked is not None:
                unlocked.remember(None, model=model)
            did = f"the server had this very model already, nothing was replaced: {model}"
            words = did if repeats else f"uploaded: {model}"
            emit(as_json, {"model": model}, lambda: f"{words}\n{_next(remote, model, server)}")
        else:
            file = remote.upload(path, stage)
            emit(as_json, {"file": file}, f"uploaded: {file}")


def _is_there(remote: Remote, name: str) -> bool:
    """Whether the server has a model of this name. One of other weights is not replaced: the server refuses."""
    try:
        remote.model(name)
    except RemoteError as error:
        if error.status != 404:
            raise
        return False
    return True


def _key_of(path: Path, key: Path | None, passphrase_file: Path | None) -> UnlockedKey | None:
    """The key that made a folder. Raises UsageError, KeyForOtherModel before anything is sent."""
    if key is None:
        return None
    if not path.is_dir():
        raise UsageError("--key is of a model, and this is a file of rows", "leave --key out")
    unlocked = KeyOptions(key, None, passphrase_file).open()
    from milkglass.models.checkpoint import read_json

    if read_json(path / "config.json").get(KEY_ID) not in (None, unlocked.key.identifier):
        raise KeyForOtherModel(
            f"{path} was scrambled with another key than {key}; nothing was sent", "give the key that made it"
        )
    return unlocked


def _next(remote: Remote, model: str, server: ServerOptions) -> str:
    """A decoder may be under a scheme that needs no fine-tuning; the server's copy does not say."""
    tune = f"next: milkglass finetune {model} DATA --key KEYFILE {server}"
    if remote.model(model).get("kind") != "decoder":
        return tune
    return f"{tune}\nor, where the scheme needs no fine-tuning: milkglass proxy --key KEYFILE {server}"


@with_options
def uploads(
    delete: Annotated[str | None, typer.Option("--delete", help="The id of a file or an upload to delete.")] = None,
    yes: Yes = False,
    *,
    server: ServerOptions,
    as_json: AsJson = False,
) -> None:
    """List the files that were uploaded to the server, and uploads that were never completed; or delete one.

    A model and a finished job need their files no longer.
    """
    refuse_unused("without --delete", {} if delete else {"--yes": yes})
    with server.open() as remote:
        if delete:
            confirm(f"Delete {delete} from the server?", yes)
            remote.delete_upload(delete)
            emit(as_json, {"id": delete, "deleted": True}, f"deleted: {delete}")
            return
        files, parts = remote.files(), remote.uploads()
    emit(as_json, {"files": files, "unfinished": parts}, lambda: _words(files, parts))


def _words(files: list[dict[str, Any]], parts: list[dict[str, Any]]) -> str:
    if not files and not parts:
        return "the server has no uploads"
    rows: list[tuple[str, ...]] = [("id", "for", "size", "arrived", "made")]
    for one in [*files, *parts]:
        size, have = one.get("bytes"), one.get("received")
        part = f"{100 * have / size:.0f} %" if have is not None and size else "whole"
        named = (cell(one.get("id")), cell(one.get("purpose")), megabytes(size))
        rows.append((*named, part, moment(one.get("created_at"))))
    return table(rows)


def _require_ours(path: Path, name: str | None) -> None:
    """Raises UsageError for what Milkglass did not write. No one has been asked for a token then."""
    if path.is_dir():
        from milkglass.client.obfuscate.upload_check import Outgoing

        Outgoing.of(path)
        return
    if not path.is_file() or path.suffix != ".parquet":
        raise UsageError(
            f"{path} is neither a scrambled folder nor a Parquet file",
            "give a folder that `milkglass obfuscate` wrote; `milkglass finetune` scrambles and uploads data itself",
        )
    if name:
        raise UsageError("--name was given for a file", "only models have names")
    from milkglass.client.data.marked_rows import require_marked

    require_marked(path)

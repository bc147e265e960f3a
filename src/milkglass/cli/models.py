"""Implements `milkglass models`, `upload` and `uploads`: what can be scrambled, and what a server has or is handed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.ui.options import (
    AsJson,
    CredentialOptions,
    KeyOptions,
    PassphraseFile,
    ServerOptions,
    Yes,
    changed_options,
    open_original,
    refuse_unused,
    with_options,
)
from milkglass.cli.ui.terminal import (
    cell_text,
    confirm,
    delete_object,
    emit,
    local_time_text,
    megabytes_text,
    note,
    progress_bars,
    table_text,
)
from milkglass.errors import KeyForOtherModel, UsageError

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey
    from milkglass.client.key.key import Key
    from milkglass.client.remote.remote import Remote


KEY_FIT_TEXTS = {True: "this key", False: "another key", None: "not said"}


@with_options
def models(
    ref: Annotated[
        str | None,
        typer.Argument(
            help="Inspect one model: a folder, a hub id (hf:owner/name), demo:minilm, demo:mpnet or demo:smollm2."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--server", envvar="MILKGLASS_SERVER", help="List the models of this server.", show_default=False),
    ] = None,
    supported: Annotated[
        bool, typer.Option("--supported", help="List what can be scrambled, also where a server is named.")
    ] = False,
    key: Annotated[Path | None, typer.Option("--key", help="Show which models this key file fits.")] = None,
    passphrase_file: PassphraseFile = None,
    delete: Annotated[str | None, typer.Option("--delete", help="Delete this model from the server.")] = None,
    yes: Yes = False,
    *,
    credentials: CredentialOptions,
    as_json: AsJson = False,
) -> None:
    """List a server's models (--server or $MILKGLASS_SERVER); without one, what can be scrambled; or look at REF."""
    if server is None and (key or delete):
        raise UsageError("--key and --delete are about a server's models", "name the server with --server")
    lists_server_models = server is not None and ref is None and not supported
    if not lists_server_models:
        situation = "with --supported" if supported else f"to look at {ref}" if ref is not None else "without a server"
        refuse_unused(situation, {"--key": key, "--delete": delete, **changed_options(credentials)})
    if ref is not None and supported:
        raise UsageError("--supported and a model were both given", "leave one out")
    refuse_unused("to delete a model", {"--key": key} if delete else {})
    refuse_unused("without --delete", {"--yes": yes} if not delete else {})
    refuse_unused("without --key", {"--passphrase-file": passphrase_file} if key is None else {})
    if lists_server_models and server is not None:
        if delete:
            from milkglass.client.remote.remote import MODELS_ROUTE

            question = f"Delete the model {delete} from the server? It cannot be brought back."
            with credentials.for_server(server).open() as remote:
                delete_object(remote, MODELS_ROUTE, delete, question, yes, as_json)
        else:
            unlocked_key = KeyOptions(key, None, passphrase_file).open().key if key else None
            _list_models(credentials.for_server(server), unlocked_key, as_json)
        return
    emit(as_json, *(_supported_models() if ref is None else _model_facts(ref)))


# --- a server's -------------------------------------------------------------------------------------------------------
def _list_models(server: ServerOptions, key: Key | None, as_json: bool) -> None:
    """Prints a server's models, and with a key which of them were made with it."""
    from milkglass.client.remote.responses import is_made_with

    with server.open() as remote:
        records = remote.models()
    names = ("id", "kind", "vocab_size", "bytes", "created", "parent", "job", "key_id")
    model_documents = [{name: model.get(name) for name in names} for model in records]
    if key is not None:
        model_documents = [{**model, "key_fits": is_made_with(model, key)} for model in model_documents]
    emit(as_json, {"models": model_documents}, lambda: _model_table(model_documents))


def _model_table(models: list[dict[str, Any]]) -> str:
    """Returns the table of a server's models as text."""
    hint = "what can be scrambled: milkglass models --supported"
    if not models:
        return f"the server has no models\n{hint}"
    rows: list[tuple[str, ...]] = [("model", "kind", "size", "made", "fine-tuned from", "scrambled with")]
    for model in models:
        scrambled_with = (
            KEY_FIT_TEXTS[model["key_fits"]] if "key_fits" in model else (model["key_id"] or KEY_FIT_TEXTS[None])
        )
        cells = (
            cell_text(model["id"]),
            cell_text(model["kind"]),
            megabytes_text(model["bytes"]),
            local_time_text(model["created"]),
        )
        rows.append((*cells, cell_text(model["parent"] or "-"), cell_text(scrambled_with)))
    return f"{table_text(rows)}\n\n{hint}"


# --- what can be scrambled --------------------------------------------------------------------------------------------
def _supported_models() -> tuple[dict[str, Any], str]:
    """Returns the embedded models and the supported families, as JSON and as text."""
    from milkglass.models.families import FAMILIES
    from milkglass.models.resolve import EMBEDDED

    embedded = table_text([(f"  {model.ref}", model.about) for model in EMBEDDED.values()])
    families = table_text(
        [(f"  {family.name}", family.kind, ", ".join(family.model_types)) for family in FAMILIES.values()]
    )
    document = {
        "embedded": [{"ref": model.ref, "about": model.about} for model in EMBEDDED.values()],
        "families": [
            {"name": family.name, "kind": family.kind, "model_types": list(family.model_types)}
            for family in FAMILIES.values()
        ],
    }
    return document, (
        f"embedded models:\n{embedded}\n\nsupported families:\n{families}\n\n"
        "any local folder or hub id (hf:owner/name) of a supported family can be scrambled"
    )


def _model_facts(ref: str) -> tuple[dict[str, Any], str]:
    """Returns what is known of one model, as JSON and as text. Raises ModelError if it cannot be scrambled."""
    from milkglass.client.obfuscate.preflight import assumed_head_notice, require_sound
    from milkglass.models.families import architecture_of

    base = open_original(ref)
    architecture = architecture_of(base)
    require_sound(base)
    if warning := assumed_head_notice(base):
        note(warning)
    scrambled_bytes = sum(base.tensors[name].bytes for name in architecture.token_tensor_names)
    facts: dict[str, Any] = {
        "ref": ref,
        "folder": str(base.folder),
        "family": architecture.family.name,
        "kind": architecture.kind,
        "vocabulary": architecture.vocab_size,
        "dimensions": base.tensors[architecture.table].shape[1],
        "dtype": base.tensors[architecture.table].dtype,
        "touched": list(architecture.token_tensor_names),
        "bytes": base.total_bytes,
        "bytes_scrambled": scrambled_bytes,
    }
    return facts, table_text(
        [
            ("folder", facts["folder"]),
            ("family", f"{facts['family']} ({facts['kind']})"),
            ("vocabulary", f"{facts['vocabulary']:,} tokens x {facts['dimensions']} dimensions, {facts['dtype']}"),
            ("scrambled", ", ".join(facts["touched"])),
            ("size", f"{megabytes_text(facts['bytes'])}, a delta {megabytes_text(facts['bytes_scrambled'])}"),
        ]
    )


@with_options
def upload(
    path: Annotated[
        Path, typer.Argument(help="A folder that `obfuscate` wrote, or a Parquet file that `encode` wrote.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="The model's name there  [default: a random one]")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="The model's key file, which notes the name.")] = None,
    passphrase_file: PassphraseFile = None,
    *,
    server: ServerOptions,
    as_json: AsJson = False,
) -> None:
    """Upload a scrambled folder, a delta, or a Parquet file; goes on where an interrupted upload stopped.

    Refused before anything is sent: a folder with a tokenizer, with a config that scrambling would have changed, or
    with weights that are not the model's; a Parquet file without the mark (NAME.milkglass.json) that `encode` writes
    beside it.
    """
    _require_own_files(path, name)
    unlocked = _key_of(path, key, passphrase_file)
    options = "--key KEYFILE" if key is None else str(KeyOptions(key, None, passphrase_file))
    from milkglass.client.obfuscate.upload_check import unsent_names
    from milkglass.client.plain_names import is_plain

    with server.open() as remote, progress_bars(as_json) as stage:
        if path.is_dir():
            for other in unsent_names(path):
                note(f"not sent: {other}, which is not a file of the model")
            is_repeated = name is not None and is_plain(name) and remote.find_model(name) is not None
            model = remote.upload_model(path, name, stage)
            if unlocked is not None:
                unlocked.remember(None, model=model)
            unchanged = f"the server had this very model already, nothing was replaced: {model}"
            result = unchanged if is_repeated else f"uploaded: {model}"
            emit(as_json, {"model": model}, lambda: f"{result}\n{_next_commands(remote, model, server, options)}")
        else:
            file = remote.upload(path, stage)
            emit(as_json, {"file": file}, f"uploaded: {file}")


def _key_of(path: Path, key: Path | None, passphrase_file: Path | None) -> UnlockedKey | None:
    """Opens the key that made a folder; None without a key file. It is called before anything is sent.

    Raises:
        UsageError: `path` is a file of rows, which has no key.
        KeyForOtherModel: the folder was made with another key.
    """
    if key is None:
        return None
    if not path.is_dir():
        raise UsageError("--key is of a model, and this is a file of rows", "leave --key out")
    unlocked = KeyOptions(key, None, passphrase_file).open()
    from milkglass.models.checkpoint import read_json
    from milkglass.models.file_names import CONFIG, KEY_ID

    if read_json(path / CONFIG).get(KEY_ID) not in (None, unlocked.key.identifier):
        raise KeyForOtherModel(
            f"{path} was scrambled with another key than {key}; nothing was sent", "give the key that made it"
        )
    return unlocked


def _next_commands(remote: Remote, model: str, server: ServerOptions, key_options: str) -> str:
    """Returns the commands that are suggested after an upload.

    The server does not say whether a decoder's scheme needs fine-tuning. So two commands are suggested for a decoder.
    `key_options` are the options of the key, as they are typed.
    """
    tune = f"next: milkglass finetune {model} YOUR.jsonl {key_options} {server}"
    if remote.model(model).get("kind") != "decoder":
        return tune
    return f"{tune}\nor, where the scheme needs no fine-tuning: milkglass proxy {key_options} {server}"


@with_options
def uploads(
    delete: Annotated[str | None, typer.Option("--delete", help="The id of a file or an upload to delete.")] = None,
    yes: Yes = False,
    *,
    server: ServerOptions,
    as_json: AsJson = False,
) -> None:
    """List the files that were uploaded to the server, and uploads that were never completed; or delete one.

    A file is no longer needed when its model is made or its job has finished.
    """
    refuse_unused("without --delete", {} if delete else {"--yes": yes})
    with server.open() as remote:
        if delete:
            confirm(f"Delete {delete} from the server?", yes)
            remote.delete_upload(delete)
            emit(as_json, {"id": delete, "deleted": True}, f"deleted: {delete}")
            return
        files, unfinished_uploads = remote.files(), remote.uploads()
    emit(as_json, {"files": files, "unfinished": unfinished_uploads}, lambda: _upload_table(files, unfinished_uploads))


def _upload_table(files: list[dict[str, Any]], unfinished_uploads: list[dict[str, Any]]) -> str:
    """Returns the table of a server's files and unfinished uploads as text."""
    if not files and not unfinished_uploads:
        return "the server has no uploads"
    rows: list[tuple[str, ...]] = [("id", "for", "size", "arrived", "made")]
    for record in [*files, *unfinished_uploads]:
        size, received = record.get("bytes"), record.get("received")
        progress_text = f"{100 * received / size:.0f} %" if received is not None and size else "whole"
        cells = (cell_text(record.get("id")), cell_text(record.get("purpose")), megabytes_text(size))
        rows.append((*cells, progress_text, local_time_text(record.get("created_at"))))
    return table_text(rows)


def _require_own_files(path: Path, name: str | None) -> None:
    """Raises UsageError for a folder or a file that Milkglass did not write. It is called before a token is read."""
    if path.is_dir():
        from milkglass.client.obfuscate.upload_check import OutgoingModel

        OutgoingModel.of(path)
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

"""`milkglass models`: what can be scrambled, what a given model is, and what a server has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.ui.options import (
    AllowHttp,
    AsJson,
    Certificate,
    KeyOptions,
    PassphraseFile,
    ServerOptions,
    TokenFile,
    Yes,
    original,
    refuse_unused,
)
from milkglass.cli.ui.terminal import cell, emit, erase, megabytes, moment, note, table
from milkglass.errors import UsageError

if TYPE_CHECKING:
    from milkglass.client.key.key import Key

KEYS = {True: "this key", False: "another key", None: "not said"}


def models(
    ref: Annotated[
        str | None,
        typer.Argument(help="Inspect one model: a folder, a hub id (hf:owner/name), demo:minilm, demo:smollm2."),
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
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """List a server's models (--server or $MILKGLASS_SERVER); without one, what can be scrambled; or look at REF."""
    if server is None and (key or delete):
        raise UsageError("--key and --delete are about a server's models", "name the server with --server")
    listed = server is not None and ref is None and not supported
    if not listed:
        ways = {"--token-file": token_file, "--certificate": certificate, "--allow-http": allow_http}
        about = "with --supported" if supported else f"to look at {ref}" if ref is not None else "without a server"
        refuse_unused(about, {"--key": key, "--delete": delete, **ways})
    if ref is not None and supported:
        raise UsageError("--supported and a model were both given", "leave one out")
    refuse_unused("to delete a model", {"--key": key} if delete else {})
    refuse_unused("without --delete", {"--yes": yes} if not delete else {})
    refuse_unused("without --key", {"--passphrase-file": passphrase_file} if key is None else {})
    if listed and server is not None:
        way = ServerOptions(server, token_file, certificate, allow_http)
        if delete:
            from milkglass.client.remote.remote import MODELS

            question = f"Delete the model {delete} from the server? It cannot be brought back."
            with way.open() as remote:
                erase(remote, MODELS, delete, question, yes, as_json)
        else:
            _on_server(way, KeyOptions(key, None, passphrase_file).open().key if key else None, as_json)
        return
    emit(as_json, *(_catalogue() if ref is None else _one(ref)))


# --- a server's -------------------------------------------------------------------------------------------------------
def _on_server(way: ServerOptions, key: Key | None, as_json: bool) -> None:
    from milkglass.client.remote.responses import fits

    with way.open() as remote:
        result = remote.models()
    names = ("id", "kind", "vocab_size", "bytes", "created", "parent", "job", "key_id")
    shown = [{name: model.get(name) for name in names} for model in result]
    if key is not None:
        shown = [{**model, "key_fits": fits(model, key)} for model in shown]
    emit(as_json, {"models": shown}, lambda: _server_words(shown))


def _server_words(found: list[dict[str, Any]]) -> str:
    more = "what can be scrambled: milkglass models --supported"
    if not found:
        return f"the server has no models\n{more}"
    rows: list[tuple[str, ...]] = [("model", "kind", "size", "made", "fine-tuned from", "scrambled with")]
    for model in found:
        scrambled_with = KEYS[model["key_fits"]] if "key_fits" in model else (model["key_id"] or KEYS[None])
        cells = (cell(model["id"]), cell(model["kind"]), megabytes(model["bytes"]), moment(model["created"]))
        rows.append((*cells, cell(model["parent"] or "-"), cell(scrambled_with)))
    return f"{table(rows)}\n\n{more}"


# --- what can be scrambled --------------------------------------------------------------------------------------------
def _catalogue() -> tuple[dict[str, Any], str]:
    """As JSON and in words, as `_one` too."""
    from milkglass.models.families import FAMILIES
    from milkglass.models.resolve import EMBEDDED

    embedded = table([(f"  {model.ref}", model.about) for model in EMBEDDED.values()])
    families = table([(f"  {one.name}", one.kind, ", ".join(one.model_types)) for one in FAMILIES.values()])
    document = {
        "embedded": [{"ref": model.ref, "about": model.about} for model in EMBEDDED.values()],
        "families": [
            {"name": one.name, "kind": one.kind, "model_types": list(one.model_types)} for one in FAMILIES.values()
        ],
    }
    return document, (
        f"embedded models:\n{embedded}\n\nsupported families:\n{families}\n\n"
        "any local folder or hub id (hf:owner/name) of a supported family can be scrambled"
    )


def _one(ref: str) -> tuple[dict[str, Any], str]:
    from milkglass.client.obfuscate.preflight import assumed, require_sound
    from milkglass.models.families import of

    base = original(ref)
    result = of(base)
    require_sound(base)
    if said := assumed(base):
        note(said)
    tables = sum(base.tensors[name].bytes for name in result.touched)
    found: dict[str, Any] = {
        "ref": ref,
        "folder": str(base.folder),
        "family": result.family.name,
        "kind": result.kind,
        "vocabulary": result.vocab_size,
        "dimensions": base.tensors[result.table].shape[1],
        "dtype": base.tensors[result.table].dtype,
        "touched": list(result.touched),
        "bytes": sum(tensor.bytes for tensor in base.tensors.values()),
        "bytes_scrambled": tables,
    }
    return found, table(
        [
            ("folder", found["folder"]),
            ("family", f"{found['family']} ({found['kind']})"),
            ("vocabulary", f"{found['vocabulary']:,} tokens x {found['dimensions']} dimensions, {found['dtype']}"),
            ("scrambled", ", ".join(found["touched"])),
            ("size", f"{megabytes(found['bytes'])}, a delta {megabytes(found['bytes_scrambled'])}"),
        ]
    )

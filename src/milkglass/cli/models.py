"""`milkglass models`: what can be scrambled, and what a given model is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from milkglass.cli.options import AsJson
from milkglass.cli.terminal import emit, table


def models(
    ref: Annotated[
        str | None, typer.Argument(help="A folder, a hub id (owner/name), demo:minilm or demo:smollm2.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the embedded models and the supported families, or look at one model."""
    document = _catalogue() if ref is None else _one(ref)
    emit(as_json, document, lambda: _catalogue_words(document) if ref is None else _one_words(document))


def _catalogue() -> dict[str, Any]:
    from milkglass.architectures import FAMILIES
    from milkglass.models import EMBEDDED

    return {
        "embedded": [{"ref": model.ref, "about": model.about} for model in EMBEDDED.values()],
        "families": [
            {"name": family.name, "kind": family.kind, "model_types": list(family.model_types)} for family in FAMILIES
        ],
    }


def _catalogue_words(found: dict[str, Any]) -> str:
    embedded = table([(f"  {model['ref']}", model["about"]) for model in found["embedded"]])
    families = table([(f"  {f['name']}", f["kind"], ", ".join(f["model_types"])) for f in found["families"]])
    return (
        f"embedded models:\n{embedded}\n\nsupported families:\n{families}\n\n"
        "any local folder or hub id (owner/name) of a supported family can be scrambled"
    )


def _one(ref: str) -> dict[str, Any]:
    from milkglass.architectures import of
    from milkglass.checkpoint import Checkpoint
    from milkglass.models import resolve

    folder = resolve(ref)
    base = Checkpoint.open(folder)
    found = of(base)
    tables = sum(base.tensors[name].bytes for name in found.touched)
    return {
        "ref": ref,
        "folder": str(folder),
        "family": found.family.name,
        "kind": found.kind,
        "vocabulary": found.vocab_size,
        "dimensions": base.tensors[found.table].shape[1],
        "dtype": base.tensors[found.table].dtype,
        "touched": list(found.touched),
        "bytes": sum(tensor.bytes for tensor in base.tensors.values()),
        "bytes_scrambled": tables,
    }


def _one_words(found: dict[str, Any]) -> str:
    million = 1e6
    return table(
        [
            ("folder", found["folder"]),
            ("family", f"{found['family']} ({found['kind']})"),
            ("vocabulary", f"{found['vocabulary']:,} tokens x {found['dimensions']} dimensions, {found['dtype']}"),
            ("scrambled", ", ".join(found["touched"])),
            ("size", f"{found['bytes'] / million:,.1f} MB, a delta {found['bytes_scrambled'] / million:,.1f} MB"),
        ]
    )


def register(app: typer.Typer) -> None:
    app.command()(models)

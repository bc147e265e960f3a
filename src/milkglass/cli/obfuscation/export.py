"""`milkglass export`: a scrambled folder in the form that an engine insists on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from milkglass.cli.ui.options import AsJson, require_folder, with_options
from milkglass.cli.ui.terminal import bars, emit
from milkglass.errors import UsageError

AS_IT_IS = "docs/engines.md has the commands; to generate, vLLM, SGLang and `milkglass serve` take the first folder"


@with_options
def export(
    folder: Annotated[Path, typer.Argument(help="A folder that `obfuscate` or `--fetch` wrote.")],
    engine: Annotated[
        Literal["llamacpp", "transformers"],
        typer.Option("--for", help="llamacpp: a GGUF file. transformers: a folder with an opaque tokenizer."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The new file or folder.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Write a scrambled model for an engine that loads none without a vocabulary: each token gets an opaque name."""
    require_folder(folder, "give the folder that `milkglass obfuscate` wrote")
    if out.exists():
        raise UsageError(f"{out} exists already", "give a new name, or remove that one first")
    from milkglass.files import require_writable

    require_writable(out)
    if (folder / "delta.json").is_file():
        raise UsageError(f"{folder} is a delta", "make the whole folder: `milkglass obfuscate` without --delta")
    with bars(as_json) as stage:
        if engine == "llamacpp":
            from milkglass.engines.gguf_file import write_gguf

            write_gguf(folder, out, stage)
        else:
            from milkglass.engines.opaque_tokenizer import with_tokenizer

            with_tokenizer(folder, out)
    emit(as_json, {"out": str(out), "for": engine}, f"wrote {out} for {engine}; {AS_IT_IS}")

"""`milkglass reproduce`: run a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from milkglass.cli.ui.options import AsJson, require_file
from milkglass.cli.ui.terminal import emit, note, note_resumption
from milkglass.errors import UsageError


def reproduce(
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as recipes/attack_sst2.toml.")],
    data: Annotated[Path, typer.Option("--data", help="The folder that the recipe's data paths start from.")],
    out: Annotated[Path, typer.Option("--out", help="The run folder. A stopped run is continued there.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="The recipe's [quick] settings: minutes on two cores, other figures.")
    ] = False,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once",
            min=1,
            max=64,
            help="Variants trained side by side, sharing the cores; fewer where memory is short.",
        ),
    ] = 2,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="A folder of trained cells and shadows that several recipes share.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe, and write its figures beside the paper's: NAME.json, NAME.md and NAME.html in the run folder."""
    require_file(recipe, "give a recipe, a .toml file")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, not a folder", "give another --out")
    _require_readable(recipe, data, quick)

    from milkglass.experiments.report import table
    from milkglass.experiments.reproduce import reproduce as run

    def log(message: str) -> None:
        if not as_json:
            note(f"  {message}")

    with note_resumption(out):
        results_file = run(recipe, data, out, quick, at_once, log, cache)
    document = json.loads(results_file.read_text("utf-8"))
    output_files = [str(results_file.with_suffix(suffix)) for suffix in (".json", ".md", ".html")]
    emit(
        as_json,
        {"files": output_files, **document},
        lambda: "\n".join([table.terminal_text(table.result_table(document)), "", *output_files]),
    )


def _require_readable(recipe: Path, data: Path, quick: bool) -> None:
    """Checks the recipe and the data folder before all kinds of experiments are imported, which takes seconds.

    Raises:
        UsageError: the file is not a recipe, or the folder is missing.
    """
    from milkglass.experiments.recipe import read_settings

    read_settings(recipe, quick)
    if not data.is_dir():
        from milkglass.experiments.data_refs import DATA_HINT

        raise UsageError(f"there is no folder {data}", DATA_HINT)

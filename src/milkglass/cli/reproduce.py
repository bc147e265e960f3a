"""`milkglass reproduce`: run a recipe. `milkglass data`: a public data set, or a table of yours, as JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass.cli.ui.options import AsJson, require_file
from milkglass.cli.ui.terminal import emit, note, resumable
from milkglass.cli.ui.terminal import table as columns
from milkglass.errors import UsageError

if TYPE_CHECKING:
    from milkglass.datasets.own import Columns

OWN = (".jsonl", ".csv", ".tsv", ".parquet")


def reproduce(
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as recipes/attack_sst2.toml.")],
    data: Annotated[Path, typer.Option("--data", help="The folder that the recipe's data paths start from.")],
    out: Annotated[Path, typer.Option("--out", help="The run folder. A stopped run is continued there.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="The recipe's [quick] settings: minutes on two cores, other figures.")
    ] = False,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, max=64, help="Variants trained side by side, sharing the cores.")
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

    from milkglass.experiments.report import table
    from milkglass.experiments.reproduce import reproduce as run

    def progress(words: str) -> None:
        if not as_json:
            note(f"  {words}")

    with resumable(out):
        results = run(recipe, data, out, quick, at_once, progress, cache)
    result = json.loads(results.read_text("utf-8"))
    pages = [str(results.with_suffix(kind)) for kind in (".json", ".md", ".html")]
    emit(as_json, {"files": pages, **result}, lambda: "\n".join([table.words(table.read(result)), "", *pages]))


def data(
    name: Annotated[
        str | None, typer.Argument(help="A data set's name, or a .jsonl, .csv, .tsv or .parquet file of yours.")
    ] = None,
    source: Annotated[Path | None, typer.Option("--from", help="The folder that has the data set's own files.")] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Fetch it from the hub, by the library datasets.")] = False,
    split: Annotated[
        str, typer.Option("--split", help="train, validation or test, as the data set has them.")
    ] = "train",
    out: Annotated[Path | None, typer.Option("--out", help="The JSON Lines file to write.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Write only this many rows.")] = None,
    text_column: Annotated[str | None, typer.Option("--text-column", help="Your file's column of texts.")] = None,
    label_column: Annotated[str | None, typer.Option("--label-column", help="Its column of labels.")] = None,
    pair_column: Annotated[str | None, typer.Option("--pair-column", help="Its column of second texts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a data set, or a table of yours, as the JSON Lines that `finetune` and `audit` read. No name: list them.

    Nothing is sent anywhere; --hub fetches.
    """
    if name is None:
        _list(as_json)
        return
    if out is None:
        raise UsageError("--out is missing", "give --out FILE.jsonl, the file to write")
    if out.exists():
        raise UsageError(f"{out} is there already", "give another --out, or remove it first")
    if out.suffix != ".jsonl":
        raise UsageError(f"{out.name} would be JSON Lines under another name", "give --out a name that ends in .jsonl")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", "make it first")

    from milkglass.datasets import own, sets

    requested = (text_column, label_column, pair_column)
    score, columns = False, None
    if Path(name).suffix.lower() in OWN or Path(name).is_file():
        if source is not None or hub:
            raise UsageError(f"{name} is a file: --from and --hub are for data sets by name", "leave them out")
        columns = _columns(Path(name), *requested)
        result = own.read(Path(name), columns)
    else:
        if any(requested):
            raise UsageError("columns are for files of your own", f"{name} has its own")
        if (source is None) != hub:
            words = "both --from and --hub were given" if hub else f"where is the data set {name}?"
            raise UsageError(words, "give --from FOLDER, or --hub")
        score = sets.describe(name).task == "regression"
        result = sets.load(name, source, split, note)
    count = sets.write(result, out, score, rows)
    taken = {} if columns is None else {"columns": columns.document()}
    emit(as_json, {"out": str(out), "rows": count, **taken}, f"{count:,} rows in {out}{_taken(columns)}")


def _columns(path: Path, text: str | None, label: str | None, pair: str | None) -> Columns:
    from milkglass.datasets.own import Columns, columns_of

    return columns_of(path, label, pair) if text is None else Columns(text, label, pair)


def _taken(columns: Columns | None) -> str:
    """No one should learn from a training that a column was left out."""
    if columns is None:
        return ""
    named = ", ".join(f"{what} from {name}" for what, name in columns.document().items() if name is not None)
    return f"; {named}" + ("" if columns.label else "; no labels (--label-column)")


def _list(as_json: bool) -> None:
    from milkglass.datasets.sets import SETS

    result = [
        {"name": one.name, "task": one.task, "splits": list(one.splits), "labels": list(one.labels), "about": one.about,
         "metrics": list(one.metrics), "licence": one.licence}
        for one in SETS.values()
    ]  # fmt: skip
    rows = [(one.name, one.task, ", ".join(one.splits), one.licence, one.about) for one in SETS.values()]
    emit(as_json, {"data_sets": result}, columns([("name", "task", "splits", "licence", "about"), *rows]))

"""`milkglass reproduce`: run a recipe. `milkglass data`: a public data set, or a table of yours, as JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from milkglass.cli.ui.columns import ROWS, ColumnOptions, say_skipped
from milkglass.cli.ui.options import AsJson, changed, refuse_unused, require_file, with_options
from milkglass.cli.ui.terminal import emit, note, resumable, table
from milkglass.errors import UsageError


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
    _require_readable(recipe, data, quick)

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


def _require_readable(recipe: Path, data: Path, quick: bool) -> None:
    """Checks the recipe and its folder before all kinds of experiments are imported, which takes seconds.

    Raises:
        UsageError: the file is no recipe, or the folder is missing.
    """
    from milkglass.experiments.recipe import settings

    settings(recipe, quick)
    if not data.is_dir():
        from milkglass.experiments.data_refs import DATA

        raise UsageError(f"there is no folder {data}", DATA)


@with_options
def data(
    name: Annotated[str | None, typer.Argument(help=f"A data set's name, or a file of yours: {ROWS}.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="The folder that has the data set's own files.")] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Fetch it from the hub, by the library datasets.")] = False,
    split: Annotated[
        str | None,
        typer.Option("--split", help="train, validation or test, as the data set has them.  [default: train]"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The JSON Lines file to write.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Write only this many rows.")] = None,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Write a data set, or a table of yours, as the JSON Lines that `finetune` and `audit` read. No name: list them.

    Nothing is sent anywhere; --hub fetches.
    """
    if name is None:
        options = {"--from": source, "--hub": hub, "--split": split, "--out": out, "--rows": rows}
        refuse_unused("to list the data sets", {**options, **changed(columns)})
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

    from milkglass.rows.data_file import KINDS
    from milkglass.rows.examples import read_examples
    from milkglass.rows.sets import catalogue as sets
    from milkglass.rows.write import write

    score, taken, columns_read = False, None, ""
    blank, empty = list[int](), list[int]()
    if Path(name).suffix.lower() in {*KINDS} - {""} or Path(name).is_file():
        if source is not None or hub:
            raise UsageError(f"{name} is a file: --from and --hub are for data sets by name", "leave them out")
        refuse_unused("of a file of yours", {"--split": split})
        file = columns.file(Path(name))
        taken = file.taken()
        columns_read = f"; {file.columns_read()}" if file.kind != ".txt" else ""
        result = read_examples(file, blank=blank.append, empty=empty.append)
    else:
        if columns.decides():
            raise UsageError("columns are for files of your own", f"{name} has its own")
        score = sets.describe(name).task == "regression"
        if (source is None) != hub:
            words = "both --from and --hub were given" if hub else f"where is the data set {name}?"
            raise UsageError(words, "give --from FOLDER, or --hub")
        result = sets.load(name, source, split or "train", note)
    count = write(result, out, score, rows)
    say_skipped(Path(name).name, len(blank), len(empty))
    document = {"out": str(out), "rows": count, **({} if taken is None else {"columns": taken})}
    emit(as_json, document, f"{count:,} rows in {out}{columns_read}")


def _list(as_json: bool) -> None:
    from milkglass.rows.sets.catalogue import SETS

    published = {one.name: "" if one.hub is None else f"hf:{one.hub.path}" for one in SETS.values()}
    result = [
        {"name": one.name, "task": one.task, "splits": list(one.splits), "labels": list(one.labels), "about": one.about,
         "metrics": list(one.metrics), "licence": one.licence, "published": published[one.name]}
        for one in SETS.values()
    ]  # fmt: skip
    head = ("name", "task", "splits", "published", "licence", "about")
    rows = [
        (one.name, one.task, ", ".join(one.splits), published[one.name], one.licence, one.about)
        for one in SETS.values()
    ]
    emit(as_json, {"data_sets": result}, table([head, *rows]))

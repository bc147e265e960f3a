"""`milkglass federated prepare`, and the first stage of a run: sites' texts pass through GHOST."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from milkglass.cli.ui.columns import ROWS, ColumnOptions
from milkglass.cli.ui.options import AsJson, refuse_unused, with_options
from milkglass.cli.ui.terminal import bars, emit, note, resumable
from milkglass.errors import UsageError
from milkglass.progress import Stage, duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from milkglass.federated.rows import SiteRows
    from milkglass.rows.data_file import Source
    from milkglass.sanitizers.ghost.ghost import Ghost
    from milkglass.sanitizers.ghost.selection import SelectionMethod

FEW = 8  # texts, from which on the time that they take is announced
QUANTILES = (0.2, 0.4, 0.6, 0.8)  # of the lengths: of which texts are timed, so many at once as a part has
FASTER = "--selection nearest takes seconds, and a model may learn less from such shadows"
OTHER_WAYS = {
    "random": "--selection random is not the paper's: a model learns least from shadows drawn at random (its Table 7)",
    "nearest": "--selection nearest is not the paper's: each token always has the same shadow, and a model may learn "
    "less (its Table 7)",
}
PLAIN = "warning: --plain: texts do not pass through ghost; anyone who sees a gradient can read the texts behind it"
Model = Annotated[
    str, typer.Option(help="An encoder or a decoder: a folder, a hub id (hf:owner/name), demo:minilm or demo:smollm2.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Leave the texts unchanged, for comparison only.")]
SelectionWay = Annotated[
    Literal["states", "random", "nearest"],
    typer.Option(
        "--selection",
        help="Which shadows ghost takes: by all hidden states, which is the paper's and takes seconds a text; drawn at "
        "random; or each token's nearest. The last two take no time, and a model may learn less from them.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed of the head, shadows, batches and noise, for experiments; without it all but the head is secret."
    ),
]


@with_options
def prepare(
    source: Annotated[Path, typer.Argument(metavar="FILE", help=f"A site's labelled texts: {ROWS}.")],
    model: Model,
    out: Annotated[Path, typer.Option(help="The new folder; its name is the site's.", show_default=False)],
    labels: Annotated[str, typer.Option(help="All sites' classes in order, such as no,yes.", show_default=False)],
    plain: Plain = False,
    selection: SelectionWay = "states",
    seed: Seed = None,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Make one site's rows for a run with Flower: labelled texts pass through GHOST, ids and a stamp come out."""
    file = columns.texts(source)
    from milkglass.federated.prepare import examples_of, require_free
    from milkglass.federated.prepare import prepare as made
    from milkglass.federated.rows import REPORT_FILE, report_of
    from milkglass.models.resolve import resolve
    from milkglass.sanitizers.ghost.tally import weak_spots

    names = [name.strip() for name in labels.split(",")]
    if len(names) < 2 or len({*names}) < len(names) or "" in names:
        raise UsageError("--labels names fewer than 2 classes, or one twice", "give all sites' classes: no,yes")
    agreed = {name: number for number, name in enumerate(names)}
    require_free(out)
    count = len(examples_of(file, agreed))
    folder = resolve(model)
    if plain:
        refuse_unused("with --plain", {"--selection": None if selection == "states" else selection})
        note(PLAIN)
    with bars(as_json) as stage:
        ghost = None if plain else _ghost(folder, selection, stage)
        if ghost is not None:
            _tell_time(ghost, [file], as_json)
        with _resumed(out, plain):
            rows: SiteRows = made(file, out, agreed, folder, ghost, seed, stage("prepare", count))
    document = {"out": str(out), "site": out.name, "texts": len(rows), "classes": len(names), "ghost": not plain}
    report = report_of(out)
    info = f"prepared {len(rows):,} texts for site {out.name} in {out}"
    info += "" if report is None else f"\n{weak_spots(report)}; {out / REPORT_FILE} has more"
    emit(as_json, {**document, "report": report}, lambda: info)


def prepared(
    files: Mapping[str, Source], into: Path, labels: Mapping[str, int], model: Path, plain: bool,
    selection: SelectionMethod, seed: int | None, stage: Stage, as_json: bool = False,
) -> None:  # fmt: skip
    """Prepares each site's rows, except those that an interrupted run has already.

    Raises:
        UsageError: those rows are of another kind, or the sites' files changed.
    """
    from milkglass.federated.ghost_stage import begin, remove_finished
    from milkglass.federated.prepare import matches, prepare
    from milkglass.rows.examples import summarise

    begin(into, files, seed)
    left = {name: path for name, path in files.items() if not (into / name).exists()}
    for name in files:
        if name not in left:
            matches(files[name], into / name, labels, None if plain else selection, model)
            remove_finished(into / name)
    ghost = None if plain or not left else _ghost(model, selection, stage)
    if ghost is not None:
        _tell_time(ghost, list(left.values()), as_json)
    for name, path in left.items():
        with _resumed(into / name, plain):
            prepare(path, into / name, labels, model, ghost, seed, stage(f"prepare {name}", summarise(path).rows))


def _resumed(site: Path, plain: bool) -> AbstractContextManager[None]:
    """Reports what an interruption left, and what another one leaves."""
    from milkglass.federated.ghost_stage import parts_folder

    parts = parts_folder(site)
    if parts.is_dir() and not plain:
        note(f"site {site.name}: going on with an interrupted preparation")
    return resumable(parts)


def _ghost(model: Path, way: SelectionMethod, stage: Stage) -> Ghost:
    from milkglass.sanitizers.ghost.ghost import Ghost
    from milkglass.sanitizers.ghost.selection import Selection

    progress = stage("find shadows", 0)
    result = Ghost.open(model, selection=Selection(way))
    progress(1)
    if way in OTHER_WAYS:
        note(OTHER_WAYS[way])
    return result


def _tell_time(ghost: Ghost, sources: Sequence[Source], as_json: bool) -> None:
    """How long a selection by hidden states will take, by that of a few texts, which are done again later."""
    from milkglass.rows.examples import read_examples

    texts = sorted((one.text for source in sources for one in read_examples(source)), key=len)
    if as_json or ghost.selection.way != "states" or len(texts) < FEW:
        return
    sample = [texts[round(share * (len(texts) - 1))] for share in QUANTILES]
    ghost.encode(texts)  # one that is too long is refused before
    started = time.monotonic()
    ghost.sanitize(sample)
    seconds = (time.monotonic() - started) / len(sample) * len(texts)
    note(f"{len(texts):,} texts pass through ghost, in about {duration(seconds)} here; {FASTER}")

"""`milkglass federated`: sites that share gradients of one model; their texts pass through GHOST first."""

from __future__ import annotations

import shlex
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass.cli.federated_audit import audit
from milkglass.cli.ui.columns import ROW_FORMATS, ColumnOptions, note_columns
from milkglass.cli.ui.options import AsJson, refuse_unused, with_options
from milkglass.cli.ui.terminal import emit, note, note_resumption, progress_bars, table_text
from milkglass.errors import UsageError
from milkglass.parameters import Limit
from milkglass.progress import Stage, duration_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from milkglass.federated.rows import SiteRows
    from milkglass.federated.state import FederatedRun
    from milkglass.rows.data_file import Source
    from milkglass.sanitizers.ghost.ghost import Ghost
    from milkglass.sanitizers.ghost.selection import SelectionMethod


MIN_TEXTS_TIMED = 8  # with fewer texts, the time that GHOST will take is not announced
# The quantiles of the texts' lengths at which texts are timed: as many texts as GHOST takes at once (TEXTS_PER_PART)
LENGTH_QUANTILES = (0.2, 0.4, 0.6, 0.8)
FASTER_HINT = "--selection nearest takes seconds, and a model may learn less from such shadows"
SELECTION_NOTES = {
    "random": "--selection random is not the paper's: a model learns least from shadows drawn at random (its Table 7)",
    "nearest": "--selection nearest is not the paper's: each token always has the same shadow, and a model may learn "
    "less (its Table 7)",
}
PLAIN_WARNING = (
    "warning: --plain: texts do not pass through ghost; anyone who sees a gradient can read the texts behind it"
)
ModelOption = Annotated[
    str, typer.Option(help="An encoder or a decoder: a folder, a hub id (hf:owner/name), demo:minilm or demo:smollm2.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Leave the texts unchanged, for comparison only.")]
SelectionOption = Annotated[
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
LARGE_UPDATE_BYTES = 100_000_000  # bytes of all updates of a run, above which their size is reported
federated_commands = typer.Typer(
    help="Train with sites that keep their texts and share gradients.", no_args_is_help=True
)


@with_options
def prepare(
    source: Annotated[Path, typer.Argument(metavar="FILE", help=f"A site's labelled texts: {ROW_FORMATS}.")],
    model: ModelOption,
    out: Annotated[Path, typer.Option(help="The new folder; its name is the site's.", show_default=False)],
    labels: Annotated[str, typer.Option(help="All sites' classes in order, such as no,yes.", show_default=False)],
    plain: Plain = False,
    selection: SelectionOption = "states",
    seed: Seed = None,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Make one site's rows for a run with Flower: labelled texts pass through GHOST and are written as ids.

    A stamp beside them names the model, the method and its settings.
    """
    file = columns.read_texts(source)
    from milkglass.federated.prepare import examples_of, prepare_site, require_free
    from milkglass.federated.rows import REPORT_FILE, report_of
    from milkglass.models.resolve import resolve_model
    from milkglass.sanitizers.ghost.tally import weak_spots

    names = [name.strip() for name in labels.split(",")]
    if len(names) < 2 or len({*names}) < len(names) or "" in names:
        raise UsageError("--labels names fewer than 2 classes, or one twice", "give all sites' classes: no,yes")
    label_numbers = {name: number for number, name in enumerate(names)}
    require_free(out)
    count = len(examples_of(file, label_numbers))
    folder = resolve_model(model)
    if plain:
        refuse_unused("with --plain", {"--selection": None if selection == "states" else selection})
        note(PLAIN_WARNING)
    with progress_bars(as_json) as stage:
        ghost = None if plain else _open_ghost(folder, selection, stage)
        if ghost is not None:
            _announce_duration(ghost, [file], as_json)
        with _note_site_resumption(out, plain):
            rows: SiteRows = prepare_site(file, out, label_numbers, folder, ghost, seed, stage("prepare", count))
    document = {"out": str(out), "site": out.name, "texts": len(rows), "classes": len(names), "ghost": not plain}
    report = report_of(out)
    text = f"prepared {len(rows):,} texts for site {out.name} in {out}"
    text += "" if report is None else f"\n{weak_spots(report)}; {out / REPORT_FILE} has more"
    emit(as_json, {**document, "report": report}, lambda: text)


def prepare_sites(
    files: Mapping[str, Source], out_folder: Path, labels: Mapping[str, int], model: Path, is_plain: bool,
    selection: SelectionMethod, seed: int | None, stage: Stage, as_json: bool = False,
) -> None:  # fmt: skip
    """Prepares the rows of each site, except those that an interrupted run has prepared already.

    Args:
        files: the sites' files by the sites' names.
        out_folder: the folder for a folder of each site.
        labels: the numbers of the classes by name.
        model: the model's folder.
        is_plain: whether the texts do not pass through GHOST.
        selection: how GHOST selects shadows.
        seed: makes the shadows repeatable. None: secret ones are drawn.
        stage: starts a stage whose progress is shown.
        as_json: whether no estimate of the time is printed.

    Raises UsageError if the interrupted run had other settings, or the sites' files have changed.
    """
    from milkglass.federated.ghost_stage import begin_or_continue_run, remove_finished
    from milkglass.federated.prepare import prepare_site, require_match
    from milkglass.rows.examples import summarise

    begin_or_continue_run(out_folder, files, seed)
    unfinished_files = {name: path for name, path in files.items() if not (out_folder / name).exists()}
    for name in files:
        if name not in unfinished_files:
            require_match(files[name], out_folder / name, labels, None if is_plain else selection, model)
            remove_finished(out_folder / name)
    ghost = None if is_plain or not unfinished_files else _open_ghost(model, selection, stage)
    if ghost is not None:
        _announce_duration(ghost, list(unfinished_files.values()), as_json)
    for name, path in unfinished_files.items():
        with _note_site_resumption(out_folder / name, is_plain):
            prepare_site(
                path, out_folder / name, labels, model, ghost, seed, stage(f"prepare {name}", summarise(path).row_count)
            )


def _note_site_resumption(site_folder: Path, is_plain: bool) -> AbstractContextManager[None]:
    """Prints that an interrupted preparation goes on. Returns a context that prints where an interruption leaves it.

    Args:
        site_folder: the folder to prepare.
        is_plain: whether the texts do not pass through GHOST. Nothing is resumed then.
    """
    from milkglass.federated.ghost_stage import parts_folder

    parts = parts_folder(site_folder)
    if parts.is_dir() and not is_plain:
        note(f"site {site_folder.name}: going on with an interrupted preparation")
    return note_resumption(parts)


def _open_ghost(model: Path, selection: SelectionMethod, stage: Stage) -> Ghost:
    """Opens GHOST for a model's folder. For a selection that is not the paper's, prints how it differs."""
    from milkglass.sanitizers.ghost.ghost import Ghost
    from milkglass.sanitizers.ghost.selection import SelectionSettings

    progress = stage("find shadows", 0)
    ghost = Ghost.open(model, selection=SelectionSettings(selection))
    progress(1)
    if selection in SELECTION_NOTES:
        note(SELECTION_NOTES[selection])
    return ghost


def _announce_duration(ghost: Ghost, sources: Sequence[Source], as_json: bool) -> None:
    """Prints how long a selection by hidden states will take, which it measures on a few texts.

    Nothing is printed for few texts, or for another selection.

    Args:
        ghost: replaces the tokens.
        sources: the files whose texts will be sanitized.
        as_json: whether nothing is printed.

    Raises EmptyText or TooLong for a text that cannot be encoded.
    """
    from milkglass.rows.examples import read_examples

    texts = sorted((example.text for source in sources for example in read_examples(source)), key=len)
    if as_json or ghost.selection.way != "states" or len(texts) < MIN_TEXTS_TIMED:
        return
    sample = [texts[round(share * (len(texts) - 1))] for share in LENGTH_QUANTILES]
    ghost.encode(texts)  # refuses a text that is too long before others are timed
    start_time = time.monotonic()
    ghost.sanitize(sample)
    seconds = (time.monotonic() - start_time) / len(sample) * len(texts)
    note(f"{len(texts):,} texts pass through ghost, in about {duration_text(seconds)} here; {FASTER_HINT}")


# --- run --------------------------------------------------------------------------------------------------------------
@federated_commands.command()
@with_options
def run(
    sites: Annotated[Path, typer.Argument(metavar="SITES", help=f"A folder with a file a site: {ROW_FORMATS}.")],
    model: ModelOption,
    out: Annotated[Path, typer.Option(help="The run's folder. An interrupted run is continued.", show_default=False)],
    rounds: Annotated[
        int, typer.Option(help="Rounds in total. A finished run continues where this is more than it has.")
    ] = 3,
    method: Annotated[
        Literal["fedsgd", "fedavg"], typer.Option(help="One step a round, or one pass over all rows.")
    ] = "fedsgd",
    learning_rate: Annotated[float, typer.Option("--lr", help="The learning rate.")] = 0.05,
    batch_size: Annotated[int, typer.Option(help="Texts of a step.")] = 8,
    minimum: Annotated[int, typer.Option(help="The smallest number of sites with which a round is done.")] = 1,
    shield: Annotated[
        str, typer.Option(help="A defence of the gradients besides GHOST, such as gaussian or dp-sgd:noise=0.5.")
    ] = "none",
    plain: Plain = False,
    selection: SelectionOption = "states",
    seed: Seed = None,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Train a classifier over the sites of SITES, in this process, and record every update as a server would see it."""
    start_time = time.monotonic()
    from milkglass.federated.checks import GhostDemand
    from milkglass.federated.prepare import labels_of, site_files
    from milkglass.federated.rows import report_of
    from milkglass.federated.run import InProcessSites, run_digest, run_settings, train
    from milkglass.federated.site import FederatedTraining, Site, weights_of
    from milkglass.federated.state import FederatedRun, require_run_or_new_folder
    from milkglass.files import require_writable
    from milkglass.gradient_defences.catalogue import name_and_parameters, parse_gradient_defence
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.resolve import resolve_model
    from milkglass.sanitizers.files import guarantee_in_words
    from milkglass.threat.training_step import SharedStep

    Limit(0, excludes_low=True).require(learning_rate, "--lr", "0.05 is the default")
    for option, value in (("--rounds", rounds), ("--batch-size", batch_size), ("--minimum", minimum)):
        Limit(1).require(value, option, "leave it out for the default")
    training = FederatedTraining(method, rounds, learning_rate, batch_size, minimum)
    defence = parse_gradient_defence(shield)
    require_run_or_new_folder(out)
    require_writable(out)
    paths = site_files(sites)
    _require_site_files(paths, out)
    files = {name: columns.other_file(path) for name, path in paths.items()}
    labels = labels_of(list(files.values()))
    for file in files.values():
        note_columns(file)
    folder = resolve_model(model)
    digest = Checkpoint.open(folder).digest()
    if plain:
        refuse_unused("with --plain", {"--selection": None if selection == "states" else selection})
        note(PLAIN_WARNING)
    with progress_bars(as_json) as stage:
        prepare_sites(files, out / "sites", labels, folder, plain, selection, seed, stage, as_json)
        step = SharedStep.open(folder, "classification", len(labels), seed or 0)
        prepared_sites = [Site(name, out / "sites" / name, defence) for name in files]
        job, weights = run_digest(digest, prepared_sites, training, len(labels), seed or 0), weights_of(step)
        settings = run_settings(training, len(labels), seed or 0, "states" if plain else selection)
        federated_run = FederatedRun.open(out, job, weights, settings)
        if federated_run.finished_rounds and not as_json:
            note(f"going on after round {len(federated_run.finished_rounds)}")
        rounds_left = max(0, rounds - len(federated_run.finished_rounds))
        update_bytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
        total_bytes = rounds_left * len(prepared_sites) * update_bytes
        if total_bytes > LARGE_UPDATE_BYTES and not as_json:
            note(f"updates are kept as the server sees them: {total_bytes / 1e9:.1f} GB in {out}")
        progress = stage("train", rounds_left)
        in_process_sites = InProcessSites(
            prepared_sites, step, None if plain else GhostDemand(folder, digest, selection_method=selection)
        )
        with note_resumption(out, "finished rounds are"):
            federated_run = train(federated_run, in_process_sites, step, training, note, progress)
    document = {
        "out": str(out), "method": method, "rounds": len(federated_run.finished_rounds), "sites": list(files),
        "classes": len(labels), "ghost": not plain, "selection": None if plain else selection,
        "shield": defence.name, "shield_parameters": name_and_parameters(defence),
        "shield_guarantee": guarantee_in_words(defence.guarantee, seed is not None),
        "shield_spent": guarantee_in_words(
            defence.guarantee_after(len(federated_run.finished_rounds)), seed is not None
        ),
        "ghost_reports": {prepared_site.name: report_of(prepared_site.folder) for prepared_site in prepared_sites},
        "missing": [list(record.missing) for record in federated_run.finished_rounds],
        "update_lengths": [record.update_norm for record in federated_run.finished_rounds],
        "losses": [record.loss for record in federated_run.finished_rounds],
        "weights": str(federated_run.weights_file), "seconds": round(time.monotonic() - start_time, 2),
    }  # fmt: skip
    audit_command = f"milkglass federated audit {shlex.quote(str(out))} --model {shlex.quote(model)}"
    site, source = next(iter(paths.items()))
    audit_command += f" --site {site} --text {shlex.quote(str(source))}{columns.option_text()}"
    audit_command += "" if shield == "none" else f" --shield {shlex.quote(shield)}"
    emit(as_json, document, lambda: _run_summary(document, federated_run, audit_command))


def _run_summary(document: dict[str, Any], federated_run: FederatedRun, audit_command: str) -> str:
    """Returns the result of a run, whose JSON is `document`, as text. `audit_command` is suggested next."""
    from milkglass.sanitizers.ghost.tally import weak_spots

    rows: list[tuple[str, ...]] = [("round", "loss before", "length of the update", "dropped out")]
    for number, record in enumerate(federated_run.finished_rounds, start=1):
        loss = "unknown" if record.loss is None else f"{record.loss:.4f}"
        rows.append((str(number), loss, f"{record.update_norm:.4g}", ", ".join(record.missing) or "none"))
    crossing = "nothing: the texts are unchanged (--plain)"
    if document["ghost"]:
        crossing = f"ghost, selection {document['selection']}"
    reports = {name: report for name, report in document["ghost_reports"].items() if report is not None}
    spent_text = f"; all together: {document['shield_spent']}" if document["shield_spent"] else ""
    promise = f"guarantee: {document['shield_guarantee'] or 'none'}{spent_text}"
    shadows_prefix = "the shadows in " if document["ghost"] else ""
    return "\n".join(
        [
            f"{len(federated_run.finished_rounds)} rounds of {document['method']} over {len(document['sites'])} sites "
            f"in {duration_text(document['seconds'])}",
            table_text(rows),
            f"before the gradients: {crossing}; guarantee: none",
            *(f"- site {name}: {weak_spots(report)}" for name, report in reports.items()),
            f"loss: nats a text, of {shadows_prefix}each round's first batches; no site sends it",
            f"on the gradients: {document['shield_parameters']}; {promise}",
            f"classes: {document['classes']}; next, what the server read: {audit_command}",
            f"weights: {shlex.quote(document['weights'])}; what the server saw: "
            f"{shlex.quote(document['out'] + '/updates')}",
        ]
    )


def _require_site_files(files: Mapping[str, Path], out: Path) -> None:
    """Raises UsageError if a run has prepared a site whose file is missing."""
    sites_folder = out / "sites"
    prepared_names = (
        sorted(path.name for path in sites_folder.iterdir() if path.is_dir()) if sites_folder.is_dir() else []
    )
    if missing := [name for name in prepared_names if name not in files and not name.startswith(".")]:
        raise UsageError(
            f"the run was begun with {', '.join(missing)}, whose file is missing",
            "restore the file, or give a new folder for a run without that site",
        )


federated_commands.command()(prepare)
federated_commands.command()(audit)

"""`milkglass federated audit`: what the updates that a server recorded reveal of one site's texts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass import files
from milkglass.cli.ui.columns import ColumnOptions
from milkglass.cli.ui.options import AsJson, require_file, with_options
from milkglass.cli.ui.terminal import emit, progress_bars, report_activity, table_text
from milkglass.errors import CorruptCheckpoint, UsageError

if TYPE_CHECKING:
    from milkglass.audit.updates.report import UpdateAudit, UpdateResult
    from milkglass.audit.updates.scenes import PublicSource
    from milkglass.rows.data_file import DataFile


@with_options
def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of `federated run`, or of a Flower server.")],
    model: Annotated[str, typer.Option(help="The model that was trained, as it was before.")],
    site: Annotated[str, typer.Option(help="The site whose updates are attacked.")],
    text: Annotated[Path, typer.Option("--text", help="The site's own file, which it was prepared from.")],
    rows: Annotated[
        Path | None, typer.Option(help="The site's prepared folder.  [default: RUN/sites/SITE]", show_default=False)
    ] = None,
    attacks: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between them, such as dager,lamp.  [default: those that fit and end soon; dlg, "
            "tag, lamp, grab and shadow-generation only when named]",
            show_default=False,
        ),
    ] = None,
    public: Annotated[
        Path | None,
        typer.Option(
            help="Text that an attacker may have, the more like the site's the better; the site's texts that are not "
            "attacked are public text in any case.",
            show_default=False,
        ),
    ] = None,
    shield: Annotated[str, typer.Option(help="What --shield of `federated run` was: attackers know it.")] = "none",
    budget: Annotated[
        str, typer.Option(help="How long all attacks may take, by the clock: 90s, 2m, 1h; a bare number is seconds.")
    ] = "2m",
    out: Annotated[Path | None, typer.Option(help="A new file for the figures, as JSON.")] = None,
    readings: Annotated[
        Path | None, typer.Option(help="A new file for what was read, beside the texts: as private as they are.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="A new file for the report, as HTML, with examples: as private as the texts.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of attackers' draws and of intervals.")] = 0,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Attack the updates of one site as a server sees them. Nothing is sent anywhere.

    What is recovered is graded against the site's own texts and against what was really trained on.
    """
    require_file(text, "give the site's own file")
    if public is not None:
        require_file(public, "give a file with a text a line")
    for path in (out, readings, page):
        if path is not None:
            files.require_new(path)
    from milkglass.threat.budget import Budget

    Budget.parse(budget)  # a mistake is reported before anybody waits
    _require_site(run, site, rows)
    from milkglass.federated.state import require_begun_run

    require_begun_run(run)
    with report_activity(as_json):
        file, public_file = columns.read_texts(text), columns.read_optional(public)
        update_audit, reading_rows = _attack_updates(
            run, model, site, file, public_file, rows, attacks, shield, budget, seed, as_json
        )
    _write_reports(update_audit, reading_rows, out, readings, page)
    paths = {"figures": out, "what was read, private": readings, "the page, private": page}
    emit(as_json, update_audit.to_json(), lambda: _report_text(update_audit, paths))


def _attack_updates(
    run: Path, model: str, site: str, file: DataFile, public: DataFile | None, rows: Path | None, attacks: str | None,
    shield: str, budget: str, seed: int, as_json: bool,
) -> tuple[UpdateAudit, list[dict[str, Any]]]:  # fmt: skip
    """Attacks a site's updates. Returns the figures, and what each attack read of each update, which is private.

    The arguments are the options of `audit`; `file` and `public` are the files of --text and --public.
    """
    names = None if attacks is None else [name.strip() for name in attacks.split(",")]
    from milkglass.audit.updates.attack import audit_updates, chosen_attack_names
    from milkglass.audit.updates.replay import RecordedRun, SiteTexts
    from milkglass.audit.updates.scenes import AuditedSite
    from milkglass.gradient_defences.catalogue import parse_gradient_defence
    from milkglass.models.resolve import resolve_model
    from milkglass.sanitizers.table import open_table
    from milkglass.threat.budget import Budget

    chosen_attack_names(names, uses_ghost=True)
    defence, source, folder = parse_gradient_defence(shield), _public_source(public), resolve_model(model)
    site_texts = SiteTexts(file, rows or run / "sites" / site, folder)
    with progress_bars(as_json) as stage:
        stage("do the rounds again", 0)(1)
        audited = AuditedSite(RecordedRun(run, site, folder), site_texts, open_table(folder)[0], source, defence)
        update_audit, reading_rows = audit_updates(
            audited, names, Budget.parse(budget, time.monotonic), seed, lambda steps: stage("attack", steps)
        )
    return update_audit, reading_rows


def _require_site(run: Path, site: str, rows: Path | None) -> None:
    """Raises UsageError if the run has no rows of this site, and no other folder is given for them."""
    from milkglass.federated.prepare import require_name

    require_name(site)
    sites_folder = run / "sites"
    if rows is not None or (sites_folder / site).is_dir():
        return
    if _was_interrupted(sites_folder, site):
        raise UsageError(
            f"{run} has no rows of a site {site}: the preparation of its sites was interrupted",
            "run the same `milkglass federated run` command again",
        )
    folders = sites_folder.iterdir() if sites_folder.is_dir() else []
    # A folder whose name begins with a dot is temporary
    names = sorted(folder.name for folder in folders if folder.is_dir() and not folder.name.startswith("."))
    hint = f"its sites: {', '.join(names)}" if names else "give the site's prepared folder with --rows"
    raise UsageError(f"{run} has no rows of a site {site}", hint)


def _was_interrupted(sites_folder: Path, site: str) -> bool:
    """Returns whether a run began to prepare this site and was interrupted before its rows were complete."""
    from milkglass.federated.ghost_stage import RUN_RECORD_FILE, parts_folder
    from milkglass.models.checkpoint import read_json

    if parts_folder(sites_folder / site).is_dir():
        return True
    try:
        return site in read_json(sites_folder / RUN_RECORD_FILE)["sites"]
    except (CorruptCheckpoint, OSError, KeyError, TypeError):
        return False  # `federated run` reports a damaged record


def _public_source(public: DataFile | None) -> PublicSource:
    """Returns the texts of a file that an attacker has, each with its second text and the messages of its row."""
    from milkglass.audit.updates.scenes import PublicSource
    from milkglass.rows.examples import examples_of

    if public is None:
        return PublicSource()
    texts = [
        " ".join([example.text, example.pair or "", *(message["content"] for message in example.messages)]).strip()
        for example in examples_of(public)
    ]
    return PublicSource(texts, public.name)


def _write_reports(
    update_audit: UpdateAudit,
    reading_rows: Sequence[Mapping[str, Any]],
    out: Path | None,
    readings: Path | None,
    page: Path | None,
) -> None:
    """Writes the figures as JSON, what was read as JSON Lines, and the page, each if there is a file for it."""
    from milkglass.audit.updates.page import render

    if out is not None:
        files.write(out, json.dumps(update_audit.to_json(), indent=1, allow_nan=False) + "\n")
    if readings is not None:
        files.write(readings, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in reading_rows))
    if page is not None:
        files.write(page, render(update_audit, reading_rows))


# --- in words ---------------------------------------------------------------------------------------------------------
def _report_text(update_audit: UpdateAudit, files: Mapping[str, Path | None]) -> str:
    """Returns the audit as text, with the path of each file that was written after its label."""
    lines = [
        update_audit.to_json()["verdict"],
        "",
        *([_result_table(update_audit), ""] if update_audit.finished_results else []),
    ]
    lines += [f"- {note}" for note in update_audit.notes()]
    lines += [f"{label}: {path}" for label, path in files.items() if path is not None]
    return "\n".join(lines)


def _result_table(update_audit: UpdateAudit) -> str:
    """Returns the table of results as text. What was trained on has columns only if it is not the texts themselves."""
    header = ("attack", "the texts: tokens", "ROUGE-1", "what was trained on: tokens", "ROUGE-1")
    column_count = len(header) if update_audit.uses_ghost else 3
    return table_text(
        [header[:column_count], *(_result_row(outcome)[:column_count] for outcome in update_audit.finished_results)]
    )


def _result_row(outcome: UpdateResult) -> tuple[str, ...]:
    """Returns an attack's row in the table of results."""
    from milkglass.audit.updates.report import token_share

    trained_figures = (
        ("", "")
        if outcome.trained_measures is None
        else (str(token_share(outcome.trained_measures)), str(outcome.trained_measures["rouge-1"]))
    )
    attack = outcome.attack + (", not finished" if outcome.cut else "")
    return attack, str(outcome.token_share), str(outcome.rouge), *trained_figures

"""`milkglass federated audit`: what the updates that a server recorded reveal of one site's texts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.audit import sleeping_threads
from milkglass.cli.ui.columns import ColumnOptions
from milkglass.cli.ui.options import AsJson, require_file, with_options
from milkglass.cli.ui.terminal import at_work, bars, emit, table
from milkglass.errors import CorruptCheckpoint, UsageError

if TYPE_CHECKING:
    from milkglass.audit.updates.report import UpdateAudit, UpdateResult
    from milkglass.audit.updates.scenes import PublicSource
    from milkglass.rows.data_file import DataFile


KNOWN = "attackers know the model in every round, the labels and the lengths, and have"


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
    seed: Annotated[int, typer.Option(help="Of attackers' draws and of intervals.")] = 0,
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
    for path in (out, readings):
        if path is not None and path.exists():
            raise UsageError(f"{path} exists already", "give a new file")
    sleeping_threads()
    from milkglass.threat.budget import Budget

    Budget.parse(budget)  # a mistake is reported before anybody waits
    _require_site(run, site, rows)
    from milkglass.federated.state import require_begun

    require_begun(run)
    with at_work(as_json):
        file, other = columns.texts(text), columns.others(public)
        result, read = _leakage(run, model, site, file, other, rows, attacks, shield, budget, seed, as_json)
    _write(out, readings, result, read)
    emit(as_json, result.to_json(), lambda: _page(result, out, readings))


def _leakage(
    run: Path, model: str, site: str, file: DataFile, other: DataFile | None, rows: Path | None, attacks: str | None,
    shield: str, budget: str, seed: int, as_json: bool,
) -> tuple[UpdateAudit, list[dict[str, Any]]]:  # fmt: skip
    """Attacks the updates of a site, and returns the figures and what was read."""
    names = None if attacks is None else [one.strip() for one in attacks.split(",")]
    from milkglass.audit.updates.attack import leakage, require_names
    from milkglass.audit.updates.replay import RecordedRun, SiteTexts
    from milkglass.audit.updates.scenes import AuditedSite
    from milkglass.gradient_defences.catalogue import gradient_defence_named
    from milkglass.models.resolve import resolve
    from milkglass.sanitizers.table import opened
    from milkglass.threat.budget import Budget

    require_names(names, ghost=True)
    defence, source, folder = gradient_defence_named(shield), _source(other), resolve(model)
    own = SiteTexts(file, rows or run / "sites" / site, folder)
    with bars(as_json) as stage:
        stage("do the rounds again", 0)(1)
        audited = AuditedSite(RecordedRun(run, site, folder), own, opened(folder)[0], source, defence)
        result, read = leakage(
            audited, names, Budget.parse(budget, time.monotonic), seed, lambda steps: stage("attack", steps)
        )
    return result, read


def _require_site(run: Path, site: str, rows: Path | None) -> None:
    """Raises UsageError where the run has no such site, or its rows are somewhere else."""
    from milkglass.federated.prepare import require_name

    require_name(site)
    here = run / "sites"
    if rows is not None or (here / site).is_dir():
        return
    if _unfinished(here, site):
        raise UsageError(
            f"{run} has no rows of a site {site}: the preparation of its sites was interrupted",
            "run the same `milkglass federated run` command again",
        )
    folders = here.iterdir() if here.is_dir() else []
    names = sorted(one.name for one in folders if one.is_dir() and not one.name.startswith("."))  # else a temporary one
    hint = f"its sites: {', '.join(names)}" if names else "give the site's prepared folder with --rows"
    raise UsageError(f"{run} has no rows of a site {site}", hint)


def _unfinished(sites: Path, site: str) -> bool:
    """Whether the run was begun with this site, whose rows are not there yet."""
    from milkglass.federated.ghost_stage import BEGUN, parts_folder
    from milkglass.models.checkpoint import read_json

    if parts_folder(sites / site).is_dir():
        return True
    try:
        return site in read_json(sites / BEGUN)["sites"]
    except (CorruptCheckpoint, OSError, KeyError, TypeError):
        return False  # `federated run` says what is wrong with it


def _source(public: DataFile | None) -> PublicSource:
    from milkglass.audit.updates.scenes import PublicSource
    from milkglass.rows.examples import examples_of

    if public is None:
        return PublicSource()
    texts = [
        " ".join([one.text, one.pair or "", *(message["content"] for message in one.messages)]).strip()
        for one in examples_of(public)
    ]
    return PublicSource(texts, public.name)


def _write(out: Path | None, readings: Path | None, result: UpdateAudit, read: Sequence[Mapping[str, Any]]) -> None:
    from milkglass import files

    if out is not None:
        files.write(out, json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n")
    if readings is not None:
        files.write(readings, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in read))


# --- in words ---------------------------------------------------------------------------------------------------------
def _page(result: UpdateAudit, out: Path | None, readings: Path | None) -> str:
    lines = [result.to_json()["verdict"], "", *([_table(result), ""] if result.done else [])]
    lines += [f"- {one.attack}: {state}" for one in result.found if (state := _state(one))]
    lines += [f"- round {number + 1} is left out: {reason}" for number, reason in result.refused.items()]
    lines += _how_to_read(result)
    lines += [
        f"- attacked: {result.texts:,} texts in {len(result.rounds)} rounds (one that was in two counts twice)",
        f"- {KNOWN} {result.public_text}",
    ]
    if left_out := result.public["left_out"]:
        lines += [f"- {left_out:,} public texts contain an attacked text or are part of one: they are left out"]
    if result.ghost:
        other = "" if result.selection == "states" else ", which is not the paper's"
        lines += [f"- ghost's selection of shadows: {result.selection}{other}"]
    lines += [f"- {result.advice}"] if result.advice else []
    if any(one.attack.startswith("shadow-") for one in result.done):
        lines += ["- shadow-...: with all shadows, as an exact inversion would read them; tokens at their places"]
    lines += [f"figures: {out}"] if out else []
    lines += [f"what was read, private: {readings}"] if readings else []
    return "\n".join(lines)


def _table(result: UpdateAudit) -> str:
    head = ("attack", "the texts: tokens", "ROUGE-1", "what was trained on: tokens", "ROUGE-1")
    columns = len(head) if result.ghost else 3
    return table([head[:columns], *(_row(one)[:columns] for one in result.done)])


def _row(one: UpdateResult) -> tuple[str, ...]:
    from milkglass.audit.updates.report import tokens

    trained = ("", "") if one.trained is None else (str(tokens(one.trained)), str(one.trained["rouge-1"]))
    return (one.attack + (", not finished" if one.cut else ""), str(one.tokens), str(one.rouge), *trained)


def _state(one: UpdateResult) -> str:
    """Returns why there are no figures, or none of some rounds; "" where there are all."""
    if one.state != "done":
        return f"{one.state}: {one.reason}"
    if not one.left_out:
        return ""
    rounds = len(one.left_out) + len(one.rounds)
    return f"does not apply to {len(one.left_out)} of {rounds} rounds: {next(iter(one.left_out.values()))}"


def _how_to_read(result: UpdateAudit) -> list[str]:
    lines = []
    if result.done:
        lines += ["- in brackets: 95 % intervals over texts; ROUGE-1: how much of a text's words a reading has (F1)"]
    if any(one.cut for one in result.done):
        lines += ["- not finished: its share of --budget was over; more texts in a batch need more"]
    if result.floor:
        commonest = f"{100 * result.floor['commonest token']:.1f} %"
        lines += [f"- guessing alone: always the commonest token of these texts is right at {commonest} of all places"]
    return lines

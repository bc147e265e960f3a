"""`milkglass federated audit`: what the updates that a server recorded tell of one site's texts.

What this module does not know: any attack, how updates come about.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass.cli.ui.options import AsJson, require_file
from milkglass.cli.ui.terminal import bars, emit, table
from milkglass.errors import UsageError

if TYPE_CHECKING:
    from milkglass.audit.updates.auxiliary_text import PublicSource
    from milkglass.audit.updates.report import Found, Leakage, Reading

KNOWN = "attackers know the model in every round, the labels and the lengths, and have"


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
            help="Text that an attacker may have, the more like the site's the better.  "
            "[default: the demo's invented messages]",
            show_default=False,
        ),
    ] = None,
    shield: Annotated[str, typer.Option(help="What --shield of `federated run` was: attackers know it.")] = "none",
    budget: Annotated[str, typer.Option(help="How long all attacks may take: 90s, 2m, 1h.")] = "2m",
    out: Annotated[Path | None, typer.Option(help="A new file for the figures, as JSON.")] = None,
    readings: Annotated[
        Path | None, typer.Option(help="A new file for what was read, beside the texts: as private as they are.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of attackers' draws and of intervals.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Attack the updates of one site, as a server sees them, and grade what comes back against the site's own texts and
    against what was really trained on. Nothing is sent anywhere."""
    require_file(text, "give the site's .jsonl, .csv or .tsv file")
    if public is not None:
        require_file(public, "give a file with a text a line")
    for path in (out, readings):
        if path is not None and path.exists():
            raise UsageError(f"{path} exists already", "give a new file")
    from milkglass.threat.attack import Budget

    Budget.parse(budget)  # a mistake is told before anybody waits
    _require_site(run, site, rows)
    names = None if attacks is None else [one.strip() for one in attacks.split(",")]
    from milkglass.audit.updates.attack import leakage, require_names
    from milkglass.audit.updates.replay import RecordedRun, SiteTexts
    from milkglass.gradient_defences.catalogue import gradient_defence_named
    from milkglass.models.resolve import resolve
    from milkglass.sanitizers.tables.vocabulary import opened

    require_names(names, ghost=True)
    selected = gradient_defence_named(shield)
    folder = resolve(model)
    provided = _given(public)
    own = SiteTexts.of(text, rows or run / "sites" / site, folder)
    with bars(as_json) as stage:
        stage("do the rounds again", 0)(1)
        recorded = RecordedRun.open(run, site, folder)
        tokenizer, _ = opened(folder)
        limit = Budget.parse(budget)
        begin = lambda steps: stage("attack", steps)  # noqa: E731
        result, read = leakage(recorded, own, tokenizer, names, limit, seed, begin, provided, selected)
    _write(out, readings, result, read)
    emit(as_json, result.to_json(), lambda: _told(result, out, readings))


def _require_site(run: Path, site: str, rows: Path | None) -> None:
    """Raises UsageError where the run has no such site, or its rows are somewhere else."""
    from milkglass.federated.prepare import require_name

    require_name(site)
    here = run / "sites"
    if rows is None and not (here / site).is_dir():
        names = sorted(one.name for one in here.iterdir() if one.is_dir()) if here.is_dir() else []
        hint = f"its sites: {', '.join(names)}" if names else "give the site's prepared folder with --rows"
        raise UsageError(f"{run} has no rows of a site {site}", hint)


def _given(public: Path | None) -> PublicSource:
    """The text of a file; without one, what the project has: a few hundred invented messages, in English."""
    from milkglass.audit.updates.auxiliary_text import PublicSource
    from milkglass.client.data.texts import examples_of
    from milkglass.demo.workplace import read_rows

    if public is None:
        return PublicSource([one["text"] for one in read_rows("tickets_train.jsonl")], "the demo's invented messages")
    texts = [
        " ".join([one.text, one.pair or "", *(message["content"] for message in one.messages)]).strip()
        for one in examples_of(public)
    ]
    return PublicSource(texts, public.name, chosen=True)


def _write(out: Path | None, readings: Path | None, found: Leakage, read: Sequence[Reading]) -> None:
    from milkglass.audit.resume import write_private

    if out is not None:
        write_private(out, json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
    if readings is not None:
        lines = (
            {"attack": one.attack, "round": one.round, "texts": one.texts, "readings": one.readings} for one in read
        )
        write_private(readings, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))


def _told(found: Leakage, out: Path | None, readings: Path | None) -> str:
    trained = "what was trained on" if found.ghost else ""
    rows: list[tuple[str, ...]] = [("attack", "the texts: tokens", "ROUGE-1", f"{trained}: tokens", "ROUGE-1")]
    if not found.ghost:
        rows = [rows[0][:3]]
    done = [one for one in found.found if one.state == "done"]
    rows += [_row(one, found.ghost) for one in done]
    lines = [found.to_json()["verdict"], ""]
    lines += [table(rows), ""] if done else []
    lines += [f"- {one.attack}: {_state(one)}" for one in found.found if one.state != "done" or one.left_out]
    lines += [f"- round {number + 1} is left out: {reason}" for number, reason in found.refused.items()]
    attacked = f"- attacked: {found.texts:,} texts in {len(found.rounds)} rounds (one that was in two counts twice)"
    if done:
        lines += ["- in brackets: 95 % intervals over texts; ROUGE-1: how much of a text's words a reading has (F1)"]
    if any(one.cut for one in done):
        lines += ["- not finished: its share of --budget was over; more texts in a batch want more"]
    if found.floor:
        commonest = f"{100 * found.floor['commonest token']:.1f} %"
        lines += [f"- guessing alone: always the commonest token of these texts is right at {commonest} of all places"]
    lines += [
        attacked,
        f"- {KNOWN} {found.public}",
    ]
    if found.public.left_out:
        lines += [f"- {found.public.left_out:,} public texts hold an attacked text or are part of one: left out"]
    lines += [f"- {found.advice}"] if found.advice else []
    if any(one.state == "done" and one.attack.startswith("shadow-") for one in found.found):
        lines += [
            "- shadow-...: given all shadows, as an inversion at its best would read them; tokens at their places"
        ]
    lines += [f"figures: {out}"] if out else []
    lines += [f"what was read, private: {readings}"] if readings else []
    return "\n".join(lines)


def _row(one: Found, ghost: bool) -> tuple[str, ...]:
    from milkglass.audit.updates.report import rouge, tokens

    what = one.attack + (", not finished" if one.cut else "")
    row = (what, str(tokens(one.texts)), str(rouge(one.texts)))
    if not ghost:
        return row
    return (*row, *(("", "") if one.trained is None else (str(tokens(one.trained)), str(rouge(one.trained)))))


def _state(one: Found) -> str:
    if one.state != "done":
        return f"{one.state}: {one.reason}"
    reason = next(iter(one.left_out.values()))
    return f"does not apply to {len(one.left_out)} of {len(one.left_out) + len(one.rounds)} rounds: {reason}"

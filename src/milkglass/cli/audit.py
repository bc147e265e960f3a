"""`milkglass audit`: attack your own model, key and text."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.audit.report import preflight
from milkglass.cli.ui.columns import ROWS, ColumnOptions
from milkglass.cli.ui.options import (
    AsJson,
    KeyOptions,
    original,
    refuse_unused,
    require_file,
    same_command,
    with_options,
)
from milkglass.cli.ui.terminal import at_work, bars, emit, note, percent, resumable, table
from milkglass.errors import UsageError
from milkglass.progress import Stage, duration
from milkglass.threat.budget import DEFAULT_BUDGET, Budget

LARGER = 4  # times the budget, that an audit which did not finish asks for

if TYPE_CHECKING:
    from milkglass.audit.outcome import AttackResult
    from milkglass.audit.plan import TimeEstimate
    from milkglass.audit.report.result import Audit
    from milkglass.audit.scene import Scene
    from milkglass.client.key.file import UnlockedKey

SMALL_SAMPLE = 100  # attacked texts
SMALL = "The sample is small: {} texts were attacked, and every figure may be some points off; give more rows"


@partial(with_options, required=False)
def audit(
    context: typer.Context,
    options: KeyOptions,
    text: Annotated[
        Path | None, typer.Option("--text", help=f"Your texts: {ROWS}, or .txt with one a line.", show_default=False)
    ] = None,
    captured: Annotated[
        Path | None,
        typer.Option(
            help="Judge somebody else's client, without its key: JSON Lines, each with a text and what was sent for it "
            "(ids, vectors, or text). --model names the public model."
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            help="Judge an attested endpoint: JSON Lines, each with an answer's topic, and the sizes and times of its "
            "TLS records (docs/formats.md)."
        ),
    ] = None,
    layer: Annotated[
        int, typer.Option(min=0, help="Of captured vectors: how many layers the client runs before it sends.")
    ] = 0,
    server_model: Annotated[
        Path | None,
        typer.Option(
            help="Of captured ids: the folder of the model that the vendor's server runs, whose weights an attacker on "
            "the server has, too."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The folder for audit.html and audit.json.")] = Path("audit"),
    public: Annotated[
        Path | None, typer.Option("--public", help="Text of another kind that an attacker may have.")
    ] = None,
    known: Annotated[
        Path | None,
        typer.Option("--known", help="Texts you send that an attacker has word for word: templates, published pieces."),
    ] = None,
    server_transcript: Annotated[
        Path | None, typer.Option("--server-transcript", help="What a server recorded (`serve --record`).")
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="How long attacks may take, by the clock: 90s, 2m, 1h; a bare number is seconds. Scrambling the model "
            "before them is not counted, and they have 30 s in any case."
        ),
    ] = DEFAULT_BUDGET,
    rows: Annotated[int | None, typer.Option(help="Read only this many texts.")] = None,
    seed: Annotated[int, typer.Option(help="Decides which half of the texts is private, and every random draw.")] = 1,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Attack your own model, key and text, and write what is recovered into OUT. Nothing is sent anywhere.

    With --captured, attack what somebody else's client sent for texts of yours: the same attacks and the same page.
    With --records, read the topics of encrypted answers, which hardware does not hide; what is read is printed.
    """
    if records is not None:
        unused = {
            "--key": options.key, "--text": text, "--public": public, "--known": known, "--captured": captured,
            "--model": options.model, "--server-transcript": server_transcript, "--rows": rows,
        }  # fmt: skip
        refuse_unused("with --records", unused)
        require_file(records, "give a file in JSON Lines")
        from milkglass.audit import records as encrypted

        topics_audit = encrypted.audit(encrypted.read(records), seed, Budget.parse(budget))
        half = "half of them play an attacker's own recordings"
        summary = f"{topics_audit.answers:,} answers on {topics_audit.topics} topics; {half}"
        emit(as_json, topics_audit.to_json(), f"{summary}\n{table(topics_audit.rows())}")
        return
    if captured is not None:
        unused = {
            "--key": options.key, "--text": text, "--public": public, "--known": known,
            "--server-transcript": server_transcript, "--rows": rows,
        }  # fmt: skip
        refuse_unused("with --captured", unused)
        audit_captured(context, captured, options.model, server_model, layer, out, budget, seed, as_json)
        return
    if text is None:
        raise UsageError(
            "no text was given", "give --text FILE, --captured FILE for somebody else's client, or --records FILE"
        )
    refuse_unused("without --captured", {"--layer": layer or None, "--server-model": server_model})
    model = options.model
    options.require()
    texts = {"text": text, "public": public, "known": known}
    require_audit(out, budget, *texts.values())
    if rows is not None and rows < 20:
        raise UsageError(f"--rows {rows} leaves too few texts to say anything", "give 20 or more")
    opened = options.open()
    opened.key.require_whole()
    with at_work(as_json):
        _audit_key(context, opened, model, texts, server_transcript, out, budget, rows, seed, columns, as_json)


def _audit_key(
    context: typer.Context, unlocked: UnlockedKey, model: str | None, texts: Mapping[str, Path | None],
    server_transcript: Path | None, out: Path, budget: str, rows: int | None, seed: int, columns: ColumnOptions,
    as_json: bool,
) -> None:  # fmt: skip
    """Audits an opened key. `texts` are the audited text, public text and known text."""
    text = texts["text"]
    assert text is not None
    sources = columns.read_texts(text), columns.read_optional(texts["public"]), columns.read_optional(texts["known"])

    from milkglass.audit.key_audit import identity, note_in_usage
    from milkglass.audit.key_scene import AuditFiles, key_scene
    from milkglass.client.codec.codec import codec_of
    from milkglass.models.resolve import resolve
    from milkglass.threat import transcript_file

    codec = codec_of(unlocked, model)
    folder = resolve(model or unlocked.key.info.model)
    server_record = None if server_transcript is None else transcript_file.load(server_transcript)
    about = {**identity(unlocked, texts, server_transcript, rows, seed), **columns.changed_fields()}

    def staged(stage: Stage) -> Scene:
        return key_scene(unlocked.key, codec, folder, AuditFiles(*sources, rows, seed), stage, server_record)

    done = run_audit(staged, about, out, budget, seed, as_json)
    note_in_usage(unlocked.path, done[0])
    print_audit(context, done, out, as_json)


def audit_captured(
    context: typer.Context, path: Path, model: str | None, server_model: Path | None, layer: int, out: Path,
    budget: str, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Audits what somebody else's client sent."""
    if model is None:
        raise UsageError("--captured needs --model", "name the public model whose tokenizer the client uses")
    require_audit(out, budget, path)
    from milkglass.audit.captured import digest, read, scene_of

    rows, base = read(path), original(model)
    served = None if server_model is None else original(str(server_model))
    kinds = {"ids": "ids", "text": "replaced text", "vectors": "vectors"}
    note(f"{path.name}: {len(rows):,} texts and the {kinds[rows[0].kind]} that were sent for them")
    about = {"captured": digest(rows), "model": base.digest(), "seed": seed, "layer": layer}
    about |= {} if served is None else {"served": served.digest()}
    done = run_audit(lambda stage: scene_of(base, rows, seed, layer, served), about, out, budget, seed, as_json)
    print_audit(context, done, out, as_json)


def require_audit(out: Path, budget: str, *texts: Path | None) -> None:
    """Checks files and places before long work starts.

    Raises:
        UsageError: a text is not a file, or the audit cannot be written or would overwrite another.
    """
    for path in texts:
        if path is not None:
            require_file(path, "give a file with a text a line")
    sleeping_threads()
    preflight.require_audit(out, budget)


def sleeping_threads() -> None:
    """Lets threads that wait for each other sleep: on a busy machine they would use up --budget by spinning.

    OpenMP reads this once, when PyTorch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run_audit(
    staged: Callable[[Stage], Scene], identity: Mapping[str, Any], out: Path, budget: str, seed: int, as_json: bool
) -> tuple[Audit, Path, str]:
    """Runs any audit: the scene, all attacks on it, and the report in `out`.

    Args:
        staged: makes the scene.
        identity: all that decides the result, so that only the same audit goes on.

    Returns:
        The audit, its page, and a larger budget for attacks that did not end.
    """
    from milkglass.attacks.catalogue import ATTACKS
    from milkglass.audit.audit import ATTACKING_SHARE
    from milkglass.audit.key_audit import limited_threads, open_scene, run_and_write
    from milkglass.audit.plan import estimate, planned_count

    with bars(as_json) as stage:
        scene, work = open_scene(staged, identity, out, stage)
        plan = estimate(scene, ATTACKS, ATTACKING_SHARE * Budget.parse(budget).seconds)
        if not as_json:
            if finished := work.finished_count():
                note(f"an audit that was stopped goes on: {finished} of its attacks came to their end, and are kept")
            note(plan_text(plan, budget))
    whole_budget = Budget.parse(budget, time.monotonic)  # it begins now
    with bars(as_json, whole_budget.left) as stage:
        advance = stage("attack", planned_count(scene, ATTACKS))

        def progress(cell: AttackResult) -> None:
            advance(1)
            if not as_json and cell.state != "does not apply":
                note(f"  {result_line(cell)}")

        with resumable(work.folder), limited_threads():
            return *run_and_write(scene, work, out, whole_budget, seed, progress), larger_budget(plan, budget)


def plan_text(plan: TimeEstimate, budget: str) -> str:
    """Returns how long the attacks will take, and which ones the budget leaves no time for."""
    announcement = (
        f"attacks, the strongest first: about {duration(plan.seconds)} of processor time for "
        f"{plan.attack_count} of them"
    )
    if plan.open_ended_titles:
        announcement += f", and for {', '.join(plan.open_ended_titles).lower()} up to half of what is left"
    announcement += f"; at most {budget} (--budget). A busy machine reads less in that time."
    if plan.late_titles:
        enough = "" if math.isnan(plan.enough_seconds) else f"; --budget {larger_budget(plan, budget)} would do"
        late = ", ".join(plan.late_titles).lower()
        announcement += f"\ntoo little time is left for: {late}, which may read more{enough}"
    return announcement


def larger_budget(plan: TimeEstimate, budget: str) -> str:
    """Returns a budget that should suffice for all attacks; if that is not known, LARGER times the given one."""
    from milkglass.audit.audit import ATTACKING_SHARE

    unknown = math.isnan(plan.enough_seconds)
    return _budget_text(LARGER * Budget.parse(budget).seconds if unknown else plan.enough_seconds / ATTACKING_SHARE)


def print_audit(context: typer.Context, done: tuple[Audit, Path, str], out: Path, as_json: bool) -> None:
    """Prints an audit. `done` is what `run_audit` returned."""
    audit, page, budget_to_finish = done
    more = "" if not audit.unfinished else same_command(context, budget=budget_to_finish)
    emit(as_json, {"out": str(out), **audit.to_json()}, lambda: report_text(audit, page, more))


def _budget_text(seconds: float) -> str:
    """Returns a time as --budget takes it, in minutes, rounded up."""
    return f"{max(1, math.ceil(seconds / 60))}m"


def result_line(cell: AttackResult) -> str:
    """Returns the line that is printed when an attack ends."""
    what = f"{cell.label} ({cell.adversary})"
    if cell.state != "done":
        return f"{what}: {cell.state}, {cell.reason}"
    name, noun = ("tokens top-1", "of the tokens") if "tokens top-1" in cell.measures else ("bag f1", "F1 of words")
    short = ", not finished" if cell.cut else ""
    return f"{what}: {cell.measures[name]} {noun}, {cell.seconds:.0f} s{short}"


def report_text(audit: Audit, page: Path, more: str = "") -> str:
    """Returns the audit as text. `more` is the command that continues it with a larger budget."""
    from milkglass.audit.report.verdict import LABELS

    rows: list[tuple[str, ...]] = [("attack", "attacker", "tokens", "content")]
    for cell in audit.cells:
        what = cell.label + (", not finished" if cell.cut else "")
        least = "at least " if cell.cut else ""
        if "tokens top-1" in cell.measures:
            values = (cell.value(name) for name in ("tokens top-1", "content top-1"))
            shares = ("none sent" if math.isnan(value) else least + percent(value) for value in values)
            rows.append((what, cell.adversary, *shares))
        elif "bag f1" in cell.measures:
            rows.append((what, cell.adversary, f"words of a text, F1 {percent(cell.value('bag f1'))}", ""))
    return "\n".join(
        [
            f"{LABELS[audit.level].upper()}. {audit.verdict}",
            *([f"to go on where it stopped: {more}"] if more else []),
            "",
            table(rows),
            "",
            *([f"- {SMALL.format(audit.texts)}"] if audit.texts < SMALL_SAMPLE else []),
            *(f"- {one.title}: {one.raised_if}" for one in audit.warnings),
            "",
            str(page),
        ]
    )

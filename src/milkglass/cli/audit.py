"""`milkglass audit`: attack your own model, key and text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass import files
from milkglass.audit.report import preflight
from milkglass.cli.ui.columns import ROW_FORMATS, ColumnOptions
from milkglass.cli.ui.options import (
    AsJson,
    KeyOptions,
    command_line_options,
    open_original,
    refuse_unused,
    require_file,
    same_command,
    with_optional_key_and_server,
)
from milkglass.cli.ui.terminal import (
    emit,
    note,
    note_resumption,
    progress_bars,
    report_activity,
    set_activity,
    table_text,
)
from milkglass.errors import CodecError, UsageError
from milkglass.metrics.percent import percent
from milkglass.progress import Stage, duration_text
from milkglass.threat.budget import DEFAULT_BUDGET, Budget

if TYPE_CHECKING:
    from milkglass.audit.outcome import AttackResult
    from milkglass.audit.plan import TimeEstimate
    from milkglass.audit.report.result import Audit
    from milkglass.audit.scene import Scene
    from milkglass.client.key.file import UnlockedKey

LARGER_BUDGET_FACTOR = 4  # an unfinished audit asks for so many times its budget, if it is not known how much it needs
SMALL_SAMPLE = 100  # with fewer attacked texts, the report says that the sample is small
SMALL_SAMPLE_NOTE = (
    "The sample is small: {} texts were attacked, and every figure may be some points off; give more rows"
)


@with_optional_key_and_server
def audit(
    context: typer.Context,
    options: KeyOptions,
    text: Annotated[
        Path | None,
        typer.Option("--text", help=f"Your texts: {ROW_FORMATS}, or .txt with one a line.", show_default=False),
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
            help="How long the audit may take, by the clock: 90s, 2m, 1h; a bare number is seconds. Attacks have "
            "half of it at least, however long the preparation takes, and 30 s in any case."
        ),
    ] = DEFAULT_BUDGET,
    rows: Annotated[int | None, typer.Option(help="Read only this many texts.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Decides which half of the texts is private, and every random draw.")
    ] = 1,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Attack your own model, key and text, and write what is recovered into OUT. Nothing is sent anywhere.

    With --captured, attack what somebody else's client sent for texts of yours: the same attacks and the same page.
    With --records, read the topics of encrypted answers, which hardware does not hide; what is read is printed.
    """
    if records is not None:
        refuse_unused("with --records", command_line_options(context, {"records", "budget", "seed", "as_json"}))
        require_file(records, "give a file in JSON Lines")
        from milkglass.audit import records as encrypted

        topics_audit = encrypted.audit_endpoint(encrypted.read_answers(records), seed, Budget.parse(budget))
        half = "half of them play an attacker's own recordings"
        summary = f"{topics_audit.answer_count:,} answers on {topics_audit.topic_count} topics; {half}"
        emit(as_json, topics_audit.to_json(), f"{summary}\n{table_text(topics_audit.table_rows())}")
        return
    if captured is not None:
        used = {"captured", "model", "layer", "server_model", "public", "out", "budget", "seed", "as_json"}
        used |= set() if public is None else {"text_column", "delimiter", "skip_empty"}
        refuse_unused("with --captured", command_line_options(context, used))
        audit_captured(
            context, captured, public, options.model, server_model, layer, out, budget, seed, columns, as_json
        )
        return
    if text is None:
        raise UsageError(
            "no text was given", "give --text FILE, --captured FILE for somebody else's client, or --records FILE"
        )
    refuse_unused("without --captured", {"--layer": layer or None, "--server-model": server_model})
    model = options.model
    options.require()
    text_files = {"text": text, "public": public, "known": known}
    require_audit(out, budget, *text_files.values())
    if rows is not None and rows < 20:
        raise UsageError(f"--rows {rows} leaves too few texts to say anything", "give 20 or more")
    unlocked = options.open()
    unlocked.key.require_whole()
    whole_budget = Budget.parse(budget, time.monotonic)  # counts from here
    with report_activity(as_json):
        _audit_key(
            context, unlocked, model, text_files, server_transcript, out, whole_budget, rows, seed, columns, as_json
        )


def _audit_key(
    context: typer.Context, unlocked: UnlockedKey, model: str | None, text_files: Mapping[str, Path | None],
    server_transcript: Path | None, out: Path, budget: Budget, rows: int | None, seed: int, columns: ColumnOptions,
    as_json: bool,
) -> None:  # fmt: skip
    """Audits an opened key, and prints the report. The arguments are the options of `audit`.

    Args:
        text_files: the files "text", whose texts are attacked, "public" and "known", which an attacker has. None: no
            file.
    """
    text = text_files["text"]
    assert text is not None
    sources = (
        columns.read_texts(text),
        columns.read_optional(text_files["public"]),
        columns.read_optional(text_files["known"]),
    )

    from milkglass.audit.key_audit import audit_identity, record_audit_figures
    from milkglass.audit.key_scene import AuditFiles, key_scene
    from milkglass.client.codec.codec import codec_of
    from milkglass.models.resolve import resolve_model
    from milkglass.threat import transcript_file

    codec = codec_of(unlocked, model)
    folder = resolve_model(model or unlocked.key.info.model)
    server_record = None if server_transcript is None else transcript_file.load(server_transcript)
    full_identity = {**audit_identity(unlocked, text_files, server_transcript, rows, seed), **columns.changed_fields()}

    def build_scene(stage: Stage) -> Scene:
        return key_scene(unlocked.key, codec, folder, AuditFiles(*sources, rows, seed), stage, server_record)

    finished_audit = run_audit(build_scene, full_identity, out, budget, seed, as_json)
    record_audit_figures(unlocked.path, finished_audit[0])
    print_audit(context, finished_audit, out, as_json)


def audit_captured(
    context: typer.Context, path: Path, public: Path | None, model: str | None, server_model: Path | None, layer: int,
    out: Path, budget: str, seed: int, columns: ColumnOptions, as_json: bool,
) -> None:  # fmt: skip
    """Audits what somebody else's client sent, and prints the report. The arguments are the options of `audit`.

    The columns are those of the public texts. A captured row has fixed ones.

    Raises UsageError if no model is named or the audit cannot be written, CodecError if a row cannot be read.
    """
    if model is None:
        raise UsageError("--captured needs --model", "name the public model whose tokenizer the client uses")
    require_audit(out, budget, path, public)
    whole_budget = Budget.parse(budget, time.monotonic)  # counts from here
    from milkglass.audit.captured import captured_scene, read_captured, rows_digest, rows_within_limit
    from milkglass.hidden_states.halves import layer_count
    from milkglass.rows.examples import read_texts

    all_rows = read_captured(path)
    if layer and all_rows[0].kind != "vectors":
        raise UsageError(f"--layer is for captured vectors, and {path.name} has {all_rows[0].kind}", "leave it out")
    public_file = columns.read_optional(public)
    public_texts = None if public_file is None else [example.text for example in read_texts(public_file)]
    base = open_original(model)
    if layer > layer_count(base.config):
        raise UsageError(
            f"--layer {layer} is more than the {layer_count(base.config)} layers of {base.folder.name}",
            "give how many layers the client runs before it sends",
        )
    rows, max_tokens = rows_within_limit(base, all_rows)
    if left_out_count := len(all_rows) - len(rows):
        left_out = "1 text is" if left_out_count == 1 else f"{left_out_count:,} texts are"
        note(f"{left_out} left out: longer than the {max_tokens:,} tokens that {base.folder.name} reads")
    if not rows:
        raise CodecError(
            f"no text of {path.name} is within the {max_tokens:,} tokens that {base.folder.name} reads",
            "give shorter texts, with what was sent for them",
        )
    served_model = None if server_model is None else open_original(str(server_model))
    kinds = {"ids": "ids", "text": "replaced text", "vectors": "vectors"}
    texts = "1 text" if len(rows) == 1 else f"{len(rows):,} texts"
    note(f"{path.name}: {texts} and the {kinds[rows[0].kind]} that were sent for them")
    full_identity = {"captured": rows_digest(rows), "model": base.digest(), "seed": seed, "layer": layer}
    full_identity |= {} if served_model is None else {"served": served_model.digest()}
    if public_file is not None:
        full_identity |= {"public": files.sha256(public_file.path), **columns.changed_fields()}

    def build_scene(stage: Stage) -> Scene:
        return captured_scene(base, rows, seed, layer, served_model, public_texts, stage)

    finished_audit = run_audit(build_scene, full_identity, out, whole_budget, seed, as_json)
    print_audit(context, finished_audit, out, as_json)


def require_audit(out: Path, budget: str, *text_files: Path | None) -> None:
    """Checks files and places before long work starts.

    Raises:
        UsageError: a text is not a file, the budget is no time, or the audit cannot be written or would overwrite
            another.
    """
    for path in text_files:
        if path is not None:
            require_file(path, "give a file with a text a line")
    preflight.require_audit(out, budget)


def run_audit(
    build_scene: Callable[[Stage], Scene],
    identity: Mapping[str, Any],
    out: Path,
    budget: Budget,
    seed: int,
    as_json: bool,
) -> tuple[Audit, Path, str]:
    """Runs an audit: builds the scene, runs the attacks on it, and writes the report.

    Args:
        identity: all that decides the result. A stopped audit is resumed only if this is the same.
        budget: the audit's time by the clock. It counts already.
        as_json: whether no progress is printed.

    Returns:
        The audit, its page, and a budget for the attacks that did not end.
    """
    from milkglass.attacks.catalogue import ATTACKS
    from milkglass.audit.audit import ATTACKING_SHARE, time_to_attack
    from milkglass.audit.key_audit import attack_and_report, cap_torch_threads, open_scene
    from milkglass.audit.plan import estimate, planned_count

    with progress_bars(as_json) as stage:
        scene, resume_store = open_scene(build_scene, identity, out, stage)
        finished_names = resume_store.finished_names()
        attack_budget = time_to_attack(budget)
        time_estimate = estimate(scene, ATTACKS, ATTACKING_SHARE * attack_budget.seconds, finished_names)
        budget_for_all = larger_budget(time_estimate, budget.seconds, budget.seconds - budget.left())
        if not as_json:
            if finished_names:
                note(
                    f"an audit that was stopped goes on: {len(finished_names)} of its attacks came to their end, and "
                    "are kept"
                )
            note(plan_text(time_estimate, attack_budget.seconds, budget_for_all))
    with progress_bars(as_json, attack_budget.left) as stage:
        advance = stage("attack", planned_count(scene, ATTACKS))

        def on_result(result: AttackResult) -> None:
            advance(1)
            if not as_json and result.state != "does not apply":
                note(f"  {result_line(result)}")

        with note_resumption(resume_store.folder), cap_torch_threads():
            audit_and_page = attack_and_report(
                scene, resume_store, out, attack_budget, seed, on_result, on_begin=set_activity
            )
            return *audit_and_page, budget_for_all


def plan_text(time_estimate: TimeEstimate, seconds: float, budget_for_all: str) -> str:
    """Returns words that say how long the attacks will take, and for which ones the budget leaves too little time.

    Args:
        seconds: what the attacks have, by the clock.
        budget_for_all: what `larger_budget` returns.
    """
    announcement = (
        f"attacks, those that usually read most first: about {duration_text(time_estimate.seconds)} of processor time "
        f"for {time_estimate.timed_attack_count} of them"
    )
    if time_estimate.open_ended_titles:
        announcement += f", and for {', '.join(time_estimate.open_ended_titles).lower()} up to half of what is left"
    announcement += f"; at most {duration_text(seconds)} (--budget). A busy machine reads less in that time."
    if time_estimate.late_titles:
        enough_text = "" if math.isnan(time_estimate.enough_seconds) else f"; --budget {budget_for_all} would do"
        late_text = ", ".join(time_estimate.late_titles).lower()
        announcement += f"\ntoo little time is left for: {late_text}, which may read more{enough_text}"
    return announcement


def larger_budget(time_estimate: TimeEstimate, seconds: float, preparation_seconds: float) -> str:
    """Returns a budget that should suffice for all attacks, or LARGER_BUDGET_FACTOR times this one if none is known.

    Args:
        seconds: this budget.
        preparation_seconds: what passed of it before the attacks.
    """
    from milkglass.audit.audit import ATTACKING_SHARE, MAX_REPORT_SECONDS

    enough_seconds = time_estimate.enough_seconds / ATTACKING_SHARE
    if math.isnan(enough_seconds):
        seconds = LARGER_BUDGET_FACTOR * seconds
    else:  # the attacks have half of the budget at least
        seconds = enough_seconds + min(enough_seconds, preparation_seconds + MAX_REPORT_SECONDS)
    return f"{max(1, math.ceil(seconds / 60))}m"  # --budget takes minutes; at least 1


def print_audit(context: typer.Context, finished_audit: tuple[Audit, Path, str], out: Path, as_json: bool) -> None:
    """Prints an audit. `finished_audit` is what `run_audit` returns."""
    audit, page, budget_to_finish = finished_audit
    resume_command = "" if not audit.unfinished else same_command(context, budget=budget_to_finish)
    emit(as_json, {"out": str(out), **audit.to_json()}, lambda: report_text(audit, page, resume_command))


def result_line(result: AttackResult) -> str:
    """Returns the line that is printed when an attack ends."""
    label = f"{result.label} ({result.adversary})"
    if result.state != "done":
        return f"{label}: {result.state}, {result.reason}"
    name, noun = ("tokens top-1", "of the tokens") if "tokens top-1" in result.measures else ("bag f1", "F1 of words")
    suffix = ", not finished" if result.cut else ""
    return f"{label}: {result.measures[name]} {noun}, {result.seconds:.0f} s{suffix}"


def report_text(audit: Audit, page: Path, resume_command: str = "") -> str:
    """Returns the audit as text. `resume_command` goes on with a larger budget; it is "" if every attack ended."""
    from milkglass.audit.report.verdict import label_of

    rows: list[tuple[str, ...]] = [("attack", "attacker", "tokens", "content")]
    for result in audit.results:
        label = result.label + (", not finished" if result.cut else "")
        if "tokens top-1" in result.measures:
            values = (result.value(name) for name in ("tokens top-1", "content top-1"))
            shares = ("none sent" if math.isnan(value) else percent(value, result.cut, 1) for value in values)
            rows.append((label, result.adversary, *shares))
        elif "bag f1" in result.measures:
            rows.append(
                (label, result.adversary, f"words of a text, F1 {percent(result.value('bag f1'), decimals=1)}", "")
            )
    return "\n".join(
        [
            f"{label_of(audit).upper()}. {audit.verdict}",
            *([f"to go on where it stopped: {resume_command}"] if resume_command else []),
            "",
            table_text(rows),
            "",
            *([f"- {SMALL_SAMPLE_NOTE.format(audit.text_count)}"] if audit.text_count < SMALL_SAMPLE else []),
            *(f"- {warning.title} (shown where {warning.raised_if})" for warning in audit.findings),
            "",
            f"page: {page}",
        ]
    )

"""`milkglass compare`: every way of using a model, on your own rows, with what it is worth and what is read of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from milkglass.cli.ui.columns import ROW_FORMATS, ColumnOptions, note_columns, note_second_text, note_skipped
from milkglass.cli.ui.options import AsJson, open_original, option_of, options_of, same_command, with_options
from milkglass.cli.ui.terminal import emit, note, note_resumption, report_activity, set_activity, table_text
from milkglass.errors import UsageError
from milkglass.files import require_writable
from milkglass.progress import duration_text
from milkglass.system import Stopwatch, exit_on_sigterm

# The work of the attacks on one way, as seconds of one core: a busy machine finds the same
ATTACK_SECONDS, QUICK_ATTACK_SECONDS = 180.0, 60.0
TEXT_TOKENS, QUICK_TEXT_TOKENS = 256, 64  # the tokens that models read of a text with a label, if no option says it
QUICK_ROW_COUNT = 2_000  # the most rows with --quick
CLEAN_ROWS = "rows.jsonl"  # stands in the next commands for rows that need options of columns, or are no JSON Lines


@with_options
def compare(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="The public model: a folder, a hub id (hf:owner/name), demo:minilm, demo:mpnet or demo:smollm2."
        ),
    ],
    data: Annotated[Path, typer.Argument(help=f"Your rows, with labels or with answers: {ROW_FORMATS}.")],
    validation: Annotated[
        Path | None,
        typer.Option(
            help="Rows to hold out.  [default: a fifth of DATA with each class in its share, 40 rows at least; of "
            "rows with answers 200 at most]"
        ),
    ] = None,
    ways: Annotated[
        str | None, typer.Option(help="The ways to run, by name with commas between; an unknown name lists all ways.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Run every way: further settings and methods, and the ways of packages.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Run the ways that decide, or those of --ways, with {QUICK_ROW_COUNT:,} rows of each file and "
            f"{QUICK_TEXT_TOKENS} tokens of a text: with demo:minilm 5 to 30 minutes on two cores. It leaves out an "
            "encoder of BERT-base's size, replaced words, 64 symbols and CAPE.",
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="The most time by the clock: 90s, 10m, 1h; a bare number is seconds. A way that is not likely to end "
            "in time is not begun, unless its model is trained already; a training at work then is stopped. "
            "Attacks end with it, so that their figures may differ between runs. Without it they do not."
        ),
    ] = None,
    attacks: Annotated[
        str | None,
        typer.Option(
            help="Work for the attacks on one way, as the time that it takes one core: 90s, 10m. It is the same "
            f"amount on every machine.  [default: {ATTACK_SECONDS:.0f}s, with --quick {QUICK_ATTACK_SECONDS:.0f}s]"
        ),
    ] = None,
    public: Annotated[Path | None, typer.Option(help="Text of another kind that an attacker may have.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Where the best model with nothing sent is kept.  [default: OUT/kept]")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the page and of what a second run takes over.")] = Path(
        "milkglass-compare"
    ),
    cache: Annotated[
        Path | None,
        typer.Option(
            help="The folder of trained models, which comparisons and recipes of the same rows and settings share.  "
            "[default: OUT/cells]"
        ),
    ] = None,
    task: Annotated[
        Literal["classification", "regression"] | None, typer.Option(help="[default: decided by the labels]")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="As for `milkglass finetune`.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="As for `milkglass finetune`.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="As for `milkglass finetune`.")] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Models read this many tokens of a text; linear models read all of it.  [default: 256, with --quick "
            "64; for rows with answers 512]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the held-out rows, of every training and every key.")] = 0,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Compare the ways of using MODEL on DATA, on this machine, and write one page. Nothing is sent.

    Ways with nothing sent come first: the commonest class, a linear model, a small encoder. Then names masked, words
    replaced or scrambled, hidden states, attested hardware, and text sent as it is. The attacks of `milkglass audit`
    try to read what each way sends, as far as --attacks lets them; the page names those that it left out. Attacks that
    find out which id stands for which token are not run where the ids are public. The attacker has the other half of
    your rows.

    Rows with answers (instructions, chats) need a model that writes, such as demo:smollm2. Ways are then judged by the
    loss of a token of held-out answers, and by ROUGE-L of some written ones.
    """
    stopwatch = Stopwatch()
    if Path(model).is_file():
        raise UsageError(f"{model} is a file, and MODEL comes first", f"milkglass compare MODEL {shlex.quote(model)}")
    # The headers are read before the imports, which take seconds
    data_file, held_out = columns.data_file(data), None if validation is None else columns.data_file(validation)
    data_file.columns_by_role()
    if held_out is not None:
        held_out.columns_by_role()
    with report_activity(activity="load the libraries"):  # seconds on a busy machine
        from milkglass.compare.keep import require_apart, require_free
        from milkglass.compare.prepare import halves_options, prepare
        from milkglass.compare.report import page
        from milkglass.compare.report.words import kept_line, legend, line, next_line, notes_of
        from milkglass.compare.report.words import table as rows_of
        from milkglass.compare.result import WayResult
        from milkglass.compare.run import MEASURES, TimeLimits
        from milkglass.compare.run import compare as run_ways
        from milkglass.compare.ways import ComparisonSettings, choose_ways
        from milkglass.rows.examples import Summary, read_texts
        from milkglass.server.jobs.needs import size_text
        from milkglass.server.settings import bytes_on_disk
        from milkglass.server.spec import checked_settings
        from milkglass.system import core_count
        from milkglass.threat.budget import Budget

    options = {"n_epochs": epochs, "learning_rate": learning_rate, "batch_size": batch_size, "max_length": max_length}
    checked_settings(options, option_of)  # so that a wrong value is reported before anything is read
    names = [] if ways is None else [name.strip() for name in ways.split(",")]
    choose_ways(names, quick, everything)
    clock_seconds = Budget.parse(budget).seconds if budget else float("inf")
    attack_seconds = Budget.parse(attacks).seconds if attacks else QUICK_ATTACK_SECONDS if quick else ATTACK_SECONDS
    kept_folder, cells = keep or out / "kept", cache or out / "cells"
    for option, folder in (("--out", out), ("--cache", cache)):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file, not a folder", f"give another {option}")
    require_apart(kept_folder, out, cells)
    require_free(kept_folder)
    for folder in (out, kept_folder, cells):
        require_writable(folder)
    public_texts = [] if public is None else [row.text for row in read_texts(columns.other_file(public))]

    def report_skipped(name: str, summary: Summary) -> None:
        note_skipped(name, summary.blank_count, summary.empty_count)

    with report_activity(activity="read the rows and the model"):
        prepared = prepare(
            lambda: open_original(model), data_file, held_out, options, seed, task=task, quick=quick,
            text_length=QUICK_TEXT_TOKENS if quick else TEXT_TOKENS, max_rows=QUICK_ROW_COUNT if quick else None,
            report_skipped=report_skipped,
        )  # fmt: skip
    rows = prepared.rows
    selected_ways = choose_ways(names, quick, everything, rows.task, prepared.base)
    for file in (data_file, held_out):
        if file is not None:
            note_columns(file)
    note_second_text(data_file)
    with report_activity(), exit_on_sigterm(), note_resumption(out):
        second_text = "" if rows.train.pairs is None else " --pair 'its second text'"
        is_clean = data.suffix.lower() == ".jsonl" and not columns.changed_fields()
        clean_rows, notes = str(data) if is_clean else CLEAN_ROWS, prepared.notes
        if not is_clean:
            data_options = options_of(context, vars(columns))
            data_command = f"milkglass data {shlex.quote(str(data))} {data_options}".strip()
            notes = (*notes, f"The next commands read {CLEAN_ROWS}, which `{data_command} --out {CLEAN_ROWS}` writes")
        commands = {
            "model": shlex.quote(model), "rows": shlex.quote(clean_rows),
            "task": f" --task {task}" if task else "",
            "kept": shlex.quote(str(kept_folder)), "text": f"'a new text'{second_text}",
            "halves": halves_options(prepared.training),
            "compare": same_command(context, ways=None, keep=None, everything=False), "run": same_command(context),
        }  # fmt: skip
        settings = ComparisonSettings(
            model, prepared.base, prepared.base.digest(), rows, prepared.training, seed, cells,
            core_count(), note, commands, notes,
        )  # fmt: skip
        way_count_text = f"{len(selected_ways)} way{'' if len(selected_ways) == 1 else 's'}"
        train_count, held_out_count = len(rows.train.texts), len(rows.held_out.texts)
        note(f"{way_count_text}, {train_count:,} rows to train with, {held_out_count:,} held out")
        for sentence in notes:
            note(sentence)
        finished_count = 0

        def report_way(way: WayResult, seconds_left: float) -> None:
            nonlocal finished_count
            finished_count += 1
            time_left_text = (
                f"  [about {duration_text(seconds_left)} left]"
                if seconds_left >= 1 and finished_count < len(selected_ways)
                else ""
            )
            note(f"[{finished_count} of {len(selected_ways)}] {line(way, MEASURES[rows.task])}{time_left_text}")

        limits = TimeLimits(clock_seconds, attack_seconds, stopwatch)
        result = run_ways(
            settings,
            selected_ways,
            out,
            limits,
            public_texts,
            kept_folder,
            keep is not None,
            report_way,
            note,
            set_activity,
        )
    if (earlier_page := page.set_aside(result, out)) is not None:
        note(f"the page of the comparison that was in {out} is now {earlier_page}")
    page_file = page.write(result, out)
    removable = "folder runs only lets" if cache else "folders cells and runs only let"
    removable_note = f"its {removable} another run take over what is done, and may be removed"
    kept_lines = [text for text in (kept_line(result),) if text]
    file_lines = (
        *kept_lines, f"page: {page_file}", f"disk: {size_text(bytes_on_disk(out))} in {out}; {removable_note}"
    )  # fmt: skip
    emit(
        as_json,
        result.to_json(),
        lambda: "\n".join(
            [table_text(rows_of(result)), legend(result), "", *notes_of(result), *file_lines, "", *result.verdict]
        ),
    )
    if not as_json and (next_step := next_line(result)):
        note(next_step)

"""`milkglass compare`: every way of using a model, on your own rows, with what it is worth and what is read of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from milkglass.cli.ui.columns import ROWS, ColumnOptions, say_read, say_skipped
from milkglass.cli.ui.options import AsJson, option_of, original, same_command, with_options
from milkglass.cli.ui.terminal import emit, note, resumable, table
from milkglass.errors import UsageError
from milkglass.progress import duration, heartbeat

ATTACKS, MAX_LENGTH = 180.0, 256
QUICK_ATTACKS, QUICK_LENGTH, QUICK_ROWS = 90.0, 64, 2_000  # by amounts of work, so that a busy machine finds the same


@with_options
def compare(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="The public model: a folder, a hub id (hf:owner/name), demo:minilm or demo:smollm2.")
    ],
    data: Annotated[Path, typer.Argument(help=f"Your rows, with labels or with answers: {ROWS}.")],
    validation: Annotated[
        Path | None,
        typer.Option(help="Rows to ask about.  [default: a fifth of DATA, and 40 at least; not trained with]"),
    ] = None,
    ways: Annotated[
        str | None, typer.Option(help="The ways to run, by name with commas between; an unknown name lists them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every way, those of packages too.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Run the ways that decide, or those of --ways, with {QUICK_ROWS:,} rows of {QUICK_LENGTH} tokens: "
            "about 10 minutes on two cores that do nothing else.",
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="The most time by the clock: 90s, 10m, 1h. A way that is not likely to end in time is not begun; what "
            "is at work then ends within a minute. Attacks end with it, so that their figures may differ between runs. "
            "Without it they do not."
        ),
    ] = None,
    attacks: Annotated[
        str | None,
        typer.Option(
            help="Work for the attacks on one way, as the time that it takes one core: 90s, 10m. It is the same "
            f"amount on every machine.  [default: {ATTACKS:.0f}s]"
        ),
    ] = None,
    public: Annotated[Path | None, typer.Option(help="Text of another kind that an attacker may have.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Where the best model with nothing sent is kept.  [default: OUT/kept]")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the page and of what a second run takes over.")] = Path(
        "milkglass-compare"
    ),
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
    seed: Annotated[int, typer.Option(help="Of the rows that are asked about, of every training and every key.")] = 0,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Compare the ways of using MODEL on DATA, on this machine, and write one page. Nothing is sent.

    Ways with nothing sent come first: the commonest class, a linear model, a small encoder. Then names masked, words
    replaced or scrambled, hidden states, attested hardware, and text sent as it is. The strongest attacks try to read
    what each way sends; the attacker has the other half of your rows.

    Rows with answers (instructions, chats) need a model that writes, such as demo:smollm2. Ways are then judged by the
    loss of a token of held-out answers, and by ROUGE-L of some written ones.
    """
    from milkglass.client.training_request import steps_of, training_defaults
    from milkglass.compare.chat_rows import MAX_LENGTH as CHAT_LENGTH
    from milkglass.compare.chat_rows import QUICK, TASK, ChatRows, Extent
    from milkglass.compare.report import page
    from milkglass.compare.report.words import line, next_line, notes_of
    from milkglass.compare.report.words import table as rows_of
    from milkglass.compare.result import WayResult
    from milkglass.compare.rows import ComparisonRows
    from milkglass.compare.run import MEASURES, TimeLimits
    from milkglass.compare.run import compare as compared
    from milkglass.compare.training import MIN_REPORTS, cut_words
    from milkglass.compare.ways import ComparisonSettings, chosen_ways
    from milkglass.rows.examples import Summary, checked, read_texts
    from milkglass.server.jobs.needs import ModelSizes
    from milkglass.server.spec import Hyperparameters, hyperparameters_of
    from milkglass.system import cores
    from milkglass.threat.budget import Budget

    if Path(model).is_file():
        raise UsageError(f"{model} is a file, and MODEL comes first", f"milkglass compare MODEL {shlex.quote(model)}")
    given = {"n_epochs": epochs, "learning_rate": learning_rate, "batch_size": batch_size, "max_length": max_length}
    hyperparameters_of(given, option_of)  # before anything is read
    named = [one.strip() for one in ways.split(",")] if ways else []
    chosen_ways(named, quick, everything)
    whole = Budget.parse(budget).seconds if budget else float("inf")
    limits = TimeLimits(whole, Budget.parse(attacks).seconds if attacks else QUICK_ATTACKS if quick else ATTACKS)
    if keep is not None and keep.resolve() == out.resolve():
        raise UsageError(f"--keep and --out are both {out}", "give the kept model a folder of its own")
    kept = keep or out / "kept"
    files = [columns.file(one) for one in (data, validation) if one is not None]
    judged = files[1] if len(files) > 1 else None
    others = [] if public is None else [one.text for one in read_texts(columns.second(public))]

    def skipped(name: str, found: Summary) -> None:
        say_skipped(name, found.blank, found.empty)

    summary = checked(files[0], task)
    text_length = QUICK_LENGTH if quick else MAX_LENGTH
    length = max_length or (CHAT_LENGTH if summary.task == TASK else text_length)
    given["max_length"] = length
    rows: ComparisonRows
    base = None
    if summary.task == TASK:
        skipped(files[0].name, summary)
        if judged is not None:
            skipped(judged.name, checked(judged, TASK))
        base = original(model)
        extent = QUICK if quick else Extent()
        rows = chats = ChatRows.of(base, files[0], judged, seed, extent, length, summary)
        settings = hyperparameters_of({"task": TASK, **chats.training(given)})
        head: dict[str, Any] = {"task": TASK}
    else:
        rows = ComparisonRows.read(files[0], judged, seed, skipped, task, QUICK_ROWS if quick else None)
        settings = hyperparameters_of(training_defaults(rows.task, len(rows.train.texts), given, False))
        head = {"task": "regression"} if rows.task == "regression" else {"num_labels": len(rows.names)}
    selected = chosen_ways(named, quick, everything, rows.task)
    for file in files:
        say_read(file)
    training = Hyperparameters(**{**settings, **head, "seed": seed})
    if isinstance(rows, ChatRows) and base is not None:
        training = training.fitted(len(ModelSizes.of(base).layers))
    often = max(1, min(training.logging_steps, steps_of(len(rows.train.texts), training) // MIN_REPORTS))
    training = training.model_copy(update={"logging_steps": often})
    base = base or original(model)
    with heartbeat(note) as log, resumable(out):
        second = "" if rows.train.pairs is None else " --pair 'its second text'"
        commands = {
            "model": shlex.quote(model), "rows": shlex.quote(str(data)), "kept": shlex.quote(str(kept)),
            "text": f"'a new text'{second}",
            "compare": same_command(context, ways=None, keep=None, everything=False),
        }  # fmt: skip
        if isinstance(rows, ChatRows):
            notes = rows.about(training)
        else:
            cut = cut_words(base, rows.train, training.max_length)
            notes = (cut,) if cut else ()
        setting = ComparisonSettings(
            model, base, base.digest(), rows, training, seed, out / "cells", cores(), log, commands, notes
        )
        asked, count = len(rows.held_out.texts), [0]
        ways_in_words = f"{len(selected)} way{'' if len(selected) == 1 else 's'}"
        log(f"{ways_in_words}, {len(rows.train.texts):,} rows to train with, {asked:,} to ask about")
        for words in notes:
            log(words)
        measure = MEASURES[rows.task]

        def report(way: WayResult, left: float) -> None:
            count[0] += 1
            rest = f"  [about {duration(left)} left]" if left == left and left >= 1 and count[0] < len(selected) else ""
            log(f"[{count[0]} of {len(selected)}] {line(way, measure)}{rest}")

        result = compared(setting, selected, out, limits, others, kept, report, log)
    written = page.write(result, out)
    emit(
        as_json,
        result.to_json(),
        lambda: "\n".join([table(rows_of(result)), "", *result.verdict, *notes_of(result), f"page: {written}"]),
    )
    if not as_json and (words := next_line(result)):
        note(words)

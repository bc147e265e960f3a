"""`milkglass compare`: what a scheme costs on your rows, beside no defence and what you do alone. Nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.ui.columns import ROWS, ColumnOptions, say_skipped
from milkglass.cli.ui.options import AsJson, option_of, original, parameters, with_options
from milkglass.cli.ui.terminal import emit, note, resumable, table

if TYPE_CHECKING:
    from milkglass.experiments.procedures.own_rows import Compared

NOT_APART = (
    "{name} and what you do alone in seconds, with nothing sent, cannot be told apart with these {rows:,} rows: "
    "nothing shows that sending them gains anything"
)
WORSE = (
    "and is {gap:.1f} points below what you do alone in seconds, with nothing sent ({low:.1f} to {high:.1f}): don't "
    "send anything"
)
FALLING = (
    "{name}: the loss was still falling when the training ended ({before:.3f}, then {last:.3f} in its last quarter): "
    "it was too short to tell, and more --epochs may change this row"
)
NO_DIFFERENCE = "what {name} costs cannot be told from chance with these {rows:,} rows"
COSTS = "{name} costs {gap:.1f} points of accuracy ({low:.1f} to {high:.1f})"
GAINS = "and is {gap:.1f} points above what you do alone ({low:.1f} to {high:.1f})"


@with_options
def compare(
    model: Annotated[str, typer.Argument(help="The public model: a folder, a hub id (hf:owner/name), or demo:minilm.")],
    data: Annotated[Path, typer.Argument(help=f"Your rows with labels: {ROWS}.")],
    validation: Annotated[
        Path | None,
        typer.Option(help="Rows to ask about.  [default: a fifth of DATA, and 40 at least; not trained with]"),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(help="The scheme; an unknown name lists them.  [default: coarse for encoders, else obfuslm]"),
    ] = None,
    words: Annotated[list[str] | None, parameters("A parameter of the scheme, such as k=10.")] = None,
    out: Annotated[Path, typer.Option(help="Where trained models are kept, for a second run.")] = Path(
        "milkglass-compare"
    ),
    epochs: Annotated[float | None, typer.Option(help="As for `milkglass finetune`.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="As for `milkglass finetune`.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="As for `milkglass finetune`.")] = None,
    max_length: Annotated[int, typer.Option(help="Longer texts are cut to this many tokens.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the rows that are held out, and of both trainings.")] = 0,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Train MODEL plain and scrambled on DATA with the same settings, on this machine, and print what each is worth.

    Beside them stand the commonest class and a linear model over your own words, which needs no server. No epoch is
    chosen by the held-out rows.
    """
    from milkglass.client.key.generate import scheme_for
    from milkglass.client.training_defaults import training_defaults
    from milkglass.experiments.procedures.own_rows import OwnRows
    from milkglass.experiments.procedures.own_rows import compare as compared
    from milkglass.models.families import of
    from milkglass.parameters import read_words
    from milkglass.schemes.catalogue import SCHEMES
    from milkglass.server.spec import hyperparameters_of

    given = {"n_epochs": epochs, "learning_rate": learning_rate, "batch_size": batch_size, "max_length": max_length}
    hyperparameters_of(given, option_of)  # before anything is read
    rows = OwnRows.read(
        columns.file(data), None if validation is None else columns.file(validation), seed,
        lambda file, found: say_skipped(file, found.blank, found.empty),
    )  # fmt: skip
    settings = hyperparameters_of(training_defaults("classification", len(rows.train.texts), given, False))
    base = original(model)
    name = scheme or ("coarse" if of(base).kind == "encoder" else "obfuslm")
    values = read_words(type(SCHEMES[name]), words or [], name, without=["bands", "map"])
    chosen = scheme_for(base, name, **values)
    with resumable(out):
        found = compared(base, chosen, name, rows, settings, seed, out, note)
    emit(as_json, _document(found, name, settings), lambda: "\n".join(_words(found, name)))


def _words(found: Compared, scheme: str) -> list[str]:
    from milkglass.cli.ui import label_report
    from milkglass.experiments.procedures.own_rows import PLAIN

    rows: list[tuple[str, ...]] = [("", "accuracy", "95 % interval")]
    for name in found.answers:
        one = found.confusion(name).accuracy()
        rows.append((name, f"{100 * one.value:.1f} %", f"{100 * one.low:.1f} to {100 * one.high:.1f}"))
    lost, won = found.gap(PLAIN, scheme), found.gap(scheme, found.alone)
    about = {"name": scheme, "rows": len(found.truth)}
    lines = [table(rows), ""]
    if lost.low <= 0 <= lost.high:
        lines.append(NO_DIFFERENCE.format(**about))
    else:
        lines.append(COSTS.format(**about, gap=100 * lost.value, low=100 * lost.low, high=100 * lost.high))
    if won.low > 0:
        lines.append(GAINS.format(gap=100 * won.value, low=100 * won.low, high=100 * won.high))
    elif won.high < 0:
        lines.append(WORSE.format(gap=-100 * won.value, low=-100 * won.high, high=-100 * won.low))
    else:
        lines.append(NOT_APART.format(**about))
    lines += [FALLING.format(name=one, before=before, last=last) for one, (before, last) in found.falling.items()]
    return [*lines, "", f"{scheme}:", *label_report.words(found.confusion(scheme))]


def _document(found: Compared, scheme: str, settings: dict[str, Any]) -> dict[str, Any]:
    from milkglass.cli.ui import label_report
    from milkglass.experiments.procedures.own_rows import PLAIN

    gaps = {"loss": found.gap(PLAIN, scheme), "gain over alone": found.gap(scheme, found.alone)}
    return {
        "training": settings,
        "loss still falling": {name: list(means) for name, means in found.falling.items()},
        "rows": {name: label_report.document(found.confusion(name)) for name in found.answers},
        **{
            name: {"points": 100 * one.value, "interval": [100 * one.low, 100 * one.high]} for name, one in gaps.items()
        },
    }

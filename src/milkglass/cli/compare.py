"""`milkglass compare`: what a scheme costs on your rows, beside no defence and what you do alone. Nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.ui.columns import ROWS, ColumnOptions, say_read, say_skipped
from milkglass.cli.ui.options import AsJson, option_of, original, parameters, with_options
from milkglass.cli.ui.terminal import emit, note, resumable, table

if TYPE_CHECKING:
    from milkglass.experiments.procedures.own_rows import Compared
    from milkglass.metrics.interval import Interval

NOT_APART = (
    "{name} and what you do alone in seconds, with nothing sent, cannot be told apart with these {rows:,} rows: "
    "nothing shows that sending them gains anything"
)
WORSE = (
    "{name} is {gap:.1f} points below what you do alone in seconds, with nothing sent ({low:.1f} to {high:.1f}): don't "
    "send anything"
)
FALLING = (
    "{name}: the loss was still falling when the training ended ({before:.3f}, then {last:.3f} in its last quarter): "
    "it was too short to tell, and more --epochs may change this row"
)
NO_DIFFERENCE = "what {name} costs cannot be told from chance with these {rows:,} rows"
UNTRAINED = (
    "the plain model is not shown to be above naming the commonest class ({accuracy:.1f} % beside {commonest:.1f} %, "
    "{rows:,} rows), so that what {name} costs is not known: more --epochs or more rows may tell"
)
COSTS = "{name} costs {gap:.1f} points of accuracy ({low:.1f} to {high:.1f})"
ABOVE = "{name} is {gap:.1f} points above the plain model ({low:.1f} to {high:.1f}), which more --epochs may change"
GAINS = "{name} is {gap:.1f} points above what you do alone ({low:.1f} to {high:.1f})"


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
    from milkglass.client.training_request import training_defaults
    from milkglass.experiments.procedures.own_rows import OwnRows
    from milkglass.experiments.procedures.own_rows import compare as compared
    from milkglass.models.families import of
    from milkglass.parameters import read_words
    from milkglass.schemes.catalogue import SCHEMES
    from milkglass.server.spec import hyperparameters_of

    given = {"n_epochs": epochs, "learning_rate": learning_rate, "batch_size": batch_size, "max_length": max_length}
    hyperparameters_of(given, option_of)  # before anything is read
    files = [columns.file(one) for one in (data, validation) if one is not None]
    judged = files[1] if len(files) > 1 else None
    rows = OwnRows.read(files[0], judged, seed, lambda file, found: say_skipped(file, found.blank, found.empty))
    for file in files:
        say_read(file)
    settings = hyperparameters_of(training_defaults("classification", len(rows.train.texts), given, False))
    base = original(model)
    name = scheme or ("coarse" if of(base).kind == "encoder" else "obfuslm")
    values = read_words(type(SCHEMES[name]), words or [], name, without=["bands", "map"])
    chosen = scheme_for(base, name, **values)
    with resumable(out):
        found = compared(base, chosen, name, rows, settings, seed, out, note)
    size = sum(one.stat().st_size for one in out.rglob("*") if one.is_file())
    note(f"{out} holds {size / 1e6:,.0f} MB of trained models, for a second run: remove it when you have what you need")
    emit(as_json, _document(found, name, settings), lambda: "\n".join(_words(found, name)))


def _words(found: Compared, scheme: str) -> list[str]:
    from milkglass.cli.ui import label_report

    rows: list[tuple[str, ...]] = [("", "accuracy", "95 % interval")]
    for name in found.answers:
        one = found.confusion(name).accuracy()
        rows.append((name, f"{100 * one.value:.1f} %", f"{100 * one.low:.1f} to {100 * one.high:.1f}"))
    lines = [table(rows), "", *_judged(found, scheme)]
    lines += [FALLING.format(name=one, before=before, last=last) for one, (before, last) in found.falling.items()]
    return [*lines, "", f"{scheme}:", *label_report.words(found.confusion(scheme))]


def _judged(found: Compared, scheme: str) -> list[str]:
    """Returns in words what the scheme costs, and whether sending anything gains.

    If the plain model is not shown to have learnt, only a loss to the client alone is known.
    """
    from milkglass.experiments.procedures.own_rows import PLAIN
    from milkglass.experiments.record import COMMONEST

    lost, won = found.gap(PLAIN, scheme), found.gap(scheme, found.alone)
    about = {"name": scheme, "rows": len(found.truth)}
    if not _learnt(found):
        plain, commonest = (100 * found.confusion(name).accuracy().value for name in (PLAIN, COMMONEST))
        worse = [WORSE.format(**about, **_points(won, True))] if won.high < 0 else []
        return [UNTRAINED.format(**about, accuracy=plain, commonest=commonest), *worse]
    costs = NO_DIFFERENCE if lost.low <= 0 <= lost.high else COSTS if lost.low > 0 else ABOVE
    gains = GAINS if won.low > 0 else WORSE if won.high < 0 else NOT_APART
    return [
        costs.format(**about, **_points(lost, costs is ABOVE)),
        gains.format(**about, **_points(won, gains is WORSE)),
    ]


def _learnt(found: Compared) -> bool:
    """Whether the plain model is shown to be above naming the commonest class."""
    from milkglass.experiments.procedures.own_rows import PLAIN
    from milkglass.experiments.record import COMMONEST

    return found.gap(PLAIN, COMMONEST).low > 0


def _points(gap: Interval, negated: bool) -> dict[str, float]:
    value, low, high = (-gap.value, -gap.high, -gap.low) if negated else (gap.value, gap.low, gap.high)
    return {"gap": 100 * value, "low": 100 * low, "high": 100 * high}


def _document(found: Compared, scheme: str, settings: dict[str, Any]) -> dict[str, Any]:
    from milkglass.cli.ui import label_report
    from milkglass.experiments.procedures.own_rows import PLAIN

    gaps = {"loss": found.gap(PLAIN, scheme), "gain over alone": found.gap(scheme, found.alone)}
    return {
        "training": settings,
        "plain above commonest": _learnt(found),
        "loss still falling": {name: list(means) for name, means in found.falling.items()},
        "rows": {name: label_report.document(found.confusion(name)) for name in found.answers},
        **{
            name: {"points": 100 * one.value, "interval": [100 * one.low, 100 * one.high]} for name, one in gaps.items()
        },
    }

"""`milkglass sanitize --method mask`: mask names, places and numbers of a file with Presidio."""

from __future__ import annotations

from pathlib import Path

from milkglass.cli.ui.terminal import emit, note, progress_bars, table_text
from milkglass.errors import UsageError
from milkglass.rows.blocks import RowFormat

DEFAULT_MIN_SCORE = 0.35  # the lowest recognition score that is masked; telephone numbers have 0.4


def sanitize_by_mask(source: Path, row_format: RowFormat, out: Path, settings: list[str], as_json: bool) -> None:
    """Masks the texts of a file, and prints how often each kind of entity was masked.

    Args:
        source: the file to mask.
        row_format: the format of its rows, and what of them is masked.
        out: the file to write.
        settings: the values of `--set`, such as "least=0.5".
        as_json: whether the counts are printed as JSON, and no progress is shown.

    Raises what `min_score_of` and `mask_file` raise.
    """
    from milkglass.sanitizers.masking import mask_file

    with progress_bars(as_json) as stage:
        report = mask_file(source, row_format, out, min_score_of(settings), stage("mask", source.stat().st_size))
    rows: list[tuple[str, ...]] = [("masked", "times")]
    rows += [(kind, f"{count:,}") for kind, count in report["masks"].items()]
    summary = (
        f"{table_text(rows)}\n{report['texts with a mask']:,} of {report['texts']:,} texts have a mask; what no "
        f"recognizer knows is unchanged, such as many names in lower case\nwrote {out} and {out.name}.report.json"
    )
    if fields_left := report["fields_left_as_they_are"]:
        summary += f"\nunchanged: {', '.join(fields_left)} (--text-column NAME masks a field)"
    if report["note"]:
        note(report["note"])
    emit(as_json, report, summary)


def min_score_of(settings: list[str]) -> float:
    """Returns the lowest score that is masked: NUMBER of `--set least=NUMBER`, or the default.

    Raises UsageError for another name, or a number that is not from 0 to 1.
    """
    min_score = DEFAULT_MIN_SCORE
    for setting in settings:
        name, _, number = setting.partition("=")
        if name != "least":
            raise UsageError(f"mask has no parameter {name!r}", "it has least, the least score of what is masked")
        try:
            min_score = float(number)
        except ValueError:
            min_score = -1.0
        if not 0 <= min_score <= 1:
            raise UsageError(
                f"least is {number!r}, a number from 0 to 1 is needed", f"{DEFAULT_MIN_SCORE} is the default"
            )
    return min_score

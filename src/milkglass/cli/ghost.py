"""`milkglass sanitize --method ghost`: each token's shadow, and the shadows' ids beside the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milkglass.cli.sanitize_text import read_shape
from milkglass.cli.ui.terminal import bars, emit, note, table
from milkglass.errors import UsageError

SELECTION = ("selection", "beams", "threshold", "sweeps")  # the others are of the search


def sanitize_by_ghost(
    source: str, out: Path | None, model: str, words: Sequence[str], seed: int | None,
    also: Sequence[str] | None, keep: Sequence[str] | None, delimiter: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Replace tokens by shadows. words: parameters of the search and the selection, such as "k=70" and "beams=2"."""
    from milkglass.files import require_writable
    from milkglass.models.resolve import resolve
    from milkglass.parameters import read_words
    from milkglass.sanitizers.files import report_path
    from milkglass.sanitizers.ghost.files import GhostJob, require_texts, sanitize_dataset
    from milkglass.sanitizers.ghost.ghost import Ghost
    from milkglass.sanitizers.ghost.search import Search
    from milkglass.sanitizers.ghost.selection import Selection

    if source == "-":
        raise UsageError("ghost does not read stdin: lines of text have no room for ids", "give a file IN and an OUT")
    path = Path(source)
    if out is None:
        raise UsageError("no OUT was given", "name the file to write")
    of_selection = [one for one in words if one.partition("=")[0] in SELECTION]
    of_search = [one for one in words if one not in of_selection]
    selected = read_words(Selection, [one.replace("selection=", "way=", 1) for one in of_selection], "ghost")
    search, selection = Search(**_searched(of_search)), Selection(**selected)
    shape = read_shape(path, frozenset(also or ()), frozenset(keep or ()), delimiter=delimiter)
    plan = GhostJob.of(path, shape, out)
    plan.require_free()
    require_writable(out)
    require_texts(plan)
    folder = resolve(model)
    with bars(as_json) as stage:
        progress = stage("find shadows", 0)
        ghost = Ghost.open(folder, search, selection, name=model if model.startswith("demo:") else folder.name)
        progress(1)
        if plan.folder.is_dir() and not as_json:
            note("resuming an interrupted run")
        try:
            report = sanitize_dataset(ghost, plan, seed, stage("sanitize", path.stat().st_size))
        except KeyboardInterrupt:
            if plan.folder.is_dir():
                note(f"stopped; finished parts are kept in {plan.folder}, and the same command resumes")
            raise
    emit(as_json, {"out": str(out), "report": str(report_path(out)), **report}, lambda: _summary(report, out))


def _searched(words: Sequence[str]) -> dict[str, Any]:
    """Returns parameters of the search. Raises UsageError, with those of the selection in its list as well."""
    from milkglass.parameters import described, parameters_of, read_words
    from milkglass.sanitizers.ghost.search import Search
    from milkglass.sanitizers.ghost.selection import Selection

    if unknown := [one for one in words if "=" in one and one.partition("=")[0] not in parameters_of(Search)]:
        listed = f"{described(Search)}, {described(Selection).replace('way', 'selection', 1)}"
        raise UsageError(f"ghost has no parameter {unknown[0].partition('=')[0]!r}", f"it has {listed}")
    return read_words(Search, words, "ghost")


def _summary(report: dict[str, Any], out: Path) -> str:
    tokens, vocabulary, left = report["tokens"], report["vocabulary"], report["fields_left_as_they_are"]
    own = max(1, tokens["all"] - tokens["special"])
    share = 100 * tokens["replaced_share"] * tokens["all"] / own
    rows: list[tuple[str, ...]] = [
        ("texts", f"{report['texts']:,}"),
        ("tokens", f"{tokens['all']:,}, {tokens['special']:,} of them special; {share:.1f} % of the others replaced"),
        ("fell back", f"{tokens['fell_back']:,} tokens of the texts, {vocabulary['fell_back']:,} of the vocabulary"),
        (
            "one shadow only",
            f"{tokens['one_shadow']:,} tokens of the texts ({100 * tokens['one_shadow'] / own:.0f} %), "
            f"{vocabulary['one_shadow']:,} of the vocabulary: anyone who knows ghost reads them",
        ),
        ("ROUGE-1, METEOR", f"{report['likeness']['rouge-1']:.3f}, {report['likeness']['meteor']:.3f}"),
    ]
    if report["selection_loss"] is not None:
        settled = f"{report['not_settled']:,} not settled" if report["not_settled"] else "all settled"
        rows.append(("loss", f"{report['selection_loss']:.4g} after {report['sweeps']:.1f} sweeps, {settled}"))
    lines = [f"wrote {out} and {out.name}.report.json", table(rows), "guarantee: none"]
    lines += [f"unchanged: {', '.join(left)} (--text-column NAME sanitizes a field)"] if left else []
    return "\n".join(lines)

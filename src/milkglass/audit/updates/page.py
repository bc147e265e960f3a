"""The page of an audit of updates: one HTML file, laid out as the audit's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from markupsafe import Markup

from milkglass.audit.report import charts
from milkglass.audit.report.page import environment
from milkglass.audit.report.verdict import LEVEL_LABELS, MOST_SHARE, MUCH_SHARE, level_of
from milkglass.audit.updates.report import Measures, UpdateAudit, UpdateResult, token_share, verdict
from milkglass.metrics.interval import Interval

MAX_EXAMPLES = 3  # texts of an update, and readings of it, that the page shows


def render(result: UpdateAudit, readings: Sequence[Mapping[str, Any]]) -> str:
    """Returns the page of an audit of updates. `readings` has what each attack read of each update: it is private."""
    measured = [attacked for attacked in result.finished_results if attacked.measures]
    measured.sort(key=lambda attacked: -attacked.token_share.value)
    best = measured[0] if measured else None
    level = level_of(best.token_share.value, any(attacked.cut for attacked in measured)) if best else "unknown"
    example = next((reading for reading in readings if best is not None and reading["attack"] == best.attack), None)
    texts = [] if example is None else [*example["texts"][:MAX_EXAMPLES], *example["readings"][:MAX_EXAMPLES]]
    return (
        environment("".join(texts))
        .get_template("audit/report/updates.html")
        .render(
            r=result, done=measured, best=best, verdict=verdict(result), level=level, label=LEVEL_LABELS[level],
            most=MOST_SHARE, much=MUCH_SHARE, example=example, examples=MAX_EXAMPLES, token_share=token_share,
            **{name: Markup(svg) for name, svg in charts_svg(result, measured).items()},
        )
    )  # fmt: skip


def charts_svg(result: UpdateAudit, results: Sequence[UpdateResult]) -> dict[str, str]:
    """Returns the charts as SVG, by name; "" for one without a figure."""

    def figures_by_title(measure: Callable[[Measures], Interval]) -> dict[str, Interval]:
        return {attacked.title: measure(attacked.measures) for attacked in results}

    guesses = {}
    if result.floors:
        guesses["guessing the commonest token each time"] = result.floors["commonest token"]
    trained = {
        attacked.title: token_share(attacked.trained_measures)
        for attacked in results
        if attacked.trained_measures and result.uses_ghost
    }
    return {
        "overview": charts.bars("All tokens", "read of all tokens, in %", figures_by_title(token_share), guesses),
        "rouge": charts.bars("ROUGE-1", "ROUGE-1 (F1 of words), in %", figures_by_title(itemgetter("rouge-1")), {}),
        "shadows": charts.bars("Shadows", "read of the shadows, in %", trained, {}),
    }

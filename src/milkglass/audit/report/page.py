"""The audit's page: one HTML file that needs nothing else. Every text in it is escaped by the template engine."""

from __future__ import annotations

import math
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from milkglass.audit.outcome import strongest
from milkglass.audit.report import charts
from milkglass.audit.report.result import Audit
from milkglass.metrics.interval import Interval

COLUMNS = (
    ("Tokens", "tokens top-1"),
    ("Content", "content top-1"),
    ("Vocabulary", "vocabulary top-1"),
    ("ROUGE-L", "rouge-l"),
    ("METEOR", "meteor"),
    ("Whole texts", "exact texts"),
)


def percent(fraction: float) -> str:
    """`0.1234` as `12.3 %`; what would round to nothing keeps a figure; "-" where there is nothing to count."""
    if math.isnan(fraction):
        return "-"
    value = 100 * fraction
    return f"{value:.1f}\u00a0%" if value >= 0.05 or value == 0 else f"{value:.1g}\u00a0%"


def interval(one: Interval) -> str:
    if math.isnan(one.value):
        return "none to count"
    return f"{100 * one.value:.1f} ({100 * one.low:.1f}\u2013{100 * one.high:.1f})"


def duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{seconds:.1f} s"


def drawn(result: Audit) -> dict[str, str]:
    """The charts, as SVG, by name; each is also written beside the page."""
    nominal = {"1/k": 1 / result.kept["k"]} if result.kept else {}
    nominal["commonest token"] = result.floors["commonest token"]
    return {
        "overview": charts.bars("Running tokens read", _best(result, "tokens top-1"), nominal),
        "content": charts.bars("Content tokens read", _best(result, "content top-1"), {}),
        "which": charts.bars("Read, by class of token", result.best.by_class, {}) if result.best else "",
        "budget": charts.curve("Content tokens read against tokens sent under one key", result.curve),
    }


def _best(result: Audit, measure: str) -> dict[str, Interval]:
    """By each attacker, of whatever attack reads most by this measure."""
    read = [cell for cell in result.cells if measure in cell.measures]
    per = {who: strongest(tuple(c for c in read if c.adversary == who), measure) for who in result.adversaries}
    return {who: cell.measures[measure] for who, cell in per.items() if cell is not None}


def render(result: Audit) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "interval": interval, "duration": duration}
    source = files("milkglass.audit.report").joinpath("page.html").read_text("utf-8")
    pictures = {name: Markup(svg) for name, svg in drawn(result).items()}  # our own text, escaped where it quotes
    return environment.from_string(source).render(r=result, columns=COLUMNS, **pictures)

"""The audit's page: one HTML file that needs nothing else. The template engine escapes every text."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from milkglass.audit.outcome import strongest
from milkglass.audit.report import charts
from milkglass.audit.report.result import Audit
from milkglass.audit.report.verdict import MOST_SHARE, MUCH_SHARE, label_of
from milkglass.audit.scene import ALIKE, KNOWN, MODEL_ONLY, OTHER
from milkglass.metrics.interval import Interval
from milkglass.metrics.percent import percent_to_one_decimal

COMMON_CHARACTERS = re.compile("[\u0020-\u024f\u0370-\u052f\u1e00-\u1eff\u2010-\u2027\u2030-\u205e\u20a0-\u20bf\u2122]")
ATTACKER_TITLES = {  # in charts
    MODEL_ONLY: "attacker with no text",
    OTHER: "attacker with other public text",
    ALIKE: "attacker with text like yours",
    KNOWN: "attacker who knows some of your texts",
}
RESULT_COLUMNS = (
    ("Tokens", "tokens top-1"),
    ("Content", "content top-1"),
    ("Vocabulary", "vocabulary top-1"),
    ("ROUGE-L", "rouge-l"),
    ("METEOR", "meteor"),
    ("Whole texts", "exact texts"),
    ("F1 of words", "bag f1"),
)


def interval(measured: Interval) -> str:
    """Returns the ends of an interval in percent, such as "12.0–14.5"; "" if the attack was cut and has none."""
    if math.isnan(measured.low):
        return ""
    decimals = 1 if measured.high >= 0.0005 else 2 if measured.high >= 0.00005 else 3
    return f"{100 * measured.low:.{decimals}f}\u2013{100 * measured.high:.{decimals}f}"


def unbroken_duration(seconds: float) -> str:
    """Returns a duration in words that no line break parts, such as "2 min 5 s" or "7.3 s"."""
    whole = round(seconds)
    return f"{whole // 60}\u00a0min {whole % 60}\u00a0s" if whole >= 60 else f"{seconds:.1f}\u00a0s"


def charts_svg(result: Audit) -> dict[str, str]:
    """Returns the charts as SVG, by name. Each is also written beside the page."""
    nominal = {} if (k := result.nominal_k) is None else {f"1/k, promised for k = {k}": 1 / k}
    nominal["guessing the commonest word each time"] = result.floors["commonest token"]
    words, content = "read of all words and pieces of words, in %", "read of the content words, in %"
    points = [replace(point, adversary=_attacker_title(point.adversary)) for point in result.curve]
    budget = ("words and pieces of words sent under one key", content)
    return {
        "overview": charts.bars("All words", words, _best_figures(result, "tokens top-1"), nominal),
        "content": charts.bars("Names and other content words", content, _best_figures(result, "content top-1"), {}),
        "which": charts.bars("Kinds of words", "read of each kind, in %", result.best.by_class, {})
        if result.best
        else "",
        "budget": charts.curve("Content words read, by how much is sent under one key", budget, points),
    }


def _best_figures(result: Audit, measure: str) -> dict[str, Interval]:
    """Returns for each attacker the best figure of any attack by this measure."""
    measured = [cell for cell in result.results if measure in cell.measures]
    best_cells = {
        name: strongest(tuple(cell for cell in measured if cell.adversary == name), measure)
        for name in result.adversaries
    }
    return {_attacker_title(name): cell.measures[measure] for name, cell in best_cells.items() if cell is not None}


def _attacker_title(name: str) -> str:
    return ATTACKER_TITLES.get(name, name)


def code(text: str) -> Markup:
    """Returns HTML with words between backticks as code."""
    parts = str(escape(text)).split("`")
    return Markup("".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts)))


def escape_rare_characters(text: str, own_letters: frozenset[str]) -> str:
    """Returns a text with escapes for characters that fonts may lack: all but `own_letters` and common alphabets.

    Line ends and tabs stay.
    """

    def is_shown(character: str) -> bool:
        is_in_fonts = character in own_letters or COMMON_CHARACTERS.match(character) is not None
        return character in "\n\t" or (character.isprintable() and is_in_fonts)

    return "".join(character if is_shown(character) else f"\\u{ord(character):04x}" for character in text)


def _attack_lists(result: Audit) -> dict[str, object]:
    """Returns the attacks that have figures, the strongest first, and why each other attack has none."""
    done = [cell for cell in result.results if cell.state == "done"]
    done.sort(key=lambda cell: np.nan_to_num(cell.value("tokens top-1"), nan=-1.0), reverse=True)
    not_done = {(cell.label, cell.state, cell.reason): None for cell in result.results if cell.state != "done"}
    return {"ran": done, "idle": [*not_done]}


def environment(own_letters: str) -> Environment:
    """Returns the template engine of all reports. `visible` shows the characters of `own_letters` as they are."""
    engine = Environment(
        loader=PackageLoader("milkglass", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    letters = frozenset(own_letters)
    engine.filters |= {
        "percent": percent_to_one_decimal,
        "interval": interval,
        "duration": unbroken_duration,
        "code": code,
    }
    engine.filters |= {"attacker": _attacker_title, "visible": lambda text: escape_rare_characters(text, letters)}
    return engine


def render(result: Audit) -> str:
    """Returns the page of an audit."""
    letters = "".join(example.original for example in result.examples)
    template = environment(letters).get_template("audit/report/page.html")
    pictures = {name: Markup(svg) for name, svg in charts_svg(result).items()}  # our own text, escaped where it quotes
    return template.render(
        r=result,
        columns=RESULT_COLUMNS,
        names_words=any("bag f1" in cell.measures for cell in result.results),
        label=label_of(result),
        most=MOST_SHARE,
        much=MUCH_SHARE,
        **_attack_lists(result),
        **pictures,
    )

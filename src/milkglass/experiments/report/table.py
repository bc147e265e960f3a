"""A result as a table for people: Markdown, and an HTML page that needs nothing else.

First come a comparison's defences at a glance (frontier.py), figures over epsilon (curves.py), and the figures with a
paper's figure or a demand, with the reason if ours differs. Then follow all other figures by measure, the meanings of
the names (glossary.py), and the settings. Everything from a recipe or a result is escaped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from milkglass.errors import UsageError
from milkglass.experiments import record
from milkglass.experiments.record import SPREAD, ResultRecord
from milkglass.experiments.report import curves, frontier
from milkglass.experiments.report.glossary import meanings

SAME_FIGURE_TOLERANCE = 0.005  # figures that differ by less, relative to the paper's, are the same number
SETTINGS = ("model", "task", "lora", "seed", "seeds", "private", "rows", "order", "seconds", "attacks", "attacked")
NOT_RESULTS = ("private tokens", "seconds")  # input and cost of a run, not results
UNEXPLAINED = "Not explained: the recipe gives no reason."


@dataclass(frozen=True, slots=True)
class TableLine:
    """One figure.

    Attributes:
        note: the number of a footnote, from 1; 0: there is none.
    """

    record: ResultRecord
    note: int

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def difference(self) -> float | None:
        return None if self.record.published is None else self.record.value - self.record.published

    @property
    def more(self) -> str:
        """Returns the further numbers in words."""
        return ", ".join(f"{word} {number(extra)}" for word, extra in self.record.more.items())


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A result, as it is shown.

    Attributes:
        quick: the changes of a quick run; "" for a full run.
        glance: the defences by data set.
        beside: the lines with a published or asked figure.
        groups: the other lines, by measure.
        undefined: figures that are undefined, and why.
    """

    title: str
    quick: str
    paper: str
    about: tuple[tuple[str, str], ...]
    glance: Mapping[str, list[frontier.DefencePoint]]
    curves: tuple[curves.Curves, ...]
    beside: tuple[TableLine, ...]
    groups: tuple[tuple[str, tuple[TableLine, ...]], ...]
    undefined: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    meanings: tuple[tuple[str, str], ...]


def read(result: Mapping[str, Any]) -> ResultTable:
    """Returns the table of a result.

    Args:
        result: what a run wrote as JSON.
    """
    notes: list[str] = []
    all_records = record.read(result)
    records = [figure for figure in all_records if not math.isnan(figure.value)]
    lines = [TableLine(figure, _footnote_number(figure, notes)) for figure in records]
    lines_of_measures: dict[str, list[TableLine]] = {}
    for line in lines:
        if line.record.published is None and not line.record.asked:
            lines_of_measures.setdefault(line.record.measure, []).append(line)
    quick_changes, attacks = result.get("quick"), result.get("attacks", {})
    bases = {name: entry.get("attack", name) for name, entry in attacks.items()} if isinstance(attacks, dict) else {}
    return ResultTable(
        title=str(result["recipe"]).removesuffix(".quick") + (" (quick)" if quick_changes is not None else ""),
        quick="" if quick_changes is None else json.dumps(quick_changes, ensure_ascii=False),
        paper=str(result["paper"]),
        about=tuple(_settings_rows(result)),
        glance=frontier.defences(records),
        curves=curves.curves_of(records, result.get("variants", {})),
        beside=tuple(line for line in lines if line.record.published is not None or line.record.asked),
        groups=tuple(
            (measure, tuple(lines_of_measures[measure]))
            for measure in sorted(lines_of_measures, key=lambda measure: measure in NOT_RESULTS)
        ),
        undefined=tuple(
            (figure.name if math.isnan(figure.value) else f"{figure.name}{SPREAD}", figure.undefined)
            for figure in all_records
            if figure.undefined
        ),
        notes=tuple(notes),
        meanings=meanings(records, bases, shares="task" in result),
    )


def _footnote_number(record: ResultRecord, notes: list[str]) -> int:
    """Returns the number of the footnote that says why a figure differs from the paper's. Adds it to `notes`."""
    if record.published is None or abs(record.value - record.published) <= SAME_FIGURE_TOLERANCE * abs(
        record.published
    ):
        return 0
    reason = record.why or UNEXPLAINED
    if reason not in notes:
        notes.append(reason)
    return notes.index(reason) + 1


def _settings_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the settings, the texts and the code of a result, as names and values."""
    settings = [(name, _value(result[name])) for name in SETTINGS if name in result]
    settings += [("data", _pairs(result["data"]))] if "data" in result else []
    settings += [(f"attacker {who}", ", ".join(files) or "no text") for who, files in result.get("public", {}).items()]
    for name, values in result.get("variants", {}).items():
        settings.append((f"variant {name}", _pairs(values) or "nothing is obfuscated"))
    if "texts" in result:
        settings.append(("texts", _pairs(result["texts"])))
    if "training" in result:
        settings.append(("training", _pairs({n: v for n, v in result["training"].items() if v is not None})))
    code = result.get("made", {})
    other_commits = f", begun by {code['begun']['commit']}" if "begun" in code else ""
    other_commits += f", parts of it by {', '.join(code['cells'])}" if "cells" in code else ""
    return [
        *settings,
        ("made by", f"milkglass {code.get('milkglass')} {code.get('commit')}, {code.get('date')}{other_commits}"),
    ]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_value(value, True)}" for name, value in values.items())


def _value(value: Any, inner: bool = False) -> str:
    """Returns a setting in words.

    Args:
        inner: whether it is among others.
    """
    if isinstance(value, Mapping):
        text = _pairs({name: inner_value for name, inner_value in value.items() if inner_value is not None})
    elif isinstance(value, list):
        text = ", ".join(map(str, value))
    else:
        return str(value)
    return f"({text})" if inner else text


def number(value: float | None, sign: bool = False) -> str:
    """Formats a number with four significant digits or more, no trailing zeros, and a minus that does not break off."""
    if value is None:
        return ""
    text = f"{value:+.4f}" if sign else f"{value:.4f}"
    text = (text.rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:{'+' if sign else ''},.2f}").replace(
        "-", "\u2212"
    )
    return "0" if text in ("+0", "\u22120", "") else text


# --- Markdown ---------------------------------------------------------------------------------------------------------
_MARKS = re.compile(r"([\\`*_{}\[\]()#+!|<>~&$])")


def escaped(text: str) -> str:
    """Returns the text as Markdown shows it letter by letter, also inside a table."""
    return _MARKS.sub(r"\\\1", " ".join(text.split()))


def markdown(table: ResultTable) -> str:
    return _rendered("result.md", t=table)


def html(table: ResultTable) -> str:
    glances = {data: Markup(frontier.one_result_svg(points)) for data, points in table.glance.items()}  # noqa: S704 - escaped
    plotted = Markup(curves.curves_svg(table.curves)) if table.curves else ""  # noqa: S704 - it escapes its texts
    return _rendered("result.html", t=table, glances=glances, over_epsilon=plotted)


def _rendered(name: str, **values: Any) -> str:
    """Returns a template beside this file. In HTML everything is escaped, in Markdown what passes the filter "md"."""
    environment = Environment(
        autoescape=name.endswith(".html"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "md": escaped}
    template = environment.from_string(Path(__file__).with_name(name).read_text("utf-8"))
    return template.render(values).rstrip("\n") + "\n"


# --- files ------------------------------------------------------------------------------------------------------------
def write(result: Path) -> tuple[Path, Path]:
    """Writes NAME.md and NAME.html beside NAME.json."""
    if result.suffix != ".json":
        raise UsageError(f"{result.name} is not a result", "give the .json that a run wrote")
    table = read(json.loads(result.read_text("utf-8")))
    pages = result.with_suffix(".md"), result.with_suffix(".html")
    pages[0].write_text(markdown(table), "utf-8")
    pages[1].write_text(html(table), "utf-8")
    return pages


def terminal_text(table: ResultTable) -> str:
    """Returns the figures for a terminal: those with a paper's figure or a demand, or all if there are none."""
    lines = table.beside or tuple(table_line for _, part in table.groups for table_line in part)
    width = max((len(table_line.name) for table_line in lines), default=0)
    text_lines = [table.title]
    for line in lines:
        record = line.record
        spread = f"{SPREAD} {number(record.half_width)}" if record.half_width is not None else ""
        paper = f"   paper {number(record.published)}" if record.published is not None else ""
        asked = f"   asked: {record.asked}" if record.asked else ""
        text_lines.append(f"{record.name:{width}} {number(record.value):>10}{spread}{paper}{asked}")
    return "\n".join(text_lines)

"""Writes a result as a table for people: Markdown, and an HTML page that needs no other file.

First come an overview of a comparison's defences (frontier.py), figures over epsilon (curves.py), and the figures that
have a paper's figure or a demand beside them, with the reason if ours differs. Then follow all other figures by
measure, the meanings of the names (glossary.py), and the settings. Everything from a recipe or a result is escaped.
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
from milkglass.experiments.record import SPREAD_SUFFIX, ResultRecord
from milkglass.experiments.report import curves, frontier
from milkglass.experiments.report.glossary import meanings

SAME_FIGURE_TOLERANCE = 0.005  # figures that differ by less, relative to the paper's, are the same number
SETTING_NAMES = ("model", "task", "lora", "seed", "seeds", "private", "rows", "order", "seconds", "attacks", "attacked")
LAST_MEASURES = ("private tokens", "seconds")  # input and cost of a run, which follow its results
UNEXPLAINED_NOTE = "Not explained: the recipe gives no reason."


@dataclass(frozen=True, slots=True)
class TableLine:
    """Holds a figure as a line of a table, with its footnote.

    Attributes:
        record: the figure.
        footnote: the number of the line's footnote, from 1; 0: there is none.
    """

    record: ResultRecord
    footnote: int

    @property
    def name(self) -> str:
        """Returns the name of the figure."""
        return self.record.name

    @property
    def difference(self) -> float | None:
        """Returns by how much our value exceeds the paper's. None: there is no paper's."""
        return None if self.record.published is None else self.record.value - self.record.published

    @property
    def more_text(self) -> str:
        """Returns the further numbers about the figure as text, such as "seeds 3, rows 400"."""
        return ", ".join(f"{word} {format_number(extra)}" for word, extra in self.record.further_numbers.items())


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Holds a result in the form that the pages show.

    Attributes:
        title: the name of the recipe, and that the run was a quick one if it was.
        quick_changes: what a quick run changes, as JSON; "" for a full run.
        paper: the citation of the recipe's paper.
        settings: the settings, the texts and the code, as names and values.
        overview: the defences of a comparison by data set, in the order of its figures.
        curves: the figures that are drawn over epsilon.
        compared_lines: the lines with a paper's figure or a demand beside them.
        groups: the other lines, by measure.
        undefined: the names of figures that are undefined, and why.
        notes: the texts of the footnotes, in order.
        meanings: the names of measures and variants, and what they mean.
    """

    title: str
    quick_changes: str
    paper: str
    settings: tuple[tuple[str, str], ...]
    overview: Mapping[str, list[frontier.DefencePoint]]
    curves: tuple[curves.Curves, ...]
    compared_lines: tuple[TableLine, ...]
    groups: tuple[tuple[str, tuple[TableLine, ...]], ...]
    undefined: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    meanings: tuple[tuple[str, str], ...]


def result_table(result: Mapping[str, Any]) -> ResultTable:
    """Makes the table of a result, from the JSON document that a run wrote."""
    notes: list[str] = []
    all_records = record.read_records(result)
    records = [entry for entry in all_records if not math.isnan(entry.value)]
    lines = [TableLine(entry, _footnote_number(entry, notes)) for entry in records]
    lines_by_measure: dict[str, list[TableLine]] = {}
    for line in lines:
        if line.record.published is None and not line.record.asked:
            lines_by_measure.setdefault(line.record.measure, []).append(line)
    quick_changes, attacks = result.get("quick"), result.get("attacks", {})
    attack_of_name = (
        {name: entry.get("attack", name) for name, entry in attacks.items()} if isinstance(attacks, dict) else {}
    )
    return ResultTable(
        title=str(result["recipe"]).removesuffix(".quick") + (" (quick)" if quick_changes is not None else ""),
        quick_changes="" if quick_changes is None else json.dumps(quick_changes, ensure_ascii=False),
        paper=str(result["paper"]),
        settings=tuple(_settings_rows(result)),
        overview=frontier.points_by_data(records),
        curves=curves.curves_of(records, result.get("variants", {})),
        compared_lines=tuple(line for line in lines if line.record.published is not None or line.record.asked),
        groups=tuple(
            (measure, tuple(lines_by_measure[measure]))
            for measure in sorted(lines_by_measure, key=lambda measure: measure in LAST_MEASURES)
        ),
        undefined=tuple(
            (entry.name if math.isnan(entry.value) else f"{entry.name}{SPREAD_SUFFIX}", entry.undefined)
            for entry in all_records
            if entry.undefined
        ),
        notes=tuple(notes),
        meanings=meanings(records, attack_of_name, are_shares="task" in result),
    )


def _footnote_number(record: ResultRecord, notes: list[str]) -> int:
    """Returns the number of the footnote that says why a figure differs from the paper's; 0 if it does not differ.

    The footnote is added to `notes` if it is not among them.
    """
    if record.published is None:
        return 0
    if abs(record.value - record.published) <= SAME_FIGURE_TOLERANCE * abs(record.published):
        return 0
    reason = record.why or UNEXPLAINED_NOTE
    if reason not in notes:
        notes.append(reason)
    return notes.index(reason) + 1


def _settings_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the settings, the texts and the code of a result, as names and values."""
    settings = [(name, _setting_text(result[name])) for name in SETTING_NAMES if name in result]
    settings += [("data", _named_values(result["data"]))] if "data" in result else []
    settings += [
        (f"attacker {attacker}", ", ".join(files) or "no text") for attacker, files in result.get("public", {}).items()
    ]
    for name, values in result.get("variants", {}).items():
        settings.append((f"variant {name}", _named_values(values) or "nothing is obfuscated"))
    if "texts" in result:
        settings.append(("texts", _named_values(result["texts"])))
    if "training" in result:
        settings.append(("training", _named_values({n: v for n, v in result["training"].items() if v is not None})))
    provenance = result.get("made", {})
    other_commits = f", begun by {provenance['begun']['commit']}" if "begun" in provenance else ""
    other_commits += f", parts of it by {', '.join(provenance['cells'])}" if "cells" in provenance else ""
    return [
        *settings,
        (
            "made by",
            f"milkglass {provenance.get('milkglass')} {provenance.get('commit')}, {provenance.get('date')}"
            f"{other_commits}",
        ),
    ]


def _named_values(values: Mapping[str, Any]) -> str:
    """Returns settings as text, such as "epochs = 3, rate = 0.01"."""
    return ", ".join(f"{name} = {_setting_text(value, True)}" for name, value in values.items())


def _setting_text(value: Any, is_nested: bool = False) -> str:
    """Returns the value of a setting as text, in brackets if it is a list or a table inside of another setting."""
    if isinstance(value, Mapping):
        text = _named_values({name: inner_value for name, inner_value in value.items() if inner_value is not None})
    elif isinstance(value, list):
        text = ", ".join(map(str, value))
    else:
        return str(value)
    return f"({text})" if is_nested else text


def format_number(value: float | None, has_sign: bool = False) -> str:
    """Returns a number with four significant digits or more, no trailing zeros, and a minus that does not break off."""
    if value is None:
        return ""
    text = f"{value:+.4f}" if has_sign else f"{value:.4f}"
    text = (text.rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:{'+' if has_sign else ''},.2f}").replace(
        "-", "\u2212"
    )
    return "0" if text in ("+0", "\u22120", "") else text


# --- Markdown ---------------------------------------------------------------------------------------------------------
_MARKDOWN_SIGNS = re.compile(r"([\\`*_{}\[\]()#+!|<>~&$])")


def escape_markdown(text: str) -> str:
    """Returns the Markdown that shows a text letter by letter, also inside a table."""
    return _MARKDOWN_SIGNS.sub(r"\\\1", " ".join(text.split()))


def markdown(table: ResultTable) -> str:
    """Returns the table as Markdown."""
    return _render("result.md", table=table)


def html(table: ResultTable) -> str:
    """Returns the table as an HTML page that needs no other file."""
    overview_plots = {data: Markup(frontier.one_result_svg(points)) for data, points in table.overview.items()}  # noqa: S704 - escaped
    curve_plots = Markup(curves.curves_svg(table.curves)) if table.curves else ""  # noqa: S704 - it escapes its texts
    return _render("result.html", table=table, overview_plots=overview_plots, curve_plots=curve_plots)


def _render(name: str, **values: Any) -> str:
    """Renders a template beside this file. In HTML everything is escaped, in Markdown what passes the filter "md"."""
    environment = Environment(
        autoescape=name.endswith(".html"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": format_number, "md": escape_markdown}
    template = environment.from_string(Path(__file__).with_name(name).read_text("utf-8"))
    return template.render(values).rstrip("\n") + "\n"


# --- files ------------------------------------------------------------------------------------------------------------
def write_pages(result: Path) -> tuple[Path, Path]:
    """Writes NAME.md and NAME.html beside the result NAME.json and returns them. Raises UsageError for another file."""
    if result.suffix != ".json":
        raise UsageError(f"{result.name} is not a result", "give the .json that a run wrote")
    table = result_table(json.loads(result.read_text("utf-8")))
    pages = result.with_suffix(".md"), result.with_suffix(".html")
    pages[0].write_text(markdown(table), "utf-8")
    pages[1].write_text(html(table), "utf-8")
    return pages


def terminal_text(table: ResultTable) -> str:
    """Returns the figures for a terminal: those with a paper's figure or a demand, or all if no figure has either."""
    lines = table.compared_lines or tuple(table_line for _, group_lines in table.groups for table_line in group_lines)
    width = max((len(table_line.name) for table_line in lines), default=0)
    text_lines = [table.title]
    for line in lines:
        record = line.record
        spread = f"{SPREAD_SUFFIX} {format_number(record.half_width)}" if record.half_width is not None else ""
        paper = f"   paper {format_number(record.published)}" if record.published is not None else ""
        demand = f"   asked: {record.asked}" if record.asked else ""
        text_lines.append(f"{record.name:{width}} {format_number(record.value):>10}{spread}{paper}{demand}")
    return "\n".join(text_lines)

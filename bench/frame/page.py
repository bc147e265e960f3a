"""docs/performance.md: its table and its plots, from a result of bench/performance.py."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parts import NAMES

from milkglass.plots import COLOURS, MARKERS, panels, plot_style, svg

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "performance.md"
TABLE = re.compile(r"(<!-- performance (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = "| figure | asked | measured | least to most | ours | the other side | threads, type |\n" + "|---" * 7 + "|"
SIDES = ("ours", "bare product")


def line(name: str, one: Mapping[str, Any]) -> str:
    """A figure for the terminal."""
    asked = f", {_asked(one)} asked" if one["asked"] is not None else ""
    verdict = "" if one["holds"] is None else " ok" if one["holds"] else " NOT as asked"
    sides = f"ours {_middle(one, 'ours')}" + (f", {one['what']} {_middle(one, 'other')}" if one["other"] else "")
    ratio = _ratio(one, one["measured"]) + (f" ({_spread(one)})" if len(one["ours"]) > 1 else "")
    return f"{name}: {ratio}{asked}{verdict}; {sides}"


def filled(text: str, result: Mapping[str, Any]) -> str:
    """The page with its blocks made anew."""
    return TABLE.sub(lambda match: f"{match[1]}{BLOCKS[match[2]](result)}{match[3]}", text)


def write(path: Path, docs: Path = DOCS) -> None:
    """Fill the page and draw the plots of a whole run's result. Raises ValueError, and writes nothing, for another."""
    found = _whole(path)
    page = docs / PAGE.name
    page.write_text(filled(page.read_text("utf-8"), found), "utf-8")
    for name, drawing in plots(found["curves"]):
        (docs / f"performance-{name}.svg").write_text(drawing, "utf-8")


def _whole(path: Path) -> dict[str, Any]:
    hint = "give --json the result of a whole run, or make one: make bench"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; {hint}")
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        missing = [name for name in NAMES if name not in found["parts"]]
        quick = found["quick"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of this program; {hint}") from error
    if quick or missing:
        what = "of small sizes (--quick)" if quick else f"without {', '.join(missing)}"
        raise ValueError(f"{path} is a result {what}; {hint}")
    return found


def plots(curves: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Name and drawing of each kind of work: a panel an axis."""
    names = dict.fromkeys(one["work"] for one in curves)
    return [(name.replace(" ", "-"), _drawn([one for one in curves if one["work"] == name])) for name in names]


def table(result: Mapping[str, Any]) -> str:
    rows = [HEAD]
    for one in result["figures"]:
        note = f"; {one['note']}" if one["note"] else ""
        other = f"{one['what']}: {_middle(one, 'other')}" if one["other"] else "a limit" if one["asked"] else ""
        cells = [one["measure"] + note, _asked(one), _verdict(one), _spread(one), _middle(one, "ours"), other]
        rows.append("| " + " | ".join([*cells, f"{one['threads']}, {one['dtype']}"]) + " |")
    return "\n".join(rows) + "\n"


def machine(result: Mapping[str, Any]) -> str:
    made, versions = result["made"], ", ".join(f"{name} {one}" for name, one in result["versions"].items())
    size = " Small sizes (`--quick`): asked values are for the full ones." if result["quick"] else ""
    return (
        f"Measured on {made['date']} by commit {made['commit']}: {result['machine']} "
        f"({', '.join(result['instructions'])}), {result['cores']} cores, "
        f"{result['memory GB']} GB; load of the machine before and after {result['load'][0]} and {result['load'][1]}; "
        f"{versions}; the whole run took {result['seconds'] / 60:.0f} min.{size}\n"
    )


BLOCKS = {"table": table, "machine": machine}


def _asked(one: Mapping[str, Any]) -> str:
    return "" if one["asked"] is None else f"{one['rule']} {_ratio(one, one['asked'])}"


def _verdict(one: Mapping[str, Any]) -> str:
    shown = _ratio(one, one["value"])
    return f"{shown}, **not as asked**" if one["holds"] is False else shown


def _spread(one: Mapping[str, Any]) -> str:
    return f"{_number(one['least'])} to {_number(one['most'])}" if len(one["ours"]) > 1 else "one round"


def _ratio(one: Mapping[str, Any], value: float) -> str:
    return _number(value) if one["other"] else f"{_number(value)} {one['unit']}"


def _middle(one: Mapping[str, Any], side: str) -> str:
    values = sorted(one[side])
    return f"{_number((values[len(values) // 2] + values[(len(values) - 1) // 2]) / 2)} {one['unit']}"


def _number(value: float) -> str:
    """Three digits that count, ratios close to 1 with two decimals."""
    return f"{value:.2f}" if 0.1 <= value < 10 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _drawn(curves: Sequence[Mapping[str, Any]]) -> str:
    with plot_style():
        figure, places = panels(len(curves))
        for axes, one in zip(places, curves, strict=True):
            xs, *lines = zip(*one["points"], strict=True)
            for side, ys, colour, marker in zip(SIDES, lines, COLOURS, MARKERS, strict=False):
                axes.plot(xs, ys, marker=marker, markersize=4, color=colour, label=side)
            axes.set(xlabel=f"{one['axis']} ({one['fixed']})", ylabel="seconds", xlim=(0, None), ylim=(0, None))
            axes.locator_params(axis="x", nbins=5)
            axes.legend()
        axis = ", ".join(one["axis"] for one in curves)
        return svg(figure, f"seconds of {curves[0]['work']} against {axis}") + "\n"

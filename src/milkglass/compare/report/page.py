"""The page of a comparison: one HTML file that needs nothing else, and compare.json beside it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from markupsafe import Markup, escape

from milkglass import files
from milkglass.audit.report.page import environment, unbroken_duration
from milkglass.compare.report import picture, words
from milkglass.compare.result import ComparisonResult, WayResult
from milkglass.compare.verdict import gap_text, shows_nothing_learnt


def render(result: ComparisonResult) -> str:
    """Returns the page. The template engine escapes every text."""
    own = "".join(way.reading.example.original for way in result.finished_ways if way.reading and way.reading.example)
    templates = environment(own)
    templates.filters["quality"] = lambda value: words.with_interval(value, result.measure)
    templates.filters["share"] = lambda way, share: words.share_text(way, share, shows_interval=True)
    templates.filters["gap"] = lambda value: gap_text(value, result.measure)
    templates.filters["read"] = lambda way: words.content_share_text(way, shows_interval=True)
    templates.filters["rouge"] = words.rouge
    templates.filters["guessing"] = words.guessing
    templates.filters["guessing_of"] = words.guessing_of_class
    templates.filters["processor"] = processor_text
    templates.filters["breakable"] = _breakable_parts
    templates.filters["whole_options"] = _with_whole_options
    templates.globals["quality_name"] = words.QUALITY_NAMES[result.measure]
    templates.globals["read_meaning"] = words.READ_MEANING
    templates.globals["guessing_meaning"] = words.GUESSING_MEANING
    templates.globals["unknown_meaning"] = words.UNKNOWN_MEANING
    templates.globals["nothing_meaning"] = words.NOTHING_MEANING
    templates.globals["has_unmeasured"] = words.has_unmeasured(result)
    templates.globals["in_full_meaning"] = words.IN_FULL_MEANING
    templates.globals["command_in_full"] = words.command_in_full(result)
    templates.globals["is_nothing_learnt"] = is_nothing_learnt = shows_nothing_learnt(result)
    best = None if is_nothing_learnt else result.best_local
    templates.globals["chosen_name"] = None if best is None else best.name
    template = templates.get_template("compare/report/page.html")
    drawn = picture.drawn_ways(result)
    undrawn = [way.title for way in result.finished_ways if way not in drawn]
    return template.render(r=result, picture=Markup(picture.picture_svg(result)), undrawn=undrawn)


def processor_text(way: WayResult) -> str:
    """Returns the processor's time of a way, such as "7.2 s for 1,000; 1 min 26 s once".

    A training that was killed after its last step has no count of its seconds.
    """
    texts = "not counted for 1,000" if math.isnan(way.seconds) else f"{unbroken_duration(way.seconds)} for 1,000"
    setup = "setting up not counted" if math.isnan(way.setup) else f"{unbroken_duration(way.setup)} once"
    return f"{texts}; {setup}"


def _breakable_parts(figure: str) -> Markup:
    """Returns a cell of the table as HTML. Lines break between words, not inside a figure or interval."""
    parts = re.split(r" (?=\()|(?<=least) |(?<=[:;]) | (?=while )", figure)
    has_digit = [any(character.isdigit() for character in part) for part in parts]
    marked_parts = (
        Markup("<span>{}</span>").format(part) if is_figure else escape(part)
        for part, is_figure in zip(parts, has_digit, strict=True)
    )
    return Markup("<div>{}</div>").format(Markup(" ").join(marked_parts))


def _with_whole_options(sentence: str) -> Markup:
    """Returns a sentence as HTML in which no line ends inside an option such as --epochs."""
    parts = re.split(r"(--[a-z][a-z-]*)", sentence)
    return Markup("").join(
        Markup('<span class="whole">{}</span>').format(part) if part.startswith("--") else escape(part)
        for part in parts
    )


PAGE_FILES = ("compare.html", "compare.json", "compare.svg")


def set_aside(result: ComparisonResult, out: Path) -> Path | None:
    """Moves the page of another comparison in `out` to the folder of its run. Returns where it is, or None."""
    earlier = out / "compare.json"
    if not earlier.is_file():
        return None
    run = _run_of(earlier)
    if run == result.origin.get("run"):
        return None
    folder = files.make_private_dir(out / "runs" / run)
    for name in PAGE_FILES:
        if (out / name).is_file():
            (out / name).replace(folder / name)
    return folder / "compare.html"


def _run_of(page: Path) -> str:
    """Returns the name of the run that wrote a page's compare.json, or "earlier" if the file does not name one."""
    try:
        run = json.loads(page.read_text("utf-8"))["origin"]["run"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "earlier"
    return run if isinstance(run, str) and run.isalnum() else "earlier"


def write(result: ComparisonResult, out: Path) -> Path:
    """Writes compare.html, compare.json and compare.svg into `out`, and returns the page. They hold private text."""
    files.make_private_dir(out)
    files.write(out / "compare.svg", picture.picture_svg(result))
    files.write(
        out / "compare.json", json.dumps(result.to_json(), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    )
    page = out / "compare.html"
    files.write(page, render(result))
    return page

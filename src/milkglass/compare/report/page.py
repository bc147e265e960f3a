"""The page of a comparison: one HTML file that needs nothing else, and compare.json beside it."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from milkglass import files
from milkglass.audit.report.page import duration, visible
from milkglass.compare.report import picture, words
from milkglass.compare.result import Compared


def render(result: Compared) -> str:
    """Returns the page. The template engine escapes every text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    texts = frozenset(
        "".join(one.reading.example.original for one in result.finished if one.reading and one.reading.example)
    )
    environment.filters |= {
        "quality": lambda value: words.with_interval(value, result.measure),
        "share": words.percent,
        "read": words.read_by_attacks,
        "rouge": words.rouge,
        "duration": duration,
        "visible": lambda text: visible(text, texts),
    }
    source = resources.files("milkglass.compare.report").joinpath("page.html").read_text("utf-8")
    return environment.from_string(source).render(r=result, picture=Markup(picture.picture_svg(result)))


def write(result: Compared, out: Path) -> Path:
    """Writes compare.html, compare.json and compare.svg into `out`, and returns the page. They hold private text."""
    files.private_dir(out)
    files.write(out / "compare.svg", picture.picture_svg(result))
    files.write(
        out / "compare.json", json.dumps(result.to_json(), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    )
    page = out / "compare.html"
    files.write(page, render(result))
    return page

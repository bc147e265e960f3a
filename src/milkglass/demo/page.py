"""The page that a demo leaves: one HTML file that needs nothing else, no script and no network.

Knows only `DemoResult`; every text in it is escaped by the template engine.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from milkglass.demo.result import DemoResult

IDS_SHOWN = 90  # of a text; the rest is counted


def percent(fraction: float) -> str:
    """`0.1234` as `12.3 %`; what would round to nothing keeps two figures. The space does not break."""
    value = 100 * fraction
    if value == 0:
        return "0\u00a0%"
    return f"{value:.1f}\u00a0%" if value >= 0.1 else f"{value:.2g}\u00a0%"


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


def duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{seconds:.1f} s"


def render(result: DemoResult) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "size": size, "duration": duration}
    source = files("milkglass.demo").joinpath("page.html").read_text("utf-8")
    return environment.from_string(source).render(r=result, ids_shown=IDS_SHOWN)


def write_page(path: Path, result: DemoResult) -> None:
    path.write_text(render(result), "utf-8")

"""What a demo shows at its end: in the terminal side by side, in short, and a page that shows all of it.

The page is one HTML file that needs nothing else, no script and no network; every text in it is escaped by the template
engine. Out of scope: anything but `DemoResult`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milkglass.demo.result import DemoResult, View

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


# --- in the terminal --------------------------------------------------------------------------------------------------
SHOWN = 3
CUT = 18  # ids and guesses of each text


def show(console: Console, result: DemoResult, page: Path) -> None:
    table = Table(title="The same texts, three times", title_justify="left", show_lines=True, expand=True)
    for heading in ("the client sees", "the server saw", "an attacker reads"):
        table.add_column(heading, ratio=1)
    for one in result.classified[:SHOWN]:
        _row(table, f"{one.text.client}\n-> {one.predicted}", one.text)
    for two in result.generated[:SHOWN]:
        _row(table, two.prompt.client, two.prompt)
        _row(table, f"reply: {two.reply.client or '(empty)'}", two.reply)
    console.print(table)
    lines = [
        f"{result.correct} of {result.asked} unseen messages sorted correctly ({percent(result.accuracy)}); "
        f"{result.alone} by a linear model over the client's own rows, with nothing sent"
    ]
    for model in (result.classifier, result.generator):
        results = model.recovery
        lines.append(
            f"{model.ref}: an attacker with {results.texts:,} public texts of the same kind reads "
            f"{percent(results.deciphered_top1)} of the running tokens; by nearest neighbours alone "
            f"{percent(results.running_top1)}"
        )
    lines.append("(Counted without special tokens and the chat template's, which every text shares.)")
    lines.append("Obfuscation is not encryption: the more text crosses under one key, the more is read (THREATS.md).")
    for line in lines:
        console.print(Text(line))
    console.print(Text(f"{duration(result.seconds)}; the page: {page.resolve()}"), soft_wrap=True, highlight=False)


def _row(table: Table, client: str, view: View) -> None:
    """Texts are data, not markup: they go in as Text."""
    ids = " ".join(map(str, view.server[:CUT]))
    guess = Text()
    for piece in view.attacker[:CUT]:
        if guess and not piece.joined:
            guess.append(" ")
        guess.append(piece.text, style="bold underline" if piece.right else "dim")
    more = " ..." if len(view.server) > CUT else ""
    table.add_row(Text(client), Text(ids + more), guess.append(more))

"""The end of the demo in the terminal: side by side, in short. The page tells all."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from milkglass.demo.page import duration, percent
from milkglass.demo.result import DemoResult, View

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
    right = f"{result.correct} of {result.asked} unseen messages sorted rightly ({percent(result.accuracy)})"
    console.print(Text(right), highlight=False)
    for model in (result.classifier, result.generator):
        results = model.recovery
        console.print(
            Text(
                f"{model.ref}: an attacker with {results.texts:,} public texts of the same kind reads "
                f"{percent(results.deciphered_top1)} of the running tokens; by nearest neighbours alone "
                f"{percent(results.running_top1)} (blind guess {percent(results.guess)}, nominal 1/k "
                f"{percent(results.nominal)})"
            ),
            highlight=False,
        )
    console.print(Text("(Counted without special tokens and the chat template's, which every text shares.)"))
    console.print(
        Text("Obfuscation is not encryption: the more text crosses under one key, the more is read (THREATS.md).")
    )
    console.print(Text(f"{duration(result.seconds)}; the page: {page.resolve()}"), soft_wrap=True, highlight=False)


def _row(table: Table, client: str, view: View) -> None:
    """Texts are data, not markup: they go in as Text."""
    ids = " ".join(map(str, view.server[:CUT]))
    guess = Text()
    for piece in view.attacker[:CUT]:
        guess.append(piece.text, style="bold underline" if piece.right else "dim").append(" ")
    more = " ..." if len(view.server) > CUT else ""
    table.add_row(Text(client), Text(ids + more), guess.append(more))

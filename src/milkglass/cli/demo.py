"""`milkglass demo`: the main job on two small models and invented messages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", help="The folder to write the page and the results to.")] = Path(
        "milkglass-demo"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: shows the process, not the quality.")] = False,
) -> None:
    """Compare ways, then obfuscate, serve, fine-tune and use two models, and show who saw what. Takes some minutes."""
    from milkglass.demo.run import run_demo

    run_demo(out, is_quick=quick)

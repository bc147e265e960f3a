"""`milkglass train-config`: what another trainer needs to train a scrambled model on scrambled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from milkglass import files
from milkglass.cli.ui.options import AsJson, refuse_unused
from milkglass.cli.ui.terminal import emit
from milkglass.errors import UsageError


def train_config(
    trainer: Annotated[Literal["trl", "axolotl", "llamafactory"], typer.Argument(help="Who trains.")],
    model: Annotated[Path, typer.Option("--model", help="A folder that `export --for transformers` wrote.")],
    rows: Annotated[
        Path,
        typer.Option("--rows", help="What `encode --out` wrote: .parquet, .jsonl, or for llamafactory a folder."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The YAML file to write.")],
    result: Annotated[Path, typer.Option(help="The folder that the trainer will make.")] = Path("tuned"),
    epochs: Annotated[float, typer.Option(min=0.001, help="Passes over the rows.")] = 3.0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows a step, of each process.")] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=0.0, max=1.0, help="The highest rate.")] = 1e-4,
    max_length: Annotated[int, typer.Option("--max-length", min=2, help="Longer rows are cut.")] = 512,
    cpu: Annotated[bool, typer.Option("--cpu", help="The trainer's machine has no GPU.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a configuration for a trainer that runs wherever the provider runs it. It names no text and no key."""
    from milkglass.engines.trainers import RUN, TrainerSettings, as_yaml, configuration

    settings = TrainerSettings(model, rows, result, epochs, batch_size, learning_rate, max_length, cpu)
    refuse_unused("by axolotl, which has no such setting", {"--cpu": cpu} if trainer == "axolotl" else {})
    settings.check(trainer)
    if out.exists():
        raise UsageError(f"{out} exists already", "give a new name, or remove that one first")
    files.write(out, as_yaml(configuration(trainer, settings)), private=False)
    run = RUN[trainer].format(config=out)
    emit(as_json, {"out": str(out), "trainer": trainer, "run": run}, f"wrote {out}\nnext: {run}")

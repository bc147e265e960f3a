"""`milkglass verify`, `export` and `train-config`: a scrambled folder, checked or written for an engine or trainer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from milkglass import files
from milkglass.cli.ui.options import AsJson, KeyOptions, open_original, refuse_unused, require_folder, with_options
from milkglass.cli.ui.terminal import emit, note, progress_bars
from milkglass.errors import CorruptCheckpoint, KeyForOtherModel, UsageError

if TYPE_CHECKING:
    from milkglass.client.key.key import Key

ENGINES_NOTE = "docs/engines.md has the commands; to generate, vLLM, SGLang and `milkglass serve` take the first folder"


@with_options
def verify(
    out: Annotated[Path, typer.Argument(help="A folder that `obfuscate` wrote.")],
    *,
    key: KeyOptions,
    as_json: AsJson = False,
) -> None:
    """Check that OUT is the key's model, scrambled, and holds nothing that it shouldn't."""
    from milkglass.client.obfuscate.preflight import assumed_head_notice, require_sound
    from milkglass.client.obfuscate.verify import verify as check

    require_folder(out, "give the folder that `milkglass obfuscate` wrote")
    unlocked = key.open()
    unlocked.key.require_whole()
    _require_key_of_folder(out, unlocked.key)
    base = open_original(key.model or unlocked.key.info.model)
    require_sound(base)
    if warning := assumed_head_notice(base):
        note(warning)
    if not as_json:
        note("scrambling the original again in memory, to compare; this takes about as long as `obfuscate`")
    with progress_bars(as_json) as stage:
        unlocked.key.require_model(base.digest(stage("check the model", base.total_bytes)))
        checks = check(base, unlocked.key, out, stage)
    passed = all(outcome.passed for outcome in checks)
    emit(
        as_json,
        {"out": str(out), "passed": passed, "checks": [asdict(outcome) for outcome in checks]},
        "\n".join(f"{'ok  ' if outcome.passed else 'FAIL'}  {outcome.name}: {outcome.detail}" for outcome in checks),
    )
    if not passed:
        failed_names = ", ".join(outcome.name for outcome in checks if not outcome.passed)
        raise CorruptCheckpoint(
            f"{out} fails: {failed_names}", "don't upload it; make it again with `milkglass obfuscate`"
        )


def _require_key_of_folder(out: Path, key: Key) -> None:
    """Raises KeyForOtherModel if another key made the folder. All of its tensors would be reported as wrong."""
    from milkglass.client.remote.responses import is_made_with
    from milkglass.models.checkpoint import read_json
    from milkglass.models.file_names import CONFIG, KEY_ID

    config = out / CONFIG
    key_id = read_json(config).get(KEY_ID) if config.is_file() else None
    if is_made_with({"key_id": key_id}, key) is False:
        raise KeyForOtherModel(f"{out} was scrambled with another key than this one", "give the key it was made with")


@with_options
def export(
    folder: Annotated[Path, typer.Argument(help="A folder that `obfuscate` or `--fetch` wrote.")],
    engine: Annotated[
        Literal["llamacpp", "transformers"],
        typer.Option("--for", help="llamacpp: a GGUF file. transformers: a folder with an opaque tokenizer."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The new file or folder.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Write a scrambled model for an engine that loads none without a vocabulary: each token gets an opaque name."""
    require_folder(folder, "give the folder that `milkglass obfuscate` wrote")
    files.require_new(out)
    from milkglass.files import require_writable
    from milkglass.models.file_names import DELTA_CONFIG

    require_writable(out)
    if (folder / DELTA_CONFIG).is_file():
        raise UsageError(f"{folder} is a delta", "make the whole folder: `milkglass obfuscate` without --delta")
    with progress_bars(as_json) as stage:
        if engine == "llamacpp":
            from milkglass.engines.gguf_file import write_gguf

            write_gguf(folder, out, stage)
        else:
            from milkglass.engines.opaque_tokenizer import copy_with_tokenizer

            copy_with_tokenizer(folder, out)
    emit(as_json, {"out": str(out), "for": engine}, f"wrote {out} for {engine}; {ENGINES_NOTE}")


def train_config(
    trainer: Annotated[Literal["trl", "axolotl", "llamafactory"], typer.Argument(help="Who trains.")],
    model: Annotated[Path, typer.Option("--model", help="A folder that `export --for transformers` wrote.")],
    rows: Annotated[
        Path, typer.Option("--rows", help="What `encode --out` wrote: .parquet, .jsonl, or for llamafactory a folder.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The YAML file to write.")],
    tuned_folder: Annotated[Path, typer.Option("--result", help="The folder that the trainer will make.")] = Path(
        "tuned"
    ),
    epochs: Annotated[float, typer.Option(min=0.001, help="Passes over the rows.")] = 3.0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows a step, of each process.")] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=0.0, max=1.0, help="The highest rate.")] = 1e-4,
    max_length: Annotated[int, typer.Option("--max-length", min=2, help="Longer rows are cut.")] = 512,
    cpu: Annotated[bool, typer.Option("--cpu", help="The trainer's machine has no GPU.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a configuration for a trainer that runs wherever the provider runs it. It names no text and no key."""
    from milkglass.engines.trainer_configs import RUN_COMMANDS, TrainerSettings, trainer_config, yaml_text

    settings = TrainerSettings(model, rows, tuned_folder, epochs, batch_size, learning_rate, max_length, cpu)
    refuse_unused("by axolotl, which has no such setting", {"--cpu": cpu} if trainer == "axolotl" else {})
    settings.require_fit(trainer)
    files.require_new(out)
    files.write(out, yaml_text(trainer_config(trainer, settings)), is_private=False)
    run_command = RUN_COMMANDS[trainer].format(config=out)
    emit(as_json, {"out": str(out), "trainer": trainer, "run": run_command}, f"wrote {out}\nnext: {run_command}")

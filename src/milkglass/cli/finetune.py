"""`milkglass finetune`: scramble training data here, and train a scrambled model with it on a server.

Label names and the scale of scores stay here, sealed in the key.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass.cli.ui.columns import ROW_FORMATS, ColumnOptions
from milkglass.cli.ui.job_progress import Fetch, finish_job, follow_hint
from milkglass.cli.ui.options import (
    AsJson,
    KeyOptions,
    ServerOptions,
    open_original,
    open_session,
    option_of,
    refuse_unused,
    training_settings,
    with_options,
)
from milkglass.cli.ui.terminal import emit, progress_bars, report_activity

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey


@with_options
def finetune(
    model_id: Annotated[str, typer.Argument(help="The scrambled model's id on the server.")],
    data: Annotated[Path, typer.Argument(help=f"Training data: {ROW_FORMATS}.")],
    validation: Annotated[
        Path | None, typer.Option(help="Rows by which epochs are compared and accuracy is shown; not trained with.")
    ] = None,
    hold_out: Annotated[
        bool, typer.Option("--hold-out", help="Take a tenth of DATA, at most 1,000 rows, as validation rows.")
    ] = False,
    task: Annotated[
        Literal["classification", "regression", "causal-lm"] | None,
        typer.Option(help="Must fit the data; `regression`: labels are numbers.  [default: as the data]"),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="Passes over the data.  [default: 3; for classification up to 10, for 100 steps]"),
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many steps, whatever --epochs says.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples a step.  [default: 32 for classification, 8 for causal-lm]")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest learning rate.  [default: 1e-4]")] = None,
    early_stopping: Annotated[
        int | None,
        typer.Option(
            help="Stop after this many epochs without improvement; the best is kept.  "
            "[default: 3, with rows to compare by]"
        ),
    ] = None,
    method: Annotated[
        Literal["full", "lora"] | None,
        typer.Option(help="All weights, or LoRA.  [default: full for classification, lora for causal-lm]"),
    ] = None,
    max_length: Annotated[int, typer.Option(help="Longer examples are cut to this many tokens.")] = 512,
    skip_long: Annotated[
        bool, typer.Option("--skip-long", help="Leave out conversations whose answers all lie beyond --max-length.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Another setting, such as lora_rank=64; an unknown name lists all settings.",
        ),
    ] = None,
    suffix: Annotated[str | None, typer.Option("--suffix", help="A suffix of the fine-tuned model's name.")] = None,
    fetch: Fetch = None,
    detach: Annotated[bool, typer.Option("--detach", help="Don't wait: print the job's id.")] = False,
    *,
    columns: ColumnOptions,
    key: KeyOptions,
    server: ServerOptions,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a scrambled model on your DATA. Of the text, scrambled ids alone are uploaded; labels go as numbers.

    DATA: rows with text and label (or text_pair), messages, instruction, input and output, or text alone; --text-column
    and --label-column name other columns. A .txt has a text a line. With --task regression labels are numbers; the
    server sees them standardised, and in their order.
    """
    refuse_unused("with --detach, which waits for no result", {"--fetch": fetch} if detach else {})
    hyperparameters: dict[str, Any] = {
        "n_epochs": epochs, "max_steps": max_steps, "batch_size": batch_size, "learning_rate": learning_rate,
        "early_stopping": early_stopping, "method": method, "max_length": max_length,
        **training_settings(settings or ()),
    }  # fmt: skip
    from milkglass.client.training_request import require_hyperparameters, require_suffix

    require_suffix(suffix)
    require_hyperparameters(hyperparameters, option_of)
    unlocked = key.open()
    with ExitStack() as contexts:
        contexts.enter_context(report_activity(as_json))
        train_file, summary = columns.read_training(data, task)
        validation_file = None if validation is None else columns.read_training(validation, summary.task)[0]
        session = contexts.enter_context(open_session(key, server, unlocked))
        with progress_bars(as_json) as stage:
            job = session.finetune(
                model_id, train_file, validation=validation_file, task=task, suffix=suffix, hold_out=hold_out,
                skip_long=skip_long, stage=stage,
                **hyperparameters,
            )  # fmt: skip
        if detach:
            emit(as_json, {"job": job.id, "status": job.status}, follow_hint(job.id, server, key))
            return
        next_command = "generate" if job.task == "causal-lm" else "classify"
        max_bytes = partial(_max_model_bytes, session.unlocked, key.model)
        labels = session.unlocked.key.info.labels_by_job.get(job.id, {})
        finish_job(session.remote, job.id, fetch, server, as_json, (next_command, key), max_bytes, labels)


def _max_model_bytes(unlocked: UnlockedKey, model: str | None) -> int:
    """Returns the most bytes that the fine-tuned model can have, by the size of the original."""
    from milkglass.client.key.scheme import scheme_of
    from milkglass.client.obfuscate.preflight import max_fine_tuned_bytes

    return max_fine_tuned_bytes(open_original(model or unlocked.key.info.model), scheme_of(unlocked.key))

"""`milkglass finetune` and `job`: scramble data here, train there, watch.

What this module does not know: how training is done. Label names stay here, sealed in the key.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass.cli.options import (
    AllowHttp,
    AsJson,
    Certificate,
    KeyFile,
    ModelRef,
    Opened,
    PassphraseFile,
    ServerUrl,
    TokenFile,
    open_codec,
    open_key,
    open_remote,
)
from milkglass.cli.terminal import Stage, bars, duration, emit, note, watched
from milkglass.errors import CodecError, UsageError

if TYPE_CHECKING:
    from milkglass.client.codec import Codec
    from milkglass.client.dataset import Summary, Written
    from milkglass.client.remote import Remote

Fetch = Annotated[Path | None, typer.Option("--fetch", help="Download the result (scrambled) to this folder.")]


def finetune(
    model_id: Annotated[str, typer.Argument(help="The scrambled model's id on the server.")],
    data: Annotated[Path, typer.Argument(help="Training data: .jsonl, .csv or .tsv.")],
    key: KeyFile,
    server: ServerUrl,
    validation: Annotated[Path | None, typer.Option("--validation", help="Validation data, the same shape.")] = None,
    task: Annotated[
        Literal["classification", "causal-lm"] | None, typer.Option(help="Must fit the data.  [default: as the data]")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many steps, whatever the epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest learning rate.")] = None,
    warmup_ratio: Annotated[float | None, typer.Option(help="Part of the steps that warm up.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.")] = None,
    adam_beta2: Annotated[float | None, typer.Option(help="Adam's second decay rate.")] = None,
    method: Annotated[
        Literal["full", "lora"] | None,
        typer.Option(help="All weights, or LoRA.  [default: full for classification, lora for causal-lm]"),
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of the LoRA matrices.")] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="Scale of the LoRA matrices.")] = None,
    full_first: Annotated[int | None, typer.Option(help="First layers trained in full under LoRA.")] = None,
    full_last: Annotated[int | None, typer.Option(help="Last layers trained in full under LoRA.")] = None,
    train_tables: Annotated[
        bool | None, typer.Option("--train-tables/--freeze-tables", help="Whether the embeddings learn under LoRA.")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Longer examples are cut to this many tokens.")] = 512,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Arithmetic of the training.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the training.")] = None,
    save_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints on the server.")] = None,
    logging_steps: Annotated[int | None, typer.Option(help="Steps between reports of the loss.")] = None,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Ends the fine-tuned model's name.")] = None,
    fetch: Fetch = None,
    detach: Annotated[bool, typer.Option("--detach", help="Don't wait: print the job's id.")] = False,
    model: ModelRef = None,
    passphrase_file: PassphraseFile = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a scrambled model on your DATA. Text becomes scrambled ids here; only those are uploaded.

    DATA: {"text", "label"} (or "text_pair"), {"messages": [...]}, {"instruction", "input", "output"} or {"text"} in
    JSON Lines, or CSV/TSV with the columns text (or sentence) and label.
    """
    opened = open_key(key, passphrase_file)
    codec = open_codec(opened.key, model)
    train = _checked(data, task)
    check = None if validation is None else _checked(validation, train.task)
    labels = _labels(opened, train)
    asked = {
        "n_epochs": epochs, "max_steps": max_steps, "batch_size": batch_size, "learning_rate": learning_rate,
        "warmup_ratio": warmup_ratio, "weight_decay": weight_decay, "method": method, "lora_rank": lora_rank,
        "lora_alpha": lora_alpha, "full_first": full_first, "full_last": full_last, "train_tables": train_tables,
        "adam_beta2": adam_beta2, "dtype": dtype, "seed": seed, "save_steps": save_steps,
        "logging_steps": logging_steps, "max_length": min(max_length, codec.limit),
        "task": train.task, "num_labels": len(labels) if labels else None,
    }  # fmt: skip
    hyperparameters = require_hyperparameters({n: v for n, v in asked.items() if v is not None})
    if labels is not None:
        opened = opened.remember(labels)
    with open_remote(server, token_file, certificate, allow_http) as remote:
        with tempfile.TemporaryDirectory(prefix="milkglass-") as scratch, bars(as_json) as stage:
            send = _Sender(remote, codec, Path(scratch), labels, hyperparameters["max_length"], stage)
            training_file = send(data, train, "train.parquet")
            validation_file = None if validation is None or check is None else send(validation, check, "val.parquet")
        job = remote.create_job(model_id, training_file, hyperparameters, validation_file, suffix)
        if labels is not None:
            opened.remember(labels, str(job["id"]))
        if detach:
            emit(as_json, {"job": job["id"], "status": job.get("status")}, f"job: {job['id']}\n{_comeback(job['id'])}")
            return
        _finish(remote, str(job["id"]), fetch, as_json)


def job(
    job_id: Annotated[str, typer.Argument(help="The job's id, as `finetune` printed it.")],
    server: ServerUrl,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop it for good.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Watch it to its end.")] = False,
    fetch: Fetch = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Look at a fine-tuning job, watch it, cancel it, or fetch its result."""
    with open_remote(server, token_file, certificate, allow_http) as remote:
        if cancel:
            remote.cancel(job_id)
        elif follow or fetch:
            _finish(remote, job_id, fetch, as_json)
            return
        state = remote.job(job_id)
        shown = {name: state.get(name) for name in ("id", "status", "fine_tuned_model", "error")}
        emit(as_json, shown, "\n".join(f"{name}: {value}" for name, value in shown.items() if value is not None))


# --- before -----------------------------------------------------------------------------------------------------------
def _checked(data: Path, task: str | None) -> Summary:
    """Read the whole file once, so that a broken line is told before anything is sent."""
    from milkglass.client.dataset import summarise

    if not data.is_file():
        raise UsageError(f"there is no file {data}", "give .jsonl, .csv or .tsv")
    found = summarise(data)
    if task is not None and task != found.task:
        raise CodecError(f"{data.name} is data for {found.task}, not for {task}", "see `milkglass finetune --help`")
    if found.task == "classification" and len(found.labels) < 2 and task is None:
        raise CodecError(f"{data.name} has 1 label only", "classification needs at least 2")
    return found


def _labels(opened: Opened, train: Summary) -> dict[str, int] | None:
    from milkglass.client.dataset import number_labels

    return number_labels(train.labels, opened.key.about.get("labels")) if train.kind == "labelled" else None


def require_hyperparameters(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the server will check, checked here first: nobody uploads for an hour to learn that a rate is negative."""
    from pydantic import ValidationError

    from milkglass.server.spec import Hyperparameters

    try:
        return Hyperparameters(**asked).model_dump(exclude_none=True, include={*asked})
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]} is {first['input']!r}: {str(first['msg']).lower()}") from None


class _Sender:
    """Scrambles a file into a scratch folder and uploads it. The folder never holds anything but scrambled ids."""

    def __init__(
        self,
        remote: Remote,
        codec: Codec,
        scratch: Path,
        labels: Mapping[str, int] | None,
        max_length: int,
        stage: Stage,
    ) -> None:
        self._remote, self._codec, self._scratch = remote, codec, scratch
        self._labels, self._max_length, self._stage = labels, max_length, stage

    def __call__(self, data: Path, summary: Summary, name: str) -> str:
        from milkglass.client.dataset import write_parquet

        out = self._scratch / name
        tell = self._stage(f"scramble {data.name}", summary.rows)
        written: Written = write_parquet(self._codec, data, out, self._labels, self._max_length, tell)
        if written.cut:
            note(f"{written.cut} of {written.rows} examples of {data.name} were cut to {self._max_length} tokens")
        return self._remote.upload(out, "fine-tune", self._stage)


# --- while it runs ----------------------------------------------------------------------------------------------------
def _finish(remote: Remote, job_id: str, fetch: Path | None, as_json: bool) -> None:
    """Watch to the end; fetch; say what the model is called."""
    last: dict[str, Any] = {}
    try:
        with _board(as_json) as show:
            for event in remote.follow(job_id):
                last.update(event.get("data") or {})
                show(event)
    except KeyboardInterrupt:
        _interrupted(remote, job_id)
        raise
    state = remote.result(job_id)
    tuned = str(state["fine_tuned_model"])
    if fetch is not None:
        with bars(as_json) as stage:
            remote.fetch_model(tuned, fetch, stage)
    numbers = ("loss", "train_loss", "eval_loss", "accuracy", "eval_accuracy")
    metrics = {name: value for name, value in last.items() if name in numbers}
    document = {
        "job": job_id,
        "model": tuned,
        "trained_tokens": state.get("trained_tokens"),
        "metrics": metrics,
        "fetched": None if fetch is None else str(fetch),
    }
    words = [f"fine-tuned model: {tuned}"]
    words += [f"  {name}: {value:.4f}" for name, value in metrics.items() if isinstance(value, int | float)]
    words += [f"  fetched to {fetch}"] if fetch else []
    emit(as_json, document, "\n".join(words))


def _interrupted(remote: Remote, job_id: str) -> None:
    """Ctrl-C ends the watching; whether it ends the job, too, is asked."""
    if watched():
        try:
            keep = typer.confirm("\nLeave the job running on the server?", default=True, err=True)
        except typer.Abort:
            keep = True
        if not keep:
            remote.cancel(job_id)
            note(f"cancelled {job_id}")
            return
    note(f"the job goes on; {_comeback(job_id)}")


def _comeback(job_id: str) -> str:
    return f"come back with: milkglass job {job_id} --follow"


@contextmanager
def _board(as_json: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Steps, loss and time left on a terminal; nothing where nobody watches."""
    if as_json or not watched():
        yield lambda event: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=None, told="")

        def show(event: Mapping[str, Any]) -> None:
            numbers = event.get("data") or {}
            if "step" not in numbers:
                plain = "".join(c for c in str(event.get("message", "")) if c.isprintable())
                console.print(plain[:500], markup=False, highlight=False)
                return
            told = f"loss {numbers['loss']:.4f}  " if isinstance(numbers.get("loss"), int | float) else ""
            if isinstance(numbers.get("eta_seconds"), int | float):
                told += f"{duration(numbers['eta_seconds'])} left"
            progress.update(task, completed=numbers["step"], total=numbers.get("total_steps"), told=told)

        yield show


def register(app: typer.Typer) -> None:
    app.command()(finetune)
    app.command()(job)

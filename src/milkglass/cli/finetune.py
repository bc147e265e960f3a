"""`milkglass finetune`: scramble data here, train there, watch.

What this module does not know: how training is done. Label names and the scale of scores stay here, sealed in the key.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass.cli.ui.job_progress import Fetch, comeback, finish
from milkglass.cli.ui.options import (
    AllowHttp,
    AsJson,
    Certificate,
    KeyFile,
    ModelRef,
    PassphraseFile,
    ServerOptions,
    ServerUrl,
    TokenFile,
    UnlockedKey,
    described,
    key_options,
    open_codec,
    open_key,
)
from milkglass.cli.ui.terminal import bars, emit, note
from milkglass.cli.ui.training_rows import checked, labels_of, remembered, scale_of, write_rows
from milkglass.errors import CodecError, UsageError
from milkglass.progress import Stage

if TYPE_CHECKING:
    from milkglass.client.codec.codec import Codec
    from milkglass.client.data.dataset import Summary
    from milkglass.client.data.label_scale import Scale
    from milkglass.client.remote.remote import Remote

SUFFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the server's own rule


def finetune(
    model_id: Annotated[str, typer.Argument(help="The scrambled model's id on the server.")],
    data: Annotated[Path, typer.Argument(help="Training data: .jsonl, .csv or .tsv.")],
    key: KeyFile,
    server: ServerUrl,
    validation: Annotated[Path | None, typer.Option("--validation", help="Validation data, the same shape.")] = None,
    task: Annotated[
        Literal["classification", "regression", "causal-lm"] | None,
        typer.Option(help="Must fit the data; `regression`: labels are numbers.  [default: as the data]"),
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.  [default: 3]")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many steps, whatever the epochs.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples a step.  [default: 32 for classification, 8 for causal-lm]")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The highest learning rate.  [default: 2e-5 for classification, 1e-4 for causal-lm]"),
    ] = None,
    warmup_ratio: Annotated[float | None, typer.Option(help="Part of the steps that warm up.  [default: 0]")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.  [default: 0]")] = None,
    adam_beta2: Annotated[
        float | None,
        typer.Option(help="Adam's second decay rate.  [default: 0.999 for classification, 0.95 for causal-lm]"),
    ] = None,
    method: Annotated[
        Literal["full", "lora"] | None,
        typer.Option(help="All weights, or LoRA.  [default: full for classification, lora for causal-lm]"),
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of the LoRA matrices.  [default: 256]")] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="Scale of the LoRA matrices.  [default: 16]")] = None,
    full_first: Annotated[
        int | None, typer.Option(help="First layers trained in full under LoRA.  [default: 2]")
    ] = None,
    full_last: Annotated[int | None, typer.Option(help="Last layers trained in full under LoRA.  [default: 1]")] = None,
    train_tables: Annotated[
        bool | None,
        typer.Option(
            "--train-tables/--freeze-tables", help="Whether the embeddings learn under LoRA.  [default: --train-tables]"
        ),
    ] = None,
    max_length: Annotated[int, typer.Option(help="Longer examples are cut to this many tokens.")] = 512,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Arithmetic of the training.  [default: float32]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the training.  [default: 0]")] = None,
    save_steps: Annotated[
        int | None, typer.Option(help="Steps between checkpoints on the server.  [default: 200]")
    ] = None,
    logging_steps: Annotated[
        int | None,
        typer.Option(
            help="Steps between reports of the loss; the first and the last are reported anyway.  [default: 10]"
        ),
    ] = None,
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
    JSON Lines, or CSV/TSV with the columns text (or sentence) and label. With --task regression labels are numbers; the
    server sees them standardised, in the order that they have.
    """
    if suffix is not None and not SUFFIX.fullmatch(suffix):  # it would cross the wire to be refused there
        raise UsageError(
            f"the suffix {suffix!r} is not 1 to 64 signs of A-Z, a-z, 0-9, _ and -",
            "give a name like that; it is sent as it stands, so let it say nothing",
        )
    opened = open_key(key, passphrase_file)
    codec = open_codec(opened.key, model)
    train = checked(data, task)
    check = None if validation is None else checked(validation, train.task)
    labels, scale = labels_of(opened, train), scale_of(opened, train)
    requested = {
        "n_epochs": epochs, "max_steps": max_steps, "batch_size": batch_size, "learning_rate": learning_rate,
        "warmup_ratio": warmup_ratio, "weight_decay": weight_decay, "method": method, "lora_rank": lora_rank,
        "lora_alpha": lora_alpha, "full_first": full_first, "full_last": full_last, "train_tables": train_tables,
        "adam_beta2": adam_beta2, "dtype": dtype, "seed": seed, "save_steps": save_steps,
        "logging_steps": logging_steps, "max_length": min(max_length, codec.limit),
        "task": train.task, "num_labels": len(labels) if labels else None,
    }  # fmt: skip
    hyperparameters = require_hyperparameters({n: v for n, v in requested.items() if v is not None})
    way = ServerOptions(server, token_file, certificate, allow_http)
    with way.open() as remote:
        _require_trainable(described(remote, opened, model_id), train.task)
        opened = remembered(opened, labels, scale)
        with tempfile.TemporaryDirectory(prefix="milkglass-") as scratch, bars(as_json) as stage:
            info = labels if scale is None else scale
            send = _Sender(remote, opened, codec, Path(scratch), info, hyperparameters["max_length"], stage)
            training_file = send(data, train, "train.parquet")
            validation_file = None if validation is None or check is None else send(validation, check, "val.parquet")
        job = remote.create_job(model_id, training_file, hyperparameters, validation_file, suffix)
        job_id = str(job["id"])
        note(f"job: {job_id}")  # at once: whoever is cut off from here on can find it again
        remembered(opened, labels, scale, job_id)
        if detach:
            emit(as_json, {"job": job_id, "status": job.get("status")}, comeback(job_id, way))
            return
        use = "generate" if train.task == "causal-lm" else "classify"
        after = (use, key_options(key, passphrase_file, model))
        finish(remote, job_id, fetch, way, as_json, after, lambda: _largest(opened, model))


# --- before -----------------------------------------------------------------------------------------------------------
def _require_trainable(told: Mapping[str, Any], task: str) -> None:
    """What the server would say after the upload."""
    if task == "causal-lm" and told.get("kind") == "encoder":
        raise CodecError("this data is for generation, and the model is an encoder", "give rows with a label")


def _largest(opened: UnlockedKey, model: str | None) -> int:
    """Bytes that the fine-tuned model can have at most, by what the scrambled one has."""
    from milkglass.client.key.generate import scheme_of
    from milkglass.client.obfuscate.preflight import largest
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.resolve import resolve

    base = Checkpoint.open(resolve(model or str(opened.key.about["model"])))
    return largest(base, scheme_of(opened.key))


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
        opened: UnlockedKey,
        codec: Codec,
        scratch: Path,
        labels: Mapping[str, int] | Scale | None,
        max_length: int,
        stage: Stage,
    ) -> None:
        self._remote, self._opened, self._codec, self._scratch = remote, opened, codec, scratch
        self._labels, self._max_length, self._stage = labels, max_length, stage

    def __call__(self, data: Path, summary: Summary, name: str) -> str:
        out = self._scratch / name
        write_rows(self._opened, self._codec, data, out, summary, self._labels, self._max_length, self._stage)
        return self._remote.upload(out, self._stage)


def register(app: typer.Typer) -> None:
    app.command()(finetune)

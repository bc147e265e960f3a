"""The contract between the server, its workers and the client: what a fine-tuning job receives and returns.

A job is a folder that the server makes and a worker process fills:

    spec.json       a `JobSpec`
    events.jsonl    one `Event` a line, appended by the worker
    checkpoints/    what is trained, to resume from: `complete` marks one that was written to its end, `trained` one
                    without the optimiser's state, which the disk had no room for
    reserve         room that the next checkpoint, or the result, is written to
    result/         the fine-tuned model, adapters merged: an ordinary Hugging Face folder
    status.json     a `Status`, written once, at the end; absent while the job runs or after it was killed
    cancel          exists when the job is to stop for good

Training data are flat tensors in a safetensors file, format `rows/1` (ROWS_TENSORS, docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from milkglass.errors import UsageError

Task = Literal["classification", "regression", "causal-lm"]
Method = Literal["full", "lora"]
MAX_ROW_TOKENS = 8192  # the largest max_length
RESERVE_FILE, COMPLETE_MARK, WEIGHTS_ONLY_MARK = "reserve", "complete", "trained"  # names of files in a job's folder
LATER_SETTINGS = ("early_stopping",)  # hyperparameters that earlier versions did not have
ROWS_METADATA = {"format": "rows/1"}
LABEL_TENSORS = ("labels", "scores", "token_labels")  # a class or a number for each row, an id for each token
ROWS_TENSORS = {"lengths": "I32", "input_ids": "I32", "labels": "I32", "scores": "F32", "token_labels": "I32",
                "token_type_ids": "I8"}  # dtypes, in the order of writing  # fmt: skip
NUMPY_DTYPES = {"I32": "<i4", "F32": "<f4", "I8": "i1"}  # of these tensors in NumPy
ATTACHED_ARGUMENT = "attached"  # argument of a worker that must not outlive the process that started it
INTERRUPTED_EXIT_CODE = 143  # the exit code of a worker that SIGTERM stopped
IGNORED_LABEL = -100  # the label of a token that takes no part in the loss
# ObfusLM, appendix C.3 and Table 8; what it does not say is transformers' default.
GENERATION_DEFAULTS = {"learning_rate": 1e-4, "batch_size": 8, "adam_beta2": 0.95}


class Hyperparameters(BaseModel):
    """Describes how a model is trained. The defaults are those of ObfusLM's appendix C.3.

    Encoders are trained in full; decoders with LoRA of rank 256 and alpha 16 on every linear layer, the first two
    layers and the last one in full. Three defaults are not the paper's: 3 epochs (the paper trains 10), fp32 (it trains
    Llama-3 in bf16), and that embedding tables are trained under LoRA (it does not say so; `train_tables=False` is the
    literal reading).

    Regression is what Hugging Face's Trainer does for a model of one label: problem_type "regression", the mean squared
    error of one number a row, judged by Pearson's correlation as GLUE judges STS-B.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True)  # 16 and 16.0 are one setting

    task: Task = "classification"
    num_labels: int = Field(2, ge=1, le=10_000)  # 1 for regression
    method: Method | None = None  # None: lora for causal-lm, else full
    lora_rank: int = Field(256, ge=1, le=4096)
    lora_alpha: float = Field(16, gt=0)
    full_first: int = Field(2, ge=0, le=1000)  # this many first layers are trained in full under lora
    full_last: int = Field(1, ge=0, le=1000)  # and this many last ones
    train_tables: bool = True  # under lora, whether embedding tables are trained in full
    n_epochs: float = Field(3, gt=0, le=1000)
    max_steps: int | None = Field(None, ge=1)  # overrides n_epochs
    batch_size: int = Field(32, ge=1, le=4096)  # rows of a step
    learning_rate: float = Field(2e-5, gt=0, le=1)
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, le=1)
    adam_beta2: float = Field(0.999, gt=0, lt=1)
    max_length: int = Field(512, ge=1, le=MAX_ROW_TOKENS)  # longer rows are cut
    early_stopping: int | None = Field(None, ge=1)  # epochs that may validate no better; the best epoch stays
    group_by_length: bool = True  # batches of like lengths: far less padding, and not quite a random order
    seed: int = Field(0, ge=0, lt=2**32)
    save_steps: int = Field(200, ge=1)  # optimiser steps between two checkpoints
    logging_steps: int = Field(10, ge=1)  # optimiser steps between two `metrics` events
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the arithmetic; the weights are fp32 while they train

    @model_validator(mode="before")
    @classmethod
    def _add_defaults_of_task(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("task") == "causal-lm":
            return {**GENERATION_DEFAULTS, **values}
        if isinstance(values, dict) and values.get("task") == "regression":
            return {"num_labels": 1, **values}
        return values

    @field_validator("num_labels")
    @classmethod
    def _require_one_number(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("task") == "regression" and value != 1:
            raise ValueError("must be 1 for regression: one number a row")
        return value

    @field_validator("early_stopping")
    @classmethod
    def _require_comparable_epochs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_steps") is not None:
            raise ValueError("no epochs can be compared where max_steps ends the training")
        return value

    @model_serializer(mode="wrap")
    def _leave_out_unset_settings(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out later settings that are off, so that an older training keeps its document."""
        document: dict[str, Any] = fields(self)
        return {name: value for name, value in document.items() if name not in LATER_SETTINGS or value is not None}

    def for_layers(self, layer_count: int | None) -> Hyperparameters:
        """Returns the hyperparameters for a model of `layer_count` layers. None: the number is not known.

        Under LoRA, defaults of `full_first` and `full_last` are lowered if they would leave no layer to adapt. Raises
        UsageError if they were set to such values.
        """
        excess = 0 if layer_count is None else self.full_first + self.full_last - (layer_count - 1)
        if excess <= 0 or self.chosen_method != "lora":
            return self
        lowered: dict[str, int] = {}
        for name in ("full_first", "full_last"):
            if name not in self.model_fields_set:
                lowered[name] = max(0, getattr(self, name) - excess)
                excess -= getattr(self, name) - lowered[name]
        if excess > 0:
            raise UsageError(
                f"{self.full_first} first and {self.full_last} last layers in full leave none of {layer_count} to "
                "adapt",
                'lower full_first or full_last, or use method "full"',
            )
        return self.model_copy(update=lowered)

    @property
    def chosen_method(self) -> Method:
        """Returns the method, also where it follows from the task."""
        return self.method or ("lora" if self.task == "causal-lm" else "full")


class JobSpec(BaseModel):
    """Describes a worker's job. Unknown fields of earlier versions are ignored.

    Attributes:
        model: the absolute path of the model's folder on the server.
        train: the absolute path of the training rows.
        validation: the absolute path of the validation rows. None: there are none.
        hyperparameters: how the model is trained.
        threads: CPU threads. None: torch decides.
        quota: the most bytes of the server's home, two folders above the job's. None: no limit.
    """

    model: str
    train: str
    validation: str | None = None
    hyperparameters: Hyperparameters
    threads: int | None = Field(None, ge=1)
    quota: int | None = Field(None, ge=1)


class Event(BaseModel):
    """Describes one event of a job. Nothing in it comes from the training data itself.

    `metrics` events have data: step, total_steps, loss, learning_rate, epoch, eta_seconds; or eval_loss, and accuracy
    with confusion (counts: a row for each class, a column for what it was taken for), or pearson.
    """

    time: float  # seconds since 1970
    level: Literal["info", "warn", "error"] = "info"
    type: Literal["message", "metrics"] = "message"
    message: str
    data: dict[str, Any] = {}


class Status(BaseModel):
    """Says how a worker's run ended."""

    model_config = ConfigDict(allow_inf_nan=False)

    state: Literal["succeeded", "failed", "cancelled"]
    error: str | None = None  # never contains training data
    resumable: bool = False  # of a failed job: its folder has a checkpoint to go on from
    trained_tokens: int = 0
    metrics: dict[str, float] = {}


LORA_SETTINGS = ("lora_rank", "lora_alpha", "full_first", "full_last", "train_tables")


def refuse_unused_lora_settings(hyperparameters: Hyperparameters, name_of: Callable[[str], str] = str) -> None:
    """Raises UsageError if a LoRA setting was given and the method is not LoRA.

    Args:
        name_of: returns a hyperparameter's name in messages.
    """
    settings = [name for name in LORA_SETTINGS if name in hyperparameters.model_fields_set]
    if settings and hyperparameters.chosen_method != "lora":
        raise UsageError(
            f"{name_of(settings[0])} is for the method lora, and all weights are trained",
            f"add {name_of('method')} lora, or leave it out",
        )


def checked_settings(requested: Mapping[str, Any], name_of: Callable[[str], str] = str) -> dict[str, Any]:
    """Returns the settings that are not None, as the server would accept them.

    Args:
        name_of: returns a hyperparameter's name in messages.

    Raises:
        UsageError: the server would refuse one.
    """
    settings = {name: value for name, value in requested.items() if value is not None}
    try:
        hyperparameters = Hyperparameters(**settings)
        if "task" in settings or "method" in settings:  # otherwise the data decide how it is trained
            refuse_unused_lora_settings(hyperparameters, name_of)
        return hyperparameters.model_dump(exclude_none=True, include={*settings})
    except ValidationError as error:
        fault = error.errors()[0]
        name, value = str(fault["loc"][0]), fault["input"]
        if fault["type"] == "extra_forbidden":
            names = ", ".join(Hyperparameters.model_fields)
            raise UsageError(f"there is no hyperparameter {name!r}", f"hyperparameters: {names}") from None
        value_text = f"{value:.10g}" if isinstance(value, float) else repr(value)
        message = f"{name_of(name)} is {value_text}, {requirement_of(fault)}"
        raise UsageError(message, "leave it out for the default") from None


def requirement_of(fault: Mapping[str, Any]) -> str:
    """Returns what is needed in place of a refused value, from one of pydantic's errors."""
    error_type, context = str(fault["type"]), fault.get("ctx", {})
    bounds = {"ge": "at least {} is needed", "gt": "more than {} is needed", "le": "at most {} is allowed",
              "lt": "less than {} is needed"}  # fmt: skip
    for bound in bounds.keys() & context.keys():
        return bounds[bound].format(f"{context[bound]:.10g}")
    if error_type == "literal_error":
        return f"{context['expected']} is needed"
    nouns = {"int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false"}
    if noun := nouns.get(error_type.partition("_")[0]):
        return f"{noun} is needed"
    return str(fault["msg"]).removeprefix("Value error, ")

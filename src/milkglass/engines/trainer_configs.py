"""Makes the configurations with which other trainers (TRL, Axolotl, LLaMA-Factory) train all weights on scrambled rows.

The trainers use what `milkglass export --for transformers` and `milkglass encode --layout` wrote: a model with an
opaque tokenizer, and rows that need none. The rates are from ObfusLM's appendix C.3. Adapters are not used, because the
tables must be trained too, for which each trainer has its own option.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from milkglass.errors import UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.file_names import CONFIG, KEY_ID, TOKENIZER

# All columns that scrambled rows may have
ROW_COLUMNS = frozenset({"input_ids", "attention_mask", "token_type_ids", "labels"})
MAX_LINE_BYTES = 16 << 20  # bytes of a row in JSON Lines

RUN_COMMANDS = {  # the command that runs each trainer
    "trl": "torchrun --standalone --nproc_per_node 2 -m trl.scripts.sft --config {config}",
    "axolotl": "axolotl train {config}",
    "llamafactory": "llamafactory-cli train {config}",
}


@dataclass(frozen=True)
class TrainerSettings:
    """Holds what another trainer trains, and how.

    Attributes:
        model: the folder that `milkglass export --for transformers` wrote.
        rows: the rows that `milkglass encode` wrote: Parquet, JSON Lines, or a folder.
        out: the folder that gets the trained model.
        epochs: how often each row is seen.
        batch_size: the rows of a step on each device.
        learning_rate: the largest rate of the schedule.
        max_length: the most tokens of a row; longer rows are cut.
        uses_cpu: whether training runs on the CPU. Without it, TRL's processes wait forever on a machine without a GPU.
    """

    model: Path
    rows: Path
    out: Path
    epochs: float = 3.0
    batch_size: int = 8
    learning_rate: float = 1e-4
    max_length: int = 512
    uses_cpu: bool = False

    def require_fit(self, trainer: str) -> None:
        """Raises UsageError for a model or rows that are not scrambled, or that the trainer could not read.

        Args:
            trainer: a key of RUN_COMMANDS.
        """
        if not (self.model / TOKENIZER).is_file():
            raise UsageError(
                f"{self.model} has no tokenizer, which trainers insist on",
                f"milkglass export {self.model} --for transformers --out FOLDER",
            )
        if KEY_ID not in Checkpoint.open(self.model).config:
            raise UsageError(
                f"{self.model} names no key in its {CONFIG}, so nothing says that it was scrambled",
                "give the folder that `milkglass export --for transformers` wrote",
            )
        is_folder = self.rows.is_dir()
        if not self.rows.exists() or is_folder != (trainer == "llamafactory"):
            expected = "a folder of --layout datasets" if trainer == "llamafactory" else "a .parquet or .jsonl file"
            raise UsageError(f"{trainer} reads {expected}, {self.rows} is none", "write it with `milkglass encode`")
        holds_lists = _has_lists_by_column(self.rows)
        if not {"input_ids", "labels"} <= set(holds_lists) <= ROW_COLUMNS:
            raise UsageError(
                f"{self.rows} holds other columns than ids and labels, so nothing says that it is scrambled",
                "write it with `milkglass encode --in DATA --out FILE.parquet`",
            )
        if not holds_lists["labels"]:
            raise UsageError(
                f"{self.rows} has one label a row, and this configuration trains models that write",
                "train a classifier with `milkglass finetune`",
            )


def _has_lists_by_column(rows: Path) -> dict[str, bool]:
    """Returns whether each column of a file of rows holds lists, by the column's name.

    Of JSON Lines only the first row is read. The result is empty for a file that cannot be read.
    """
    try:
        if rows.is_dir():
            with next(rows.glob("*.arrow")).open("rb") as source, pa.ipc.open_stream(source) as reader:
                schema = reader.schema
        elif _file_format(rows) == "parquet":
            schema = pq.read_schema(rows)
        else:
            with rows.open("rb") as lines:
                row = json.loads(lines.readline(MAX_LINE_BYTES))
            return {str(name): isinstance(value, list) for name, value in row.items()} if isinstance(row, dict) else {}
    except (pa.ArrowInvalid, ValueError, RecursionError, StopIteration):
        return {}
    return {column.name: pa.types.is_list(column.type) for column in schema}


def trainer_config(trainer: str, settings: TrainerSettings) -> dict[str, Any]:
    """Returns the fields of a trainer's YAML. Raises UsageError if `trainer` is not a key of RUN_COMMANDS."""
    if trainer not in RUN_COMMANDS:
        raise UsageError(f"there is no trainer {trainer!r}", f"there are: {', '.join(RUN_COMMANDS)}")
    return {"trl": _trl_fields, "axolotl": _axolotl_fields, "llamafactory": _llamafactory_fields}[trainer](settings)


def yaml_text(document: Mapping[str, Any]) -> str:
    """Returns a document as YAML, one field a line. Values are written as JSON, which is valid YAML."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in document.items())


def _file_format(rows: Path) -> str:
    """Returns the name of a rows file's format in the library datasets."""
    return "parquet" if rows.suffix == ".parquet" else "json"


def _trl_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Returns settings of `trl sft` (trl.SFTConfig), which takes rows with input_ids and labels unchanged."""
    return {
        "model_name_or_path": str(settings.model),
        "datasets": [{"path": _file_format(settings.rows), "data_files": str(settings.rows)}],
        "output_dir": str(settings.out),
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "adam_beta2": 0.95,
        "max_length": settings.max_length,
        "packing": False,
        "use_cpu": settings.uses_cpu,
        "bf16": False,
        "dtype": "float32",
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
    }


def _axolotl_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Returns settings of Axolotl, which takes rows with input_ids, attention_mask and labels unchanged."""
    return {
        "base_model": str(settings.model),
        "datasets": [{"path": str(settings.rows), "ds_type": _file_format(settings.rows), "type": None}],
        "output_dir": str(settings.out),
        "num_epochs": settings.epochs,
        "micro_batch_size": settings.batch_size,
        "gradient_accumulation_steps": 1,
        "learning_rate": settings.learning_rate,
        "optimizer": "adamw_torch",
        "lr_scheduler": "linear",
        "adam_beta2": 0.95,
        "sequence_len": settings.max_length,
        "sample_packing": False,
        "bf16": False,
        "train_on_inputs": True,  # labels of the rows say what is learnt
    }


def _llamafactory_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Returns settings of LLaMA-Factory, with rows of `save_to_disk` as `tokenized_path`, without a template."""
    return {
        "model_name_or_path": str(settings.model),
        "tokenized_path": str(settings.rows),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "empty",
        "output_dir": str(settings.out),
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "adam_beta2": 0.95,
        "cutoff_len": settings.max_length,
        "use_cpu": settings.uses_cpu,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
    }

"""Writes scrambled training rows for other trainers, as JSON Lines or a folder of Hugging Face's datasets.

Each row has `input_ids`, `attention_mask` and `labels`, and `token_type_ids` if the model has them. TRL, Axolotl,
LLaMA-Factory and torchtune take such rows without a tokenizer. Parquet has the same columns.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from milkglass import files

Layout = Literal["jsonl", "datasets"]
BATCH_ROWS = 1000  # rows that are read and written at a time
DATA_FILE = "data-00000-of-00001.arrow"


def write_layout(parquet: Path, layout: Layout, out: Path) -> None:
    """Writes scrambled rows, which `training_rows.write_parquet` wrote, in another layout.

    Args:
        parquet: the file of rows.
        layout: "jsonl" for JSON Lines, or "datasets" for a folder that `datasets.load_from_disk` reads.
        out: the file or the folder to write. A JSON Lines file of this name is replaced.

    Raises:
        FileExistsError: the folder's name is taken by a file, or by a folder that is not empty.
    """
    with pq.ParquetFile(parquet, memory_map=False) as file:
        if layout == "datasets":
            with files.new_dir(out) as folder:
                _write_dataset(file, folder)
            return
        with files.atomic_write(out) as lines:
            for batch in file.iter_batches(BATCH_ROWS):
                lines.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())


def _write_dataset(file: pq.ParquetFile, folder: Path) -> None:
    """Writes the files that `Dataset.save_to_disk` writes."""
    with (folder / DATA_FILE).open("wb") as sink, pa.ipc.new_stream(sink, file.schema_arrow) as writer:
        for batch in file.iter_batches(BATCH_ROWS):
            writer.write_batch(batch)
    description = {"citation": "", "description": "", "features": None, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": DATA_FILE}], "_fingerprint": secrets.token_hex(8), "_format_columns": None,
        "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": "train",
    }  # fmt: skip
    files.write_json(folder / "dataset_info.json", description)
    files.write_json(folder / "state.json", state)

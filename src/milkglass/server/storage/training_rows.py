"""Checks uploaded training rows: flat tensors in a safetensors file, format `rows/1` (docs/formats.md).

Every claim of the header is checked when the file is opened, so that readers meet only numbers of known types and
counts. The check reads a few MiB at a time, and a worker maps the tensors: no file is read into memory whole.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import BadUpload, CorruptCheckpoint
from milkglass.models.safetensors_header import TensorRef, read_tensors_and_notes
from milkglass.server.spec import IGNORED_LABEL, LABEL_TENSORS, NUMPY_DTYPES, ROWS_METADATA, ROWS_TENSORS
from milkglass.server.storage.store import TrainingFileInfo

MAX_HEADER_BYTES = 4096  # five tensors need about 400
MAX_ROW_IDS = 65_536  # ids of a row; a worker cuts rows to `max_length`, at most spec.MAX_ROW_TOKENS
MAX_FILE_IDS = 2**28  # ids of a file
NUMBERS_PER_PART = 1 << 20  # numbers that are read at a time
FORMAT_HINT = "write the file with this version of Milkglass; docs/formats.md describes rows/1"


@final
@dataclass(frozen=True)
class TrainingRows:
    """Describes the tensors of a training file. Their numbers are read when they are used.

    Attributes:
        tensors: the tensors by name.
        label_tensor: the name of the tensor with labels.
    """

    tensors: dict[str, TensorRef]
    label_tensor: str

    @classmethod
    def open(cls, path: Path) -> TrainingRows:
        """Reads the header of a file. Raises BadUpload if it is not `rows/1`, or shapes do not fit each other."""
        tensors = _tensors(path)
        labels = [name for name in LABEL_TENSORS if name in tensors]
        if unknown := len(tensors.keys() - ROWS_TENSORS.keys()):
            _refuse(f"the file holds {unknown} tensors that are not of rows/1, which has {', '.join(ROWS_TENSORS)}")
        if not {"lengths", "input_ids"} <= tensors.keys() or len(labels) != 1:
            present_names, label_names = ", ".join(sorted(tensors)) or "none", ", ".join(LABEL_TENSORS)
            _refuse(f"lengths, input_ids and one of {label_names} are needed, the file has {present_names}")
        for name, tensor in tensors.items():
            if tensor.dtype != (dtype := ROWS_TENSORS[name]) or len(tensor.shape) != 1:
                _refuse(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; {dtype} of one dimension is needed")
        row_count, id_count = tensors["lengths"].shape[0], tensors["input_ids"].shape[0]
        if not 1 <= row_count <= id_count <= MAX_FILE_IDS:
            _refuse(
                f"the file holds {row_count} rows of {id_count} ids; "
                f"a row has 1 at least, and a file {MAX_FILE_IDS} at most"
            )
        for name in tensors.keys() - {"lengths", "input_ids"}:
            count, required = tensors[name].shape[0], row_count if name in ("labels", "scores") else id_count
            if count != required:
                _refuse(f"{name} holds {count} numbers; {required} are needed for {row_count} rows of {id_count} ids")
        return cls(tensors, labels[0])

    def map_tensor(self, name: str) -> NDArray[Any]:
        """Returns a tensor (n,), mapped from the file."""
        tensor = self.tensors[name]
        return np.asarray(np.memmap(tensor.file, NUMPY_DTYPES[tensor.dtype], "r", tensor.start, tensor.shape))

    def read_parts(self, name: str) -> Iterator[NDArray[Any]]:
        """Yields a whole tensor in parts of NUMBERS_PER_PART numbers, each read into memory."""
        tensor = self.tensors[name]
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            for start in range(0, tensor.shape[0], NUMBERS_PER_PART):
                count = min(NUMBERS_PER_PART, tensor.shape[0] - start)
                numbers = np.fromfile(file, NUMPY_DTYPES[tensor.dtype], count)
                if len(numbers) < count:
                    _refuse(f"the file became shorter while {name} was read")
                yield numbers


def check_training_file(path: Path) -> TrainingFileInfo:
    """Checks a whole training file, and returns its size and the ranges of its numbers.

    Raises:
        BadUpload: the file is not valid. No message names an id or a label.
    """
    rows = TrainingRows.open(path)
    id_count = rows.tensors["input_ids"].shape[0]
    shortest, longest, length_sum = math.inf, 0, 0
    for numbers in rows.read_parts("lengths"):
        shortest, longest = min(shortest, int(numbers.min())), max(longest, int(numbers.max()))
        length_sum += int(numbers.sum(dtype=np.int64))
    if shortest < 1 or longest > MAX_ROW_IDS:
        _refuse(f"a row has {shortest if shortest < 1 else longest} ids; 1 to {MAX_ROW_IDS} are taken")
    if length_sum != id_count:
        _refuse(f"the lengths add up to {length_sum}; input_ids holds {id_count} numbers")
    min_number, max_id = _extremes(rows, "input_ids")
    if min_number < 0:
        _refuse(f"input_ids holds a number outside 0 to {2**31 - 1}")
    max_type = None
    if "token_type_ids" in rows.tensors:
        min_number, max_type = _extremes(rows, "token_type_ids")
        if min_number < 0:
            _refuse("token_type_ids holds a negative number; token types count from 0")
    extreme_labels, has_unlabelled = list[int](), False
    for numbers in rows.read_parts(rows.label_tensor):
        if rows.label_tensor == "scores":
            if not np.isfinite(numbers).all():
                _refuse("scores holds a number that is not finite")
            continue
        used_labels = numbers[numbers != IGNORED_LABEL]
        has_unlabelled |= len(used_labels) < len(numbers)
        if len(used_labels):
            extreme_labels += [int(used_labels.min()), int(used_labels.max())]
    return TrainingFileInfo(
        rows=rows.tensors["lengths"].shape[0],
        tokens=id_count,
        longest=longest,
        max_id=max_id,
        nested_labels=rows.label_tensor == "token_labels",
        min_label=min(extreme_labels, default=None),
        max_label=max(extreme_labels, default=None),
        max_token_type=max_type,
        unlabelled=has_unlabelled,
        real_labels=rows.label_tensor == "scores",
    )


def _tensors(path: Path) -> dict[str, TensorRef]:
    """Returns the tensors of a file by name. Raises BadUpload for a damaged or unexpected header."""
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] == b"PAR1":
        raise parquet_error()
    size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if size > MAX_HEADER_BYTES:
        _refuse(f"the file's header claims {size} bytes; at most {MAX_HEADER_BYTES} are read")
    try:
        tensors, notes = read_tensors_and_notes(path)
    except CorruptCheckpoint as error:
        raise BadUpload(error.message.replace(path.name, "the file"), FORMAT_HINT) from error
    if notes != ROWS_METADATA:
        _refuse(f"the file's metadata are not {ROWS_METADATA}, and others may say more than numbers do")
    return tensors


def parquet_error() -> BadUpload:
    """Returns the error for rows in Parquet, which older clients send."""
    return BadUpload(
        "these training rows are Parquet, which servers took before rows/1", "update Milkglass on the client's side"
    )


def _extremes(rows: TrainingRows, name: str) -> tuple[int, int]:
    """Returns the least and the largest number of a nonempty tensor."""
    extremes = [(int(numbers.min()), int(numbers.max())) for numbers in rows.read_parts(name)]
    return min(low for low, _ in extremes), max(high for _, high in extremes)


def _refuse(message: str) -> NoReturn:
    """Raises BadUpload."""
    raise BadUpload(message, FORMAT_HINT)

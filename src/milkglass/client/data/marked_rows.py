"""Marks scrambled training rows, and sends only marked ones.

A file does not show whether its ids are scrambled. `write_parquet` therefore writes a mark beside each of its files,
NAME.milkglass.json, with the file's SHA-256 and the key's identifier (docs/formats.md). A file that differs from its
mark is not sent. What is sent is not the file but its numbers as flat tensors (format `rows/1`), without any other part
of a Parquet file, where a note or a name could carry anything. The mark prevents accidents; it is not a proof against
the person who writes it.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from milkglass import files
from milkglass.errors import UsageError
from milkglass.models.safetensors_header import DTYPE_BYTES, METADATA, packed_header
from milkglass.server.spec import NUMPY_DTYPES, ROWS_METADATA, ROWS_TENSORS

MARK_FORMAT = "milkglass-rows/1"
MARK_SUFFIX = ".milkglass.json"
SHA256_PATTERN, IDENTIFIER_PATTERN = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")
SCRAMBLE_HINT = (
    "scramble a dataset with `milkglass encode --in DATA --out FILE.parquet`, or let `milkglass finetune` do it all"
)
ROWS_PER_BATCH = 4096  # rows read at a time

INT32_LIST, INT8_LIST = pa.list_(pa.int32()), pa.list_(pa.int8())
COLUMN_TYPES = {
    "input_ids": (INT32_LIST,),
    "attention_mask": (INT8_LIST,),
    "token_type_ids": (INT8_LIST,),
    "labels": (pa.int32(), pa.float32(), INT32_LIST),
}


@final
@dataclass(frozen=True)
class RowsMark:
    """Records which file was scrambled here, and with which key.

    Attributes:
        sha256: the SHA-256 of the whole file, in hex.
        key_id: the identifier of the key that scrambled it.
    """

    sha256: str
    key_id: str

    @classmethod
    def read(cls, path: Path) -> RowsMark:
        """Reads the mark of a Parquet file. Raises UsageError if there is no valid one."""
        mark_path = mark_path_of(path)
        if not mark_path.is_file():
            raise UsageError(
                f"{path.name} has no {mark_path.name} beside it, so nothing says that it is scrambled", SCRAMBLE_HINT
            )
        try:
            document: Any = json.loads(mark_path.read_text("utf-8"))
        except (ValueError, RecursionError):
            document = None
        fields = document if isinstance(document, dict) else {}
        sha256, key_id = str(fields.get("sha256")), str(fields.get("key_id"))
        is_well_formed = set(fields) == {"format", "sha256", "key_id"} and fields["format"] == MARK_FORMAT
        if not (is_well_formed and SHA256_PATTERN.fullmatch(sha256) and IDENTIFIER_PATTERN.fullmatch(key_id)):
            raise UsageError(f"{mark_path.name} is not a mark of the format {MARK_FORMAT}", SCRAMBLE_HINT)
        return cls(sha256, key_id)


def mark_path_of(path: Path) -> Path:
    """Returns the path of a Parquet file's mark, which lies beside it."""
    return path.with_name(path.name + MARK_SUFFIX)


def write_mark(path: Path, key_id: str) -> None:
    """Writes the mark of a file that was just scrambled.

    Args:
        path: the file; the mark lies beside it.
        key_id: the identifier of the key that scrambled the file.
    """
    files.write_json(
        mark_path_of(path), {"format": MARK_FORMAT, "sha256": files.sha256(path), "key_id": key_id}, indent=None
    )


def require_marked(path: Path) -> RowsMark:
    """Returns a file's mark. Raises UsageError if the file is not byte for byte the marked one."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}", SCRAMBLE_HINT)
    rows_mark = RowsMark.read(path)
    if (digest := files.sha256(path)) != rows_mark.sha256:
        raise UsageError(
            f"{path.name} is not the file that {mark_path_of(path).name} was written for: its SHA-256 is "
            f"{digest[:16]}..., not {rows_mark.sha256[:16]}...",
            SCRAMBLE_HINT,
        )
    return rows_mark


@contextmanager
def sendable_copy(path: Path) -> Iterator[Path]:
    """Yields a temporary file of format `rows/1` with the numbers of a marked file, which is all that may be sent.

    Raises:
        UsageError: the file has no mark, or is not the marked one.
    """
    require_marked(path)
    with tempfile.TemporaryDirectory(prefix="milkglass-") as scratch:
        copy = Path(scratch) / "data.safetensors"
        write_tensors(copy, parquet_tensors(path))
        yield copy


def parquet_tensors(path: Path) -> Iterator[dict[str, NDArray[Any]]]:
    """Yields a scrambled file's tensors of format `rows/1`, ROWS_PER_BATCH rows at a time.

    Raises:
        UsageError: the file has other columns than those of training rows.
    """
    with pq.ParquetFile(path, memory_map=False) as file:
        names = _checked_columns(path, file.schema_arrow)
        for batch in file.iter_batches(ROWS_PER_BATCH, columns=names):
            ids, labels = batch.column("input_ids"), batch.column("labels")
            columns = {"lengths": ids.value_lengths(), "input_ids": ids.flatten()}
            if "token_type_ids" in names:
                columns["token_type_ids"] = batch.column("token_type_ids").flatten()
            if pa.types.is_list(labels.type):
                columns["token_labels"] = labels.flatten()
            else:
                columns["scores" if pa.types.is_floating(labels.type) else "labels"] = labels
            yield {name: column.to_numpy(zero_copy_only=False) for name, column in columns.items()}


def write_tensors(out: Path, parts: Iterable[Mapping[str, NDArray[Any]]]) -> None:
    """Writes a training file of format `rows/1`. The same rows give the same bytes.

    Args:
        out: the file, which appears when it is complete.
        parts: the tensors of spec.ROWS_TENSORS for some rows each, all with the same names. One part is in memory at a
            time.
    """
    with ExitStack() as stack:
        file_of_tensor: dict[str, IO[bytes]] = {}
        for part in parts:
            for name in part:
                if name not in file_of_tensor:
                    file_of_tensor[name] = stack.enter_context(tempfile.TemporaryFile(dir=out.parent))
                file_of_tensor[name].write(part[name].astype(NUMPY_DTYPES[ROWS_TENSORS[name]]).tobytes())
        header, offset = dict[str, Any]({METADATA: ROWS_METADATA}), 0
        names = [name for name in ROWS_TENSORS if name in file_of_tensor]
        for name in names:
            byte_count, dtype = file_of_tensor[name].tell(), ROWS_TENSORS[name]
            shape = [byte_count // DTYPE_BYTES[dtype]]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + byte_count]}
            offset += byte_count
        file = stack.enter_context(files.atomic_write(out, "wb"))
        file.write(packed_header(header))
        for name in names:
            file_of_tensor[name].seek(0)
            shutil.copyfileobj(file_of_tensor[name], file)


def _checked_columns(path: Path, schema: pa.Schema) -> list[str]:
    """Returns the names of a file's columns. Raises UsageError for other columns than those of training rows."""
    names: list[str] = schema.names
    if len(set(names)) < len(names) or not {"input_ids", "labels"} <= set(names) <= set(COLUMN_TYPES):
        raise UsageError(f"{path.name} holds more than ids and labels, so it is not scrambled data", SCRAMBLE_HINT)
    for field in schema:
        is_list = pa.types.is_list(field.type)  # an element's name and notes do not matter: they are not sent
        column_type = pa.list_(field.type.value_type) if is_list else field.type
        if column_type not in COLUMN_TYPES[field.name]:
            raise UsageError(
                f"the column {field.name} of {path.name} holds other values than ids and labels", SCRAMBLE_HINT
            )
    return names

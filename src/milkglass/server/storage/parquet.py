"""Training rows in a Parquet file: read in small batches, checked against the columns of server/spec.py.

Runs in a process of its own (inspector.py), because a file can crash the reader or make it take gigabytes. A worker
reads with the same calls as the check, so that it meets nothing that the check did not meet. This module has to be
imported quickly: it uses neither torch nor pydantic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from milkglass.errors import BadUpload, MilkglassError

COLUMNS = frozenset({"input_ids", "attention_mask", "token_type_ids", "labels"})
IGNORED = -100  # the label that takes no part in the loss
MAX_ID = 2**31 - 1
BATCH = 256  # rows looked at together
MAX_ROW = 65_536  # tokens of a row, which a worker cuts to spec.MAX_LENGTH or less
MAX_GROUP = 2**24  # numbers of a column in one row group, which a reader may hold at once
MAX_TOKENS = 2**28  # of a whole file: a worker holds it in memory
UNREADABLE = BadUpload("the file is not readable Parquet", "write it with pyarrow")


def read(path: Path) -> pa.Table:
    """The whole file, which must have passed `check`."""
    with pq.ParquetFile(path, memory_map=False) as file:
        return pa.Table.from_batches(file.iter_batches(BATCH, use_threads=False), file.schema_arrow)


def check(path: Path) -> dict[str, Any]:
    """The fields of store.Rows. Raises BadUpload, and MemoryError where the file asks for more than this process may
    have. May end the process: pyarrow aborts on some damaged files."""
    try:
        with pq.ParquetFile(path, memory_map=False) as file:
            _check_sizes(file.metadata)
            _check_metadata(file)
            result = _check_schema(file.schema_arrow)
            for batch in file.iter_batches(BATCH, use_threads=False):
                result.add(batch)
    except (MilkglassError, MemoryError):
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UNREADABLE from error
    if not result.rows:
        raise BadUpload("the file holds no rows", "send at least one example")
    return result.result()


def _check_sizes(about: pq.FileMetaData) -> None:
    """Before a byte of a column is read: a few hundred bytes can claim, and decode to, gigabytes. A page may claim more
    than its column: that is caught by this process's memory limit."""
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        if group.num_columns != about.num_columns:  # asked for a column beyond the schema, pyarrow aborts
            raise UNREADABLE
        most = min(MAX_GROUP, group.num_rows * MAX_ROW)
        for place in range(group.num_columns):
            column = group.column(place)
            if column.num_values > most or column.total_uncompressed_size > 8 * MAX_GROUP:
                raise BadUpload(
                    f"a row group holds more than {most} numbers in one column",
                    f"write smaller row groups (row_group_size), and rows of {MAX_ROW} ids at most",
                )


def _check_metadata(file: pq.ParquetFile) -> None:
    """pyarrow's own note of the types is fine; pandas' holds names and labels of rows, others may hold anything."""
    notes = set(file.metadata.metadata or ()) - {b"ARROW:schema"}
    schema = file.schema_arrow
    notes |= set(schema.metadata or ()) - {b"ARROW:schema"}
    for field in schema:
        inner = [field.type.value_field] if pa.types.is_list(field.type) else []
        for one in (field, *inner):
            notes |= set(one.metadata or ()) - {b"PARQUET:field_id"}
    if notes:
        raise BadUpload(
            "the file holds metadata of its own, which may say more than numbers do",
            "write it with pyarrow, and without key-value metadata (a table from pandas: replace_schema_metadata())",
        )


def _check_schema(schema: pa.Schema) -> _ColumnExtremes:
    """By what labels are. Strings have no place here: someone would be sending plain text."""
    names = set(schema.names)
    if len(names) != len(schema.names) or not {"input_ids", "labels"} <= names or not names <= COLUMNS:
        raise BadUpload(
            "the columns must be input_ids and labels, with attention_mask and token_type_ids if you like",
            "send ids only: any other column might hold plain text",
        )
    for name in schema.names:
        kind = schema.field(name).type
        inner = kind.value_type if pa.types.is_list(kind) else kind
        if name == "labels" and kind in (pa.float32(), pa.float64()):
            continue
        if not pa.types.is_signed_integer(inner) or (name != "labels" and not pa.types.is_list(kind)):
            raise BadUpload(
                f"the column {name} does not hold {'integers' if name == 'labels' else 'lists of integers'}",
                "input_ids: list<int32>, masks: list<int8>, labels: int32, list<int32>, or float32 for regression",
            )
    labels = schema.field("labels").type
    return _ColumnExtremes(bool(pa.types.is_list(labels)), bool(pa.types.is_floating(labels)))


class _ColumnExtremes:
    """Extremes over all batches; every row checked."""

    def __init__(self, nested: bool, real: bool) -> None:
        self.nested, self.real = nested, real
        self.rows = self.tokens = self.longest = self.max_id = 0
        self.labels: tuple[int, int] | None = None
        self.unlabelled = False
        self.max_token_type: int | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        ids = batch.column("input_ids")
        lengths = _lengths(ids, "input_ids")
        if batch.num_rows and pc.min(lengths).as_py() < 1:
            raise BadUpload("a row has no ids", "leave empty examples out")
        low, high = _extremes(ids.flatten()) or (0, 0)
        if low < 0 or high > MAX_ID:
            raise BadUpload(f"input_ids holds a number outside 0 to {MAX_ID}", "send token ids")
        self.rows += batch.num_rows
        self.tokens += len(ids.flatten())
        self.longest = max(self.longest, pc.max(lengths).as_py() or 0)
        if self.longest > MAX_ROW or self.tokens > MAX_TOKENS:
            raise BadUpload(
                f"a row has more than {MAX_ROW} ids, or the file more than {MAX_TOKENS}", "send shorter rows, or fewer"
            )
        self.max_id = max(self.max_id, high)
        for name in ("attention_mask", "token_type_ids"):
            if name in batch.schema.names:
                self._add_side(name, batch.column(name), lengths)
        self._add_labels(batch.column("labels"), lengths)

    def _add_side(self, name: str, column: pa.ListArray, lengths: pa.Array) -> None:
        _require_same(name, column, lengths)
        low, high = _extremes(column.flatten()) or (1, 1)
        if name == "attention_mask":
            if (low, high) != (1, 1):  # the worker pads and masks itself: a 0 in here would have no effect
                raise BadUpload("attention_mask holds a number other than 1", "leave the padding out: the server pads")
            return
        if low < 0:
            raise BadUpload("token_type_ids holds a negative number", "token types count from 0")
        self.max_token_type = max(self.max_token_type or 0, high)

    def _add_labels(self, column: pa.Array, lengths: pa.Array) -> None:
        if self.nested:
            _require_same("labels", column, lengths)
            column = column.flatten()
        elif column.null_count:
            raise BadUpload("labels has empty cells", "give every row a label")
        if self.real:
            if not pc.all(pc.is_finite(column), min_count=0).as_py():
                raise BadUpload("labels holds a number that is not finite", "give every row a finite number")
            return
        kept = column.filter(pc.not_equal(column, IGNORED))
        self.unlabelled |= len(kept) < len(column)
        expected = _extremes(kept)
        if expected is None:
            return
        old = self.labels or expected
        self.labels = (min(old[0], expected[0]), max(old[1], expected[1]))

    def result(self) -> dict[str, Any]:
        low, high = self.labels or (None, None)
        return {
            "rows": self.rows, "tokens": self.tokens, "longest": self.longest, "max_id": self.max_id,
            "nested_labels": self.nested, "min_label": low, "max_label": high, "max_token_type": self.max_token_type,
            "unlabelled": self.unlabelled, "real_labels": self.real,
        }  # fmt: skip


def _lengths(column: pa.ListArray, name: str) -> pa.Array:
    if column.null_count or column.flatten().null_count:
        raise BadUpload(f"{name} has empty cells", "give every row a list of integers")
    return pc.list_value_length(column)


def _require_same(name: str, column: pa.ListArray, lengths: pa.Array) -> None:
    if not _lengths(column, name).equals(lengths):
        raise BadUpload(f"{name} and input_ids differ in length", "all lists of a row have one length")


def _extremes(values: pa.Array) -> tuple[int, int] | None:
    if not len(values):
        return None
    both = pc.min_max(values).as_py()
    return int(both["min"]), int(both["max"])

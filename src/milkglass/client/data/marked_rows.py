"""Training rows on their way out: the mark beside a Parquet file that was scrambled here, and what of it is sent.

Whether ids are scrambled cannot be seen in a file. So `write_parquet` leaves a mark beside each of its files,
NAME.milkglass.json, with the file's SHA-256 and the key's identifier (docs/formats.md). A file that is not the one of
its mark stays here. What is sent is not the file but its columns, written anew: names and types are those of the
format, and no other part of a Parquet file, where a note or a name could say anything, is kept.

Out of scope: keys and text. The mark keeps accidents from happening; it is not a proof against the
person who writes it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pyarrow as pa
import pyarrow.parquet as pq

from milkglass import files
from milkglass.errors import UsageError

FORMAT = "milkglass-rows/1"
SUFFIX = ".milkglass.json"
SHA256, IDENTIFIER = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")
HINT = "scramble a dataset with `milkglass encode --in DATA --out FILE.parquet`, or let `milkglass finetune` do it all"
BATCH = 4096  # rows written at a time

List32, List8 = pa.list_(pa.int32()), pa.list_(pa.int8())
COLUMNS = {"input_ids": (List32,), "attention_mask": (List8,), "token_type_ids": (List8,),
           "labels": (pa.int32(), pa.float32(), List32)}  # fmt: skip


@final
@dataclass(frozen=True)
class RowsMark:
    """Which file was scrambled here, and with which key.

    Attributes:
        sha256: of the whole file, in hex.
        key_id: the identifier of the key that scrambled it.
    """

    sha256: str
    key_id: str

    @classmethod
    def read(cls, path: Path) -> RowsMark:
        """The mark of a Parquet file. Raises UsageError where there is none, or one that is not well-formed."""
        place = beside(path)
        if not place.is_file():
            raise UsageError(f"{path.name} has no {place.name} beside it, so nothing says that it is scrambled", HINT)
        try:
            raw: Any = json.loads(place.read_text("utf-8"))
        except (ValueError, RecursionError):
            raw = None
        fields = raw if isinstance(raw, dict) else {}
        sha256, key_id = str(fields.get("sha256")), str(fields.get("key_id"))
        known = set(fields) == {"format", "sha256", "key_id"} and fields["format"] == FORMAT
        if not (known and SHA256.fullmatch(sha256) and IDENTIFIER.fullmatch(key_id)):
            raise UsageError(f"{place.name} is not a mark of the format {FORMAT}", HINT)
        return cls(sha256, key_id)


def beside(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def mark(path: Path, key_id: str) -> None:
    """Say of a file that was just written that it is scrambled, and with which key."""
    files.write_json(beside(path), {"format": FORMAT, "sha256": files.sha256(path), "key_id": key_id}, indent=None)


def require_marked(path: Path) -> RowsMark:
    """Raises UsageError for a file that is not the one of its mark, byte for byte."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}", HINT)
    result = RowsMark.read(path)
    if (digest := files.sha256(path)) != result.sha256:
        raise UsageError(
            f"{path.name} is not the file that {beside(path).name} was written for: its SHA-256 is {digest[:16]}..., "
            f"not {result.sha256[:16]}...",
            HINT,
        )
    return result


@contextmanager
def rewritten(path: Path) -> Iterator[Path]:
    """What may be sent of a marked file, as a file in a folder of its own, which is removed in the end."""
    require_marked(path)
    with tempfile.TemporaryDirectory(prefix="milkglass-") as scratch:
        copy = Path(scratch) / "data.parquet"
        with pq.ParquetFile(path, memory_map=False) as file:
            schema = _schema(path, file.schema_arrow)
            with pq.ParquetWriter(copy, schema, store_schema=False) as writer:
                for batch in file.iter_batches(BATCH, columns=schema.names):
                    columns = [batch.column(field.name).cast(field.type) for field in schema]
                    writer.write_table(pa.table(columns, schema=schema))
        yield copy


def _schema(path: Path, found: pa.Schema) -> pa.Schema:
    """The same columns under our own types, without any note. Raises UsageError for other columns."""
    if len(set(found.names)) < len(found.names) or not {"input_ids", "labels"} <= set(found.names) <= set(COLUMNS):
        raise UsageError(f"{path.name} holds more than ids and labels, so it is not scrambled data", HINT)
    return pa.schema([(field.name, _type(path, field)) for field in found])


def _type(path: Path, field: pa.Field) -> pa.DataType:
    nested = pa.types.is_list(field.type)
    inner = field.type.value_type if nested else field.type
    for kind in COLUMNS[field.name]:
        if pa.types.is_list(kind) == nested and inner == (kind.value_type if nested else kind):
            return kind
    raise UsageError(f"the column {field.name} of {path.name} holds other values than ids and labels", HINT)

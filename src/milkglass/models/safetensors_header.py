"""Reads the header of a safetensors file, and checks every claim against the file. It imports no torch.

It accepts at most what the safetensors library accepts: JSON in UTF-8 that begins with a brace, no key twice, and in
each tensor's entry `dtype`, `shape` and `data_offsets` and nothing else. So `__metadata__` is the only place for notes,
and `has_notes` sees all of them. What JSON builds from the header is limited before it is built (`_require_bounded`):
files are not trusted, and an empty object takes twenty times the memory of its text.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

from milkglass.errors import CorruptCheckpoint
from milkglass.unique_keys import unique_keys

DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
         "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
READABLE_DTYPES = ("F32", "F16", "BF16")  # the types of tables and weights that are read
METADATA = "__metadata__"
PLAIN_NOTES = {"format": "pt"}  # the only note in files that are written here
ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}
MAX_HEADER_BYTES = 25_000_000  # a model of 100,000 tensors needs about 12 MB
MAX_RANK, MAX_DIMENSION = 8, 1 << 40
MAX_TENSORS = 200_000
MAX_STRINGS = 6 * MAX_TENSORS  # a tensor takes 5, the rest is for notes
MAX_OUTLINE_CHARACTERS = 3 * MAX_TENSORS + 64  # a tensor takes 3, a note 2
MAX_IRREGULAR_VALUES = 64  # lists and objects that are not part of a tensor's entry; a sound header has 2
NON_OUTLINE_BYTES = bytes(set(range(256)) - set(b'"{}[],:'))
STRING_PATTERN = re.compile(rb'"[^"]*"?')
LIST_OUTLINES = tuple(b"[" + b"," * commas + b"]" for commas in reversed(range(MAX_RANK)))
ENTRY_OUTLINES = (b"{:,:L,:L}", b"{:L,:,:L}", b"{:L,:L,:}")  # outlines of an entry; the field without L is dtype


@final
@dataclass(frozen=True, slots=True)
class TensorRef:
    """Says where a tensor is stored, and with which type and shape.

    Attributes:
        dtype: as safetensors writes it, such as "BF16".
        start: its first byte in the file.
        stop: the byte after its last.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        """Returns how many bytes the tensor takes."""
        return self.stop - self.start


def read_header(path: Path) -> dict[str, TensorRef]:
    """Returns a file's tensors by name. Raises CorruptCheckpoint if it is cut off, overlaps or is not safetensors."""
    return read_tensors_and_notes(path)[0]


def has_notes(path: Path) -> bool:
    """Returns whether a file has notes of its writer. Raises what `read_header` raises."""
    return read_tensors_and_notes(path)[1] != PLAIN_NOTES


def read_tensors_and_notes(path: Path) -> tuple[dict[str, TensorRef], dict[str, str]]:
    """Returns the tensors and the notes of a file, by name, from one parse. A file without notes has PLAIN_NOTES."""
    entries, data_start, size = _read_entries(path)
    notes = entries.pop(METADATA, PLAIN_NOTES)
    refs = {name: _tensor_ref(path, name, entry, data_start, size) for name, entry in entries.items()}
    _require_contiguous(path, list(refs.values()), data_start, size)
    return refs, notes


def parse_header(header: bytes, name: str) -> dict[str, Any]:
    """Returns the header's JSON.

    It has an entry for each tensor, which is not checked further, and perhaps `__metadata__` with strings.

    Raises CorruptCheckpoint for what is not JSON as safetensors has it, or exceeds the limits.
    """
    if not header.startswith(b"{"):
        raise CorruptCheckpoint(f"the header of {name} does not begin with a brace", "save or fetch it again")
    _require_bounded(header, name)
    try:
        entries: dict[str, Any] = json.loads(
            header.decode("utf-8"),
            object_pairs_hook=unique_keys,
            parse_int=_parse_whole,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
        notes = entries.get(METADATA, {})
        if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
            raise ValueError("the metadata are not strings by name")
        "".join([*entries, *notes, *notes.values()]).encode("utf-8")  # half a surrogate pair is not text
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"the header of {name} is not JSON as safetensors has it", "save or fetch it again"
        ) from error
    return entries


def packed_header(entries: Mapping[str, Any]) -> bytes:
    """Returns the beginning of a file: the header's length, and its JSON, padded to a multiple of 8 bytes."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _require_bounded(header: bytes, name: str) -> None:
    """Raises CorruptCheckpoint for a header with more strings, values, lists or levels than MAX_TENSORS tensors have.

    It needs a few copies of `header` at most. The header need not be JSON: where this misreads one, the JSON reader
    refuses it.
    """
    hint = "save it again with safetensors, in smaller files"
    text = header.replace(rb"\\", b"").replace(rb"\"", b"")  # now a quote begins or ends a string
    string_count = (text.count(b'"') + 1) // 2
    if string_count > MAX_STRINGS:
        raise CorruptCheckpoint(
            f"the header of {name} has {string_count} strings, at most {MAX_STRINGS} are read", hint
        )
    outline = _outline(text)
    if len(outline) > MAX_OUTLINE_CHARACTERS:
        raise CorruptCheckpoint(f"the header of {name} has more values than {MAX_TENSORS} tensors need", hint)
    irregular_count = outline.count(b"{") + outline.count(b"[")
    if irregular_count > MAX_IRREGULAR_VALUES:
        raise CorruptCheckpoint(
            f"the header of {name} has {irregular_count} lists and objects that do not describe a tensor, "
            f"at most {MAX_IRREGULAR_VALUES} are read",
            hint,
        )


def _outline(text: bytes) -> bytes:
    """Returns the punctuation of JSON that has no escaped quotes.

    Strings and other scalars are dropped, L stands for a short list of scalars, and E for an object with the fields of
    a tensor's entry. `{"a":{"dtype":"U8","shape":[1],...}}` gives `{:E}`. The letters keep what is nested in a list or
    an entry from passing as one.
    """
    outline = STRING_PATTERN.sub(b"", text.translate(None, NON_OUTLINE_BYTES))
    for shape in LIST_OUTLINES:
        outline = outline.replace(shape, b"L")
    for entry in ENTRY_OUTLINES:
        outline = outline.replace(entry, b"E")
    return outline


def _parse_whole(text: str) -> int:
    if text.startswith("-"):
        raise ValueError("a number is negative")
    return int(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError("a number is not a whole number")


def _read_entries(path: Path) -> tuple[dict[str, Any], int, int]:
    """Returns the header's entries, the byte where the tensors begin, and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length_bytes = file.read(8)
        length = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CorruptCheckpoint(f"{path.name} is not a safetensors file", "save the weights with safetensors")
        return parse_header(file.read(length), path.name), 8 + length, size


def _tensor_ref(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorRef:
    """Reads an entry. Every number is limited before it is used, because products of huge ones take minutes."""
    if not isinstance(entry, dict) or set(entry) != ENTRY_FIELDS:
        raise CorruptCheckpoint(
            f"{path.name} describes a tensor by other fields than {', '.join(sorted(ENTRY_FIELDS))}",
            "save or fetch it again",
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CorruptCheckpoint(f"{path.name} has a tensor of an unknown dtype", f"known: {', '.join(DTYPE_BYTES)}")
    if not _is_whole_numbers(shape) or len(shape) > MAX_RANK or not all(n < MAX_DIMENSION for n in shape):
        raise CorruptCheckpoint(f"{path.name} has a tensor of an impossible shape", "save or fetch it again")
    if not _is_whole_numbers(offsets) or len(offsets) != 2:
        raise CorruptCheckpoint(f"{path.name} has a tensor without two offsets", "save or fetch it again")
    first_byte, byte_after = offsets
    if data_start + byte_after > size:
        raise CorruptCheckpoint(f"{path.name} is cut off: it has {size} bytes and needs more", "fetch it again")
    if first_byte > byte_after or byte_after - first_byte != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise CorruptCheckpoint(f"{path.name} gives a tensor a size that is not its shape's", "fetch it again")
    return TensorRef(name, path, dtype, tuple(shape), data_start + first_byte, data_start + byte_after)


def _is_whole_numbers(value: Any) -> bool:
    """Returns whether a value is a list of whole numbers. True and False are not numbers."""
    return isinstance(value, list) and all(type(n) is int for n in value)


def _require_contiguous(path: Path, refs: list[TensorRef], data_start: int, size: int) -> None:
    next_byte = data_start
    for ref in sorted(refs, key=lambda ref: (ref.start, ref.stop)):
        if ref.start != next_byte:
            raise CorruptCheckpoint(f"{path.name} has overlapping tensors or holes", "fetch it again")
        next_byte = ref.stop
    if next_byte != size:
        raise CorruptCheckpoint(f"{path.name} has {size - next_byte} bytes after its last tensor", "fetch it again")

"""Reads text files in UTF-8, with or without a byte order mark. Another encoding is refused, and named if it can be.

A guess is never used, because text that is read by the wrong table of characters shows no error.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from milkglass.errors import CodecError

UTF8 = "utf-8-sig"  # a byte order mark is not part of the text
MAX_LINE_CHARACTERS = 1 << 24  # characters of a line or of a cell
HEAD_BYTES = 4096  # bytes in which a binary file has a zero
_GZIP_MARK = b"\x1f\x8b"
_SPREADSHEET_MARKS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # the first bytes of .xlsx and .ods, and of .xls
_ENCODING_OF_BOM = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_UNDEFINED_BYTES = frozenset(b"\x81\x8d\x8f\x90\x9d")  # bytes that Windows-1252 does not define
_ENCODING_NAMES = {"UTF-16": "UTF-16", "WINDOWS-1252": "Windows-1252", "ISO-8859-1": "Latin-1 (ISO-8859-1)"}


def lines_with_ends(path: Path, encoding: str = UTF8) -> Iterator[tuple[int, str]]:
    """Yields the number of each line, and the line with its end. Only a line feed ends one.

    Raises:
        CodecError: the file is not text in this encoding, or a line is too long.
    """
    number = 0
    try:
        with path.open(encoding=encoding, newline="\n") as file:
            while line := file.readline(MAX_LINE_CHARACTERS):
                number += 1
                if len(line) == MAX_LINE_CHARACTERS:
                    raise CodecError(
                        f"line {number} of {path.name} is longer than {MAX_LINE_CHARACTERS:,} characters", "split it"
                    )
                yield number, line
    except UnicodeDecodeError:
        raise not_utf8_error(path) from None


def numbered_lines(path: Path, encoding: str = UTF8) -> Iterator[tuple[int, str]]:
    """Yields the number of each line, and the line without its end. Raises what `lines_with_ends` raises."""
    for number, line in lines_with_ends(path, encoding):
        yield number, line.rstrip("\r\n")


def not_utf8_error(path: Path) -> CodecError:
    """Returns the error for a file that is not UTF-8.

    It names the first line that is not, the encoding that its bytes look like, and the command that converts it.
    """
    number, byte_values = _invalid_line_bytes(path)
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if (name := _ENCODING_OF_BOM.get(head[:2])) is None:
        if head.startswith(_GZIP_MARK):
            return CodecError(f"{path.name} is compressed (gzip)", "unpack it, as with gunzip")
        if head.startswith(_SPREADSHEET_MARKS):
            return CodecError(f"{path.name} is not a text file", 'a spreadsheet? Save it as "CSV UTF-8"')
        if b"\0" in head:
            return CodecError(f"{path.name} is not a text file", "give text in UTF-8")
        name = _likely_encoding(byte_values)
    likely = (
        f"{_ENCODING_NAMES[name]} by its first bytes"
        if name == "UTF-16"
        else f"line {number} looks like {_ENCODING_NAMES[name]}"
    )
    new_name = path.with_name(f"{path.stem}.utf8{path.suffix}").name
    return CodecError(
        f"{path.name} is not UTF-8 text: {likely}",
        "save it as UTF-8 where it was made (in Excel as CSV UTF-8), or convert it: "
        f"iconv -f {name} -t UTF-8 {shlex.quote(path.name)} > {shlex.quote(new_name)}",
    )


def _invalid_line_bytes(path: Path) -> tuple[int, set[int]]:
    """Returns the number of the first line that is not UTF-8, and the bytes that such lines have."""
    first_number, byte_values = 0, set[int]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                first_number = first_number or number
                byte_values.update(line)
    return max(first_number, 1), byte_values  # line 1 if none is invalid: the file was changed since it was read


def _likely_encoding(byte_values: set[int]) -> str:
    """Returns the likely encoding of lines that are not UTF-8, by all of their bytes.

    Latin-1 has no quotes, dashes or euro sign where Windows-1252 has them.
    """
    is_windows = byte_values & set(range(0x80, 0xA0)) and not byte_values & _UNDEFINED_BYTES
    return "WINDOWS-1252" if is_windows else "ISO-8859-1"

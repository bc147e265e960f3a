"""Parquet files written by hand, with footers and page headers that say what no library would write."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

INT32, STRUCT = 5, 12  # Thrift's compact types of a list's elements
I64 = 6
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8  # encodings
MAGIC = b"PAR1"


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def zigzag(number: int) -> bytes:
    return varint(2 * number if number >= 0 else -2 * number - 1)


def binary(value: bytes) -> bytes:
    return varint(len(value)) + value


@dataclass
class Record:
    """A struct of Thrift's compact protocol. Fields are added in the order of their numbers."""

    raw: bytes = b""
    last: int = field(default=0)

    def _field(self, number: int, kind: int, value: bytes) -> Record:
        assert 0 < number - self.last < 16
        self.raw += bytes([(number - self.last) << 4 | kind]) + value
        self.last = number
        return self

    def int32(self, number: int, value: int) -> Record:
        return self._field(number, 5, zigzag(value))

    def int64(self, number: int, value: int) -> Record:
        return self._field(number, 6, zigzag(value))

    def text(self, number: int, value: str) -> Record:
        return self._field(number, 8, binary(value.encode()))

    def record(self, number: int, value: Record) -> Record:
        return self._field(number, 12, value.done())

    def many(self, number: int, kind: int, values: list[bytes]) -> Record:
        assert len(values) < 15
        return self._field(number, 9, bytes([len(values) << 4 | kind]) + b"".join(values))

    def done(self) -> bytes:
        return self.raw + b"\0"


def framed(body: bytes, footer: Record) -> bytes:
    tail = footer.done()
    return body + tail + struct.pack("<I", len(tail)) + MAGIC


def footer(schema: list[Record], rows: int, groups: list[Record]) -> Record:
    return (
        Record()
        .int32(1, 1)
        .many(2, STRUCT, [one.done() for one in schema])
        .int64(3, rows)
        .many(4, STRUCT, [one.done() for one in groups])
    )


def column(path: list[str], encodings: list[int], values: int, size: int, data: int) -> Record:
    """The metadata of a column of int32, uncompressed, whose data page is at `data`."""
    return (
        Record()
        .int32(1, 1)
        .many(2, INT32, [zigzag(one) for one in encodings])
        .many(3, 8, [binary(one.encode()) for one in path])
        .int32(4, 0)
        .int64(5, values)
        .int64(6, size)
        .int64(7, size)
        .int64(9, data)
    )


def chunk(start: int, about: Record) -> bytes:
    return Record().int64(2, start).record(3, about).done()


def column_beyond_the_schema() -> bytes:
    """One column in the schema, two in the row group."""
    about = column(["labels"], [PLAIN], 1, 10, 4)
    schema = [Record().text(4, "schema").int32(5, 1), Record().int32(1, 1).int32(3, 1).text(4, "labels")]
    group = Record().many(1, STRUCT, [chunk(4, about)] * 2).int64(2, 10).int64(3, 1)
    return framed(MAGIC, footer(schema, 1, [group]))


def histogram_of_another_size() -> bytes:
    """Statistics of definition levels that do not fit the column's schema."""
    statistics = Record().many(3, I64, [zigzag(1)] * 7)
    about = column(["labels"], [PLAIN], 1, 10, 4).record(16, statistics)
    schema = [Record().text(4, "schema").int32(5, 1), Record().int32(1, 1).int32(3, 1).text(4, "labels")]
    group = Record().many(1, STRUCT, [chunk(4, about)]).int64(2, 10).int64(3, 1)
    return framed(MAGIC, footer(schema, 1, [group]))


def runs(*counts: tuple[int, int]) -> bytes:
    """Parquet's run lengths, of values that fit into a byte: (count, value)."""
    return b"".join(varint(count << 1) + bytes([value]) for count, value in counts)


def page_beyond_its_column(claimed: int) -> bytes:
    """Two rows. The footer says two ids, the header of the page says `claimed`, all of them in a few bytes."""
    body = bytearray(MAGIC)
    schema = [
        Record().text(4, "schema").int32(5, 2),
        Record().int32(3, 1).text(4, "input_ids").int32(5, 1).int32(6, 3),
        Record().int32(3, 2).text(4, "list").int32(5, 1),
        Record().int32(1, 1).int32(3, 1).text(4, "element"),
        Record().int32(1, 1).int32(3, 1).text(4, "labels"),
    ]
    start = len(body)
    dictionary = struct.pack("<i", 5)
    body += _page(2, dictionary, 7, Record().int32(1, 1).int32(2, PLAIN)) + dictionary
    data = len(body)
    levels = [runs((1, 0), (claimed - 2, 1), (1, 0)), runs((claimed, 3))]
    ids = b"".join(struct.pack("<I", len(one)) + one for one in levels) + b"\1" + runs((claimed, 0))
    body += _page(0, ids, 5, Record().int32(1, claimed).int32(2, RLE_DICTIONARY).int32(3, RLE).int32(4, RLE)) + ids
    about = column(["input_ids", "list", "element"], [PLAIN, RLE, RLE_DICTIONARY], 2, len(body) - start, data)
    chunks = [chunk(start, about.int64(11, start))]
    start = len(body)
    levels = [runs((2, 1))]
    labels = struct.pack("<I", len(levels[0])) + levels[0] + struct.pack("<2i", 0, 1)
    body += _page(0, labels, 5, Record().int32(1, 2).int32(2, PLAIN).int32(3, RLE).int32(4, RLE)) + labels
    chunks.append(chunk(start, column(["labels"], [PLAIN, RLE], 2, len(body) - start, start)))
    group = Record().many(1, STRUCT, chunks).int64(2, len(body)).int64(3, 2)
    return framed(bytes(body), footer(schema, 2, [group]))


def _page(kind: int, content: bytes, number: int, header: Record) -> bytes:
    return Record().int32(1, kind).int32(2, len(content)).int32(3, len(content)).record(number, header).done()

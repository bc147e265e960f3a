"""Training rows that are longer than the model may read: cut, left out, or refused all at once.

Out of scope: how long a row is (codec.py), and how rows are written (training_rows.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from milkglass.client.data.data_file import Source
from milkglass.errors import TooLong
from milkglass.rows.place import Place, listed


@dataclass(frozen=True)
class LongRows:
    """What becomes of rows that are longer than the limit: they are cut, or left out. A conversation whose answers lie
    beyond it teaches nothing when it is cut: such rows are refused, all at once, unless long rows are left out.

    Attributes:
        limit: of tokens.
        skip: whether they are left out.
    """

    limit: int
    skip: bool = False

    def require(self, unanswered: Mapping[Place, int], rows: int, source: Source, most: int) -> None:
        """unanswered: rows without an answer within the limit, and the tokens before their first answer. rows: of the
        file. most: tokens that the model can take. Raises TooLong where there are any."""
        if not unanswered or self.skip:
            return
        verb = "has" if len(unanswered) == 1 else "have"
        before = max(unanswered.values())
        longer = f"set --max-length to more than {before} to use them all, or " if before < most else ""
        raise TooLong(
            f"{len(unanswered):,} of the {rows:,} rows of {source.name} {verb} no answer within {self.limit} tokens: "
            f"{listed([*unanswered])}",
            f"{longer}leave out rows that are too long with --skip-long",
        )

    def kept(self, count: int, long: Iterable[int], unanswered: Mapping[int, int]) -> list[int]:
        """Places of the rows of a batch that are written."""
        lost = {*unanswered, *(long if self.skip else ())}
        return [place for place in range(count) if place not in lost]


@dataclass(frozen=True)
class EncodedBatch:
    """table: None where no row is left. cut: how many of its rows were cut. left_out, unanswered: by place."""

    table: pa.Table | None
    cut: int
    left_out: tuple[int, ...]
    unanswered: Mapping[int, int]

    @classmethod
    def of(
        cls, columns: Mapping[str, pa.Array], count: int, long: Sequence[int], how: LongRows,
        unanswered: Mapping[int, int] | None = None,
    ) -> EncodedBatch:  # fmt: skip
        lost = unanswered or {}
        kept = how.kept(count, long, lost)
        table = pa.table(dict(columns))
        table = table if len(kept) == count else table.take(pa.array(kept, pa.int64()))
        cut = len({*long} & {*kept})
        return cls(table if kept else None, cut, tuple(sorted({*range(count)} - {*kept})), lost)

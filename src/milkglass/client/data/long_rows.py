"""Training rows that are longer than the model may read: they are cut, left out, or refused all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from milkglass.errors import TooLong
from milkglass.rows.data_file import Source
from milkglass.rows.place import Place, listed


def require_answers(unanswered: Mapping[Place, int], rows: int, source: Source, limit: int, most: int) -> None:
    """Raises TooLong if conversations have no answer within the limit: cut, they would teach nothing.

    Args:
        unanswered: these rows, and the tokens before their first answer.
        rows: the number of rows of the file.
        limit: the limit in tokens.
        most: tokens that the model can take.
    """
    if not unanswered:
        return
    verb = "has" if len(unanswered) == 1 else "have"
    before = max(unanswered.values())
    longer = f"set --max-length to more than {before} to use them all, or " if before < most else ""
    raise TooLong(
        f"{len(unanswered):,} of the {rows:,} rows of {source.name} {verb} no answer within {limit} tokens: "
        f"{listed([*unanswered])}",
        f"{longer}leave them out with --skip-long",
    )


@dataclass(frozen=True)
class EncodedBatch:
    """Rows that were encoded together.

    Attributes:
        table: the rows, or None if none is left.
        cut: how many of the rows were cut.
        unanswered: rows without an answer within the limit, which are not in the table: their places, and the tokens
            before their first answer.
    """

    table: pa.Table | None
    cut: int
    unanswered: Mapping[int, int]

    @classmethod
    def of(cls, columns: Mapping[str, pa.Array], long: Sequence[int], unanswered: Mapping[int, int]) -> EncodedBatch:
        """Makes a batch from the columns of the rows that are left. `long` has the places of rows that were cut."""
        table = pa.table(dict(columns))
        return cls(table if len(table) else None, len({*long} - {*unanswered}), unanswered)

"""JSON in which no key may occur twice: readers differ in which of the two they take.

Out of scope: what is read.
"""

from __future__ import annotations

from typing import Any


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(..., object_pairs_hook=unique_keys)`. Raises ValueError."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table

"""Refuses JSON in which a key occurs twice: readers differ in which of the two values they take."""

from __future__ import annotations

from typing import Any


class RepeatedKey(ValueError):
    """An object has the key `key` twice."""

    def __init__(self, key: str) -> None:
        super().__init__("a key occurs twice")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object with these entries, for `json.loads(..., object_pairs_hook=unique_keys)`.

    Raises RepeatedKey if a key occurs twice.
    """
    json_object = dict(pairs)
    if len(json_object) != len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(next(name for name in names if names.count(name) > 1))
    return json_object

"""A run's figures: ours, the paper's beside them, what was asked, and why ours is another.

What this module does not know: how a figure was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

from milkglass.errors import UsageError


class Named(Protocol):
    """What the figures of a recipe are called. why: a figure's name, or a pattern with *, to the reason."""

    @property
    def name(self) -> str: ...
    @property
    def published(self) -> Mapping[str, float]: ...
    @property
    def asked(self) -> Mapping[str, str]: ...
    @property
    def why(self) -> Mapping[str, str]: ...
    @property
    def quick(self) -> Mapping[str, Any] | None: ...


def figures(recipe: Named, measured: Mapping[str, float], digits: int) -> dict[str, dict[str, Any]]:
    """Each figure with "measured", and where the recipe says so "published", "asked" and "why".

    Raises UsageError for a figure that the recipe names and nobody measured. A quick run measures less: of it only
    what it is asked for itself must be there.
    """
    expected = recipe.asked.keys() | (recipe.published.keys() if recipe.quick is None else set())
    if lost := sorted(expected - measured.keys()):
        raise UsageError(f"{recipe.name} names a figure that was not measured: {lost[0]!r}", "see the recipe")
    result: dict[str, dict[str, Any]] = {}
    for name, value in measured.items():
        row: dict[str, Any] = {"measured": round(value, digits)}
        if name in recipe.published:
            row["published"] = recipe.published[name]
        if name in recipe.asked:
            row["asked"] = recipe.asked[name]
        if (reason := reason_for(name, recipe.why)) and "published" in row:
            row["why"] = reason
        result[name] = row
    return result


def reason_for(name: str, why: Mapping[str, str]) -> str | None:
    """The figure's own reason before that of a pattern; of patterns the first."""
    if name in why:
        return why[name]
    return next((reason for pattern, reason in why.items() if fnmatchcase(name, _literal(pattern))), None)


def _literal(pattern: str) -> str:
    """Only * stands for anything: names hold brackets and question marks."""
    return pattern.replace("[", "[[]").replace("?", "[?]")

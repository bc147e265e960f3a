"""Which tool a request demands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milkglass.errors import UsageError


def chosen(choice: Any, names: frozenset[str]) -> str | None:
    """The name of the tool that `tool_choice` demands; "" for any one, None where the model may choose. Raises
    UsageError."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required" and names:
        return ""
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise UsageError("tool_choice names no tool of this request", "name one of `tools`")
    return str(name)

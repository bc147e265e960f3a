"""Whether the values of a recipe have the types that its fields are declared with.

TOML's types are taken as they are: no string is read as a number, and true is not 1. A number must be finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from milkglass.errors import UsageError

KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a string"),
    (dict, "a table"),
    (list, "a list"),
)


def kind_of(value: Any) -> str:
    """What TOML calls it, for messages: "a string", "a table"."""
    return next((words for kind, words in KINDS if isinstance(value, kind)), f"a {type(value).__name__}")


def require_types(kind: type, raw: Mapping[str, Any], more: tuple[tuple[str, type], ...] = ()) -> None:
    """Raises UsageError for the first value that is not of its field's type.

    Args:
        kind: a dataclass.
        more: names of types that its annotations use and its module does not import when it is run.
    """
    for name, adapter in _adapters(kind, more).items():
        if name not in raw:
            continue
        try:
            adapter.validate_python(raw[name])
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place, value = _place(name, raw[name], first["loc"])
            raise UsageError(f"{place} is {kind_of(value)}: {_lowered(first['msg'])}", "see the recipe") from None


@cache
def _adapters(kind: type, more: tuple[tuple[str, type], ...]) -> dict[str, TypeAdapter[Any]]:
    """Of each field. Types of ours that are not dataclasses are checked by isinstance."""
    hints = get_type_hints(kind, localns=dict(more))
    return {one.name: _adapter(hints[one.name]) for one in fields(kind)}  # type: ignore[arg-type]


def _adapter(hint: Any) -> TypeAdapter[Any]:
    own = hasattr(hint, "__dataclass_fields__") or hasattr(hint, "model_fields")  # these bring settings of their own
    if own:
        return TypeAdapter(hint)
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))


def _place(name: str, value: Any, path: Sequence[Any]) -> tuple[str, Any]:
    """Where the fault is, and the value there. A path names a union's alternatives as well: these are left out."""
    words = [name]
    for step in path:
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            value = value[step]
            words.append(str(step))
    return ".".join(words), value


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]

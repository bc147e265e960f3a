"""Reads a recipe's file as settings, in full or with its table [quick].

    [quick]
    rows = 1000                          a value in place of the recipe's
    training.max_steps = 150             one entry of a table, the others stay
    variants = ["k=10, eps=1"]           of a table only the entries of these names
    only.data = ["sst2"]                 the same, of a table of which entries are changed as well

A quick run is never taken for a full one: its name, the names of its files and the record in its folder end in
".quick". The demands of a full run do not apply to it; only [quick.asked] does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from milkglass.errors import UsageError

QUICK = ".quick"
# What a quick run may change. Never what was published, the seed, or what kind of recipe it is.
CHANGEABLE = (
    "model", "rows", "seconds", "curve", "instructions", "keys", "attacks", "public", "public_rows", "variants",
    "defences", "seeds", "attacked", "data", "training", "texts", "evaluation", "asked", "why", "only",
)  # fmt: skip

T = TypeVar("T")


def settings(path: Path, quick: bool = False) -> dict[str, Any]:
    """Returns the entries of a recipe's file, and its name.

    Raises:
        UsageError: the file is no recipe, or `quick` is set and it has no such table.
    """
    if not path.is_file():
        raise UsageError(f"there is no recipe {path}", "recipes are .toml files")
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and bytes that are not UTF-8
        raise UsageError(f"{path.name} is not TOML: {error}", "see recipes/ for examples") from None
    _require_seeds(raw)
    changes = raw.pop("quick", None)
    if not quick:
        return {**raw, "name": path.stem}
    if not isinstance(changes, dict):
        raise UsageError(f"{path.name} has no table [quick]", "run it without --quick, or write one")
    if unknown := [key for key in changes if key not in CHANGEABLE]:
        raise UsageError(f"[quick] must not change {unknown[0]}", f"it may change: {', '.join(CHANGEABLE)}")
    base = {key: value for key, value in raw.items() if key != "asked"}
    first = {key: value for key, value in changes.items() if key != "only"}
    whole = _overlaid(_overlaid(base, first), table_of(changes, "only"))
    said = {key: value for key, value in changes.items() if key != "why"}  # what was run, not why figures differ
    return {**whole, "name": path.stem + QUICK, "quick": said}


def _require_seeds(raw: Mapping[str, Any]) -> None:
    """Checks that seeds are integers from 0."""
    many = raw.get("seeds", [])
    for seed in [*(many if isinstance(many, list) else []), *([raw["seed"]] if "seed" in raw else [])]:
        if type(seed) is not int or seed < 0:
            info = seed if type(seed) is int else kind_of(seed)
            raise UsageError(f"a seed is {info}, a whole number from 0 is needed", "see the recipe")


def _overlaid(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(raw)
    for key, value in changes.items():
        there = raw.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            result[key] = _overlaid(there, value)
        elif isinstance(there, dict) and isinstance(value, list):
            if missing := [name for name in value if not isinstance(name, str) or name not in there]:
                raise UsageError(f"[quick] names {missing[0]!r}, which is not in {key}", f"it has: {', '.join(there)}")
            result[key] = {name: there[name] for name in value}
        else:
            result[key] = value
    return result


def table_of(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the entry as a table, empty if it is missing. Raises UsageError for anything else."""
    result = raw.get(name, {})
    if not isinstance(result, dict):
        raise UsageError(f"{name} is {kind_of(result)}, a table is needed", f"write [{name}]")
    return result


def from_entries(kind: type[T], entries: Mapping[str, Any]) -> T:
    """Returns an instance of a dataclass with these entries of a recipe.

    Raises:
        UsageError: an entry is missing, unknown or of another type.
    """
    parameters = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    needed = [n for n, one in parameters.items() if one.default is MISSING and one.default_factory is MISSING]
    if unknown := [name for name in entries if name not in parameters]:
        raise UsageError(f"a recipe of this kind has no {unknown[0]}", f"it has: {', '.join(parameters)}")
    if missing := [name for name in needed if name not in entries]:
        raise UsageError(f"the recipe has no {missing[0]}", f"it needs: {', '.join(needed)}")
    require_types(kind, entries)
    return kind(**entries)


# --- types of values --------------------------------------------------------------------------------------------------
# TOML's types are taken as they are: no string is read as a number, and true is not 1. A number must be finite.
KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a string"),
    (dict, "a table"),
    (list, "a list"),
)


def kind_of(value: Any) -> str:
    """Returns TOML's name of the value's type for messages, such as "a string"."""
    return next((words for kind, words in KINDS if isinstance(value, kind)), f"a {type(value).__name__}")


def require_types(kind: type, raw: Mapping[str, Any]) -> None:
    """Raises UsageError for the first value that is not of the type of its field in the dataclass `kind`."""
    for name, adapter in _adapters(kind).items():
        if name not in raw:
            continue
        try:
            adapter.validate_python(raw[name])
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place, value = _place(name, raw[name], first["loc"])
            words = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
            raise UsageError(f"{place} is {kind_of(value)}: {words}", "see the recipe") from None


@cache
def _adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    """Returns an adapter for each field. Our own types that are no dataclasses are checked by isinstance."""
    hints = get_type_hints(kind)
    return {one.name: _adapter(hints[one.name]) for one in fields(kind)}  # type: ignore[arg-type]


def _adapter(hint: Any) -> TypeAdapter[Any]:
    own = hasattr(hint, "__dataclass_fields__") or hasattr(hint, "model_fields")  # these bring settings of their own
    if own:
        return TypeAdapter(hint)
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))


def _place(name: str, value: Any, path: Sequence[Any]) -> tuple[str, Any]:
    """Returns where the fault is, and the value there. Skips the alternatives of unions, which paths name too."""
    words = [name]
    for step in path:
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            value = value[step]
            words.append(str(step))
    return ".".join(words), value

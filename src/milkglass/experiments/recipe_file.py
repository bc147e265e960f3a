"""A recipe's file as settings: in full, or with its table [quick] laid over it.

    [quick]
    rows = 1000                          a value in place of the recipe's
    training.max_steps = 150             one entry of a table, the others stay
    variants = ["k=10, eps=1"]           of a table only the entries of these names
    only.data = ["sst2"]                 the same, of a table of which entries are changed as well

A quick run is never taken for a full one: its name ends in ".quick", and so do its files and what its folder says of
itself. What a full run is asked for does not hold for it; only [quick.asked] does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from milkglass.errors import UsageError
from milkglass.experiments.value_types import kind_of, require_types

QUICK = ".quick"
# What a quick run may change. Never what was published, the seed, or what kind of recipe it is.
MILDER = (
    "model",
    "rows",
    "seconds",
    "curve",
    "attacks",
    "public",
    "variants",
    "defences",
    "seeds",
    "attacked",
    "data",
    "training",
    "texts",
    "evaluation",
    "asked",
    "only",
)

Made = TypeVar("Made")


def settings(path: Path, quick: bool = False) -> dict[str, Any]:
    """Raises UsageError for a file that is no recipe, and for --quick where the recipe has no such table."""
    if not path.is_file():
        raise UsageError(f"there is no recipe {path}", "recipes are .toml files")
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and bytes that are not UTF-8
        raise UsageError(f"{path.name} is no TOML: {error}", "see recipes/ for examples") from None
    _require_seeds(raw)
    less = raw.pop("quick", None)
    if not quick:
        return {**raw, "name": path.stem}
    if not isinstance(less, dict):
        raise UsageError(f"{path.name} has no table [quick]", "run it without --quick, or write one")
    if strange := [key for key in less if key not in MILDER]:
        raise UsageError(f"[quick] must not change {strange[0]}", f"it may change: {', '.join(MILDER)}")
    kept = {key: value for key, value in raw.items() if key != "asked"}
    changes = {key: value for key, value in less.items() if key != "only"}
    return {**laid_over(laid_over(kept, changes), table_of(less, "only")), "name": path.stem + QUICK, "quick": less}


def _require_seeds(raw: Mapping[str, Any]) -> None:
    """What a generator takes: whole numbers from 0."""
    many = raw.get("seeds", [])
    for seed in [*(many if isinstance(many, list) else []), *([raw["seed"]] if "seed" in raw else [])]:
        if type(seed) is not int or seed < 0:
            info = seed if type(seed) is int else kind_of(seed)
            raise UsageError(f"a seed is {info}, a whole number from 0 is needed", "see the recipe")


def laid_over(raw: Mapping[str, Any], less: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(raw)
    for key, value in less.items():
        there = raw.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            result[key] = laid_over(there, value)
        elif isinstance(there, dict) and isinstance(value, list):
            if lost := [name for name in value if not isinstance(name, str) or name not in there]:
                raise UsageError(f"[quick] names {lost[0]!r}, which {key} has not", f"it has: {', '.join(there)}")
            result[key] = {name: there[name] for name in value}
        else:
            result[key] = value
    return result


def table_of(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The entry as a table; an empty one where it is missing. Raises UsageError for anything else."""
    result = raw.get(name, {})
    if not isinstance(result, dict):
        raise UsageError(f"{name} is {kind_of(result)}, a table is needed", f"write [{name}]")
    return result


def made_of(kind: type[Made], raw: Mapping[str, Any]) -> Made:
    """The recipe with these entries. Raises UsageError for one that is missing, of another type, or read by nobody."""
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    needed = [n for n, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    if lost := [name for name in needed if name not in raw]:
        raise UsageError(f"the recipe has no {lost[0]}", f"it needs: {', '.join(needed)}")
    if strange := [name for name in raw if name not in known]:
        raise UsageError(f"a recipe of this kind has no {strange[0]}", f"it has: {', '.join(known)}")
    require_types(kind, raw)
    return kind(**raw)

"""The attacks of a recipe: names of the catalogue, or names of the recipe's own for attacks with other parameters.

    attacks = ["knn+", "tfa"]                                       as they are

    [attacks]                                                       one more than once, under names
    "knn+" = {}
    "sda, K_A=3" = { attack = "sda", candidates = 3 }

What this module does not know: whether a value makes sense. An attack that must not be given one says so itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from milkglass.attacks.catalogue import EVERY
from milkglass.errors import UsageError
from milkglass.threat.attack import Attack

Entries = list[str] | dict[str, dict[str, Any]]  # as they stand in the recipe


def kinds(entries: Entries) -> dict[str, type[Attack]]:
    """By name, in the recipe's order; each can be made without arguments. Raises UsageError."""
    table: Mapping[str, Mapping[str, Any]] = (
        entries if isinstance(entries, dict) else {name: {} for name in _once(entries)}
    )
    return {name: _named(name, dict(provided)) for name, provided in table.items()}


def _once(names: Iterable[str]) -> list[str]:
    listed = list(names)
    twice = [name for name in listed if listed.count(name) > 1]
    if twice:
        raise UsageError(f"{twice[0]} is listed twice", "give each a name of its own in a table [attacks]")
    return listed


def _named(name: str, provided: dict[str, Any]) -> type[Attack]:
    """The attack under this name, made with these parameters where it is made with none."""
    base = str(provided.pop("attack", name))
    if base not in EVERY:
        raise UsageError(f"there is no attack {base!r}", f"known: {', '.join(EVERY)}")
    if name in EVERY and (name != base or provided):
        raise UsageError(f"{name!r} is the name of an attack as it is", "give this one another name")
    if not name or "/" in name:
        raise UsageError(f"{name!r} cannot be a name", "give a name without /: results are kept in files under it")
    kind = EVERY[base]
    _require_parameters(name, kind, provided)

    def init(self: Attack) -> None:
        kind.__init__(self, **provided)

    # `needs` is for audits, whose budget is the user's; a recipe says itself how long an attack may take
    space = {"__init__": init, "__module__": "recipe", "__doc__": kind.__doc__, "name": name, "needs": 0.0}
    created = cast(type[Attack], type(kind.__name__, (kind,), space))
    created()  # an attack may refuse a value
    return created


def _require_parameters(name: str, kind: type[Attack], provided: Mapping[str, Any]) -> None:
    known = {one.name: one.default for one in fields(kind) if one.init}  # type: ignore[arg-type]
    for parameter, value in provided.items():
        if parameter not in known:
            raise UsageError(f"{name} has no parameter {parameter!r}", f"{kind.name} has: {', '.join(known) or 'none'}")
        default = known[parameter]
        if default is None or default is MISSING:
            continue
        fits = isinstance(value, type(default)) and isinstance(value, bool) == isinstance(default, bool)
        if not fits and not (isinstance(default, float) and type(value) is int):
            raise UsageError(
                f"{name}: {parameter} is {value!r}, not a {type(default).__name__}", f"the default is {default!r}"
            )

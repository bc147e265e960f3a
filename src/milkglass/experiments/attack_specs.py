"""The attacks of a recipe: names of the catalogue, or the recipe's own names for attacks with other parameters.

    attacks = ["knn+", "tfa"]                                       with the catalogue's parameters

    [attacks]                                                       one more than once, under names
    "knn+" = {}
    "sda, K_A=3" = { attack = "sda", candidates = 3 }

Figures, and the random draws of an attack, go by the recipe's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milkglass.attacks.catalogue import EVERY
from milkglass.errors import UsageError
from milkglass.threat.attack import Attack

Entries = list[str] | dict[str, dict[str, Any]]  # as the recipe has them


def attacks_of(entries: Entries) -> dict[str, Attack]:
    """By the recipe's name, in its order.

    Raises:
        UsageError: a name that is listed twice, is unknown or cannot be a name, or a parameter that the attack refuses.
    """
    if isinstance(entries, list) and (twice := [name for name in entries if entries.count(name) > 1]):
        raise UsageError(f"{twice[0]} is listed twice", "give each a name of its own in a table [attacks]")
    table = entries if isinstance(entries, dict) else {name: {} for name in entries}
    return {name: _attack(name, parameters) for name, parameters in table.items()}


def _attack(name: str, parameters: Mapping[str, Any]) -> Attack:
    base = str(parameters.get("attack", name))
    attack = EVERY.make(base, {key: value for key, value in parameters.items() if key != "attack"})
    if name in EVERY and (name != base or attack != EVERY[base]):
        raise UsageError(f"{name!r} is the name of an attack with its own parameters", "give this one another name")
    if not name or "/" in name:
        raise UsageError(f"{name!r} cannot be a name", "give a name without /: results are stored in files under it")
    return attack

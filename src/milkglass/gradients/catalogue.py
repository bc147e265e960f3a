"""Every defence of gradients by name, as a recipe gives it: { shield = "gaussian", level = 0.05 }.

Adding a method is one file and one line here; the shared tests then run on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from milkglass.errors import UsageError
from milkglass.gradients.dp_sgd import DPSGD
from milkglass.gradients.dropout import Dropout
from milkglass.gradients.freezing import FrozenEmbeddings
from milkglass.gradients.noise import GaussianNoise, LaplaceNoise
from milkglass.gradients.pruning import MagnitudePruning, RandomPruning
from milkglass.gradients.shield import Bare, Shield

SHIELDS: Mapping[str, type[Shield]] = {
    one.name: one
    for one in (Bare, GaussianNoise, LaplaceNoise, RandomPruning, MagnitudePruning, FrozenEmbeddings, Dropout, DPSGD)
}


def shield_named(text: str) -> Shield:
    """As a command line gives it: NAME or NAME:PARAMETER=NUMBER,... (gaussian:level=0.001). Raises UsageError."""
    name, _, rest = text.partition(":")
    entry: dict[str, Any] = {"shield": name}
    for part in rest.split(",") if rest else ():
        called, _, value = part.partition("=")
        try:
            entry[called.strip()] = float(value)
        except ValueError:
            raise UsageError(f"{part!r} is no parameter of a shield", "write gaussian:level=0.001") from None
    return shield_of(entry)


def parameters(shield: Shield) -> str:
    """Its name and its parameters, in words."""
    told = ", ".join(f"{one.name} = {getattr(shield, one.name)}" for one in fields(cast("Any", shield)))
    return f"{shield.name} ({told})" if told else shield.name


def shield_of(entry: Mapping[str, Any]) -> Shield:
    """{} is none. Raises UsageError."""
    given = dict(entry)
    name = str(given.pop("shield", Bare.name))
    if name not in SHIELDS:
        raise UsageError(f"there is no shield {name!r}", f"known: {', '.join(SHIELDS)}")
    try:
        return SHIELDS[name](**given)
    except TypeError:
        known = ", ".join(one.name for one in fields(cast("Any", SHIELDS[name]))) or "none"
        raise UsageError(
            f"{name} has not all of the parameters {', '.join(sorted(given))}", f"it has: {known}"
        ) from None

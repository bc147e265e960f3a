"""Every defence of gradients by name, as a recipe gives it: { shield = "gaussian", level = 0.05 }.

Adding a method is one file and one line here; the shared tests then run on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from milkglass.errors import UsageError
from milkglass.gradient_defences.defence import GradientDefence, NoDefence
from milkglass.gradient_defences.dp_sgd import DPSGD
from milkglass.gradient_defences.dropout import Dropout
from milkglass.gradient_defences.freezing import FrozenEmbeddings
from milkglass.gradient_defences.noise import GaussianNoise, LaplaceNoise
from milkglass.gradient_defences.pruning import MagnitudePruning, RandomPruning

SHIELDS: Mapping[str, type[GradientDefence]] = {
    one.name: one
    for one in (
        NoDefence,
        GaussianNoise,
        LaplaceNoise,
        RandomPruning,
        MagnitudePruning,
        FrozenEmbeddings,
        Dropout,
        DPSGD,
    )
}


def shield_named(text: str) -> GradientDefence:
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


def parameters(shield: GradientDefence) -> str:
    """Its name and its parameters, in words."""
    info = ", ".join(f"{one.name} = {getattr(shield, one.name)}" for one in fields(cast("Any", shield)))
    return f"{shield.name} ({info})" if info else shield.name


def shield_of(entry: Mapping[str, Any]) -> GradientDefence:
    """{} is none. Raises UsageError."""
    provided = dict(entry)
    name = str(provided.pop("shield", NoDefence.name))
    if name not in SHIELDS:
        raise UsageError(f"there is no shield {name!r}", f"known: {', '.join(SHIELDS)}")
    try:
        return SHIELDS[name](**provided)
    except TypeError:
        known = ", ".join(one.name for one in fields(cast("Any", SHIELDS[name]))) or "none"
        raise UsageError(
            f"{name} has not all of the parameters {', '.join(sorted(provided))}", f"it has: {known}"
        ) from None

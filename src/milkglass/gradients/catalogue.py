"""Every defence of gradients by name, as a recipe gives it: { shield = "gaussian", level = 0.05 }.

Adding a method is one file and one line here; the shared tests then run on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def shield_of(entry: Mapping[str, Any]) -> Shield:
    """{} is none. Raises UsageError."""
    given = dict(entry)
    name = str(given.pop("shield", Bare.name))
    if name not in SHIELDS:
        raise UsageError(f"there is no shield {name!r}", f"known: {', '.join(SHIELDS)}")
    try:
        return SHIELDS[name](**given)
    except TypeError:
        raise UsageError(f"{name} has not all of the parameters {', '.join(sorted(given))}", "see its file") from None

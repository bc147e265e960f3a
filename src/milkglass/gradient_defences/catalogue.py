"""Every defence of gradients by name, as a recipe gives it: { shield = "gaussian", level = 0.05 }.

Adding a method is one file and one line here; the shared tests then run on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milkglass.catalogue import Catalogue
from milkglass.gradient_defences.defence import GradientDefence, NoDefence
from milkglass.gradient_defences.dp_sgd import DPSGD
from milkglass.gradient_defences.dropout import Dropout
from milkglass.gradient_defences.freezing import FrozenEmbeddings
from milkglass.gradient_defences.noise import GaussianNoise, LaplaceNoise
from milkglass.gradient_defences.pruning import MagnitudePruning, RandomPruning
from milkglass.parameters import parameters_of, read_words

GRADIENT_DEFENCES: Catalogue[GradientDefence] = Catalogue(
    "gradient defence",
    NoDefence(),
    GaussianNoise(),
    LaplaceNoise(),
    RandomPruning(),
    MagnitudePruning(),
    FrozenEmbeddings(),
    Dropout(),
    DPSGD(),
    group="milkglass.defence",
    kind=GradientDefence,
)


def gradient_defence_named(text: str) -> GradientDefence:
    """As a command line gives it: NAME or NAME:PARAMETER=VALUE,... (gaussian:level=0.001). Raises UsageError."""
    name, _, rest = text.partition(":")
    kind = type(GRADIENT_DEFENCES[name])
    return GRADIENT_DEFENCES.make(name, read_words(kind, rest.split(",") if rest else (), name))


def gradient_defence_of(entry: Mapping[str, Any]) -> GradientDefence:
    """As a recipe gives it: its name under `shield`, and its parameters; {} is none. Raises UsageError."""
    values = dict(entry)
    return GRADIENT_DEFENCES.make(values.pop("shield", NoDefence.name), values)


def name_and_parameters(defence: GradientDefence) -> str:
    """Its name and its parameters, as streams of noise and reports have them: "gaussian (level = 0.05, clip = 1.0)"."""
    values = ", ".join(f"{name} = {getattr(defence, name)}" for name in parameters_of(type(defence)))
    return f"{defence.name} ({values})" if values else defence.name

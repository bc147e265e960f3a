"""Lists all defences of gradients by name, as a recipe writes them: { shield = "gaussian", level = 0.05 }.

To add one, write a file and add a line here; the shared tests then run on it.
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


def parse_gradient_defence(text: str) -> GradientDefence:
    """Parses NAME or NAME:PARAMETER=VALUE,... (gaussian:level=0.001). Raises UsageError for anything else."""
    name, _, parameters = text.partition(":")
    defence_type = type(GRADIENT_DEFENCES[name])
    return GRADIENT_DEFENCES.make(name, read_words(defence_type, parameters.split(",") if parameters else (), name))


def gradient_defence_from_recipe(entry: Mapping[str, Any]) -> GradientDefence:
    """Parses a recipe's entry: the name under `shield`, and parameters; {} is no defence. Raises UsageError."""
    parameters = dict(entry)
    return GRADIENT_DEFENCES.make(parameters.pop("shield", NoDefence.name), parameters)


def name_and_parameters(defence: GradientDefence) -> str:
    """Returns name and parameters, as a label of noise streams and in reports: "gaussian (level = 0.05)"."""
    parameters = ", ".join(f"{name} = {getattr(defence, name)}" for name in parameters_of(type(defence)))
    return f"{defence.name} ({parameters})" if parameters else defence.name

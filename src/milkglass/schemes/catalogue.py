"""Lists all schemes by the name that a key file has. To add one, write a file and add a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milkglass.catalogue import Catalogue
from milkglass.schemes.aloepri import AloePri
from milkglass.schemes.coarse import Coarse
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.orthogonal import Orthogonal
from milkglass.schemes.permuted import Permuted
from milkglass.schemes.scheme import Scheme
from milkglass.schemes.sentinel import SentinelLMs

SCHEMES: Catalogue[Scheme] = Catalogue(
    "scheme",
    ObfusLM(),
    Coarse(),
    AloePri(),
    Orthogonal(),
    Permuted(),
    SentinelLMs(),
    group="milkglass.scheme",
    kind=Scheme,
)


def scheme_named(name: str, parameters: Mapping[str, Any]) -> Scheme:
    """Returns a scheme. Raises UsageError. `parameters` are as in `Scheme.document`, or typed."""
    return SCHEMES.make(name.removesuffix("+"), parameters)


def scheme_of_recipe(parameters: Mapping[str, Any]) -> Scheme:
    """Returns the scheme of a recipe's variant: parameters, and its name under `scheme` unless it is ObfusLM."""
    entries = dict(parameters)
    return scheme_named(str(entries.pop("scheme", "obfuslm")), entries)

"""Every scheme by the name that a key file keeps. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milkglass.errors import UsageError
from milkglass.schemes.bands import Bands
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.obfuslm_plus import Plus
from milkglass.schemes.scheme import Scheme
from milkglass.schemes.sentinel import SentinelLMs

SCHEMES: Mapping[str, type[Scheme]] = {"obfuslm": ObfusLM, "sentinel": SentinelLMs}


def scheme_named(name: str, parameters: Mapping[str, Any]) -> Scheme:
    """parameters: as `Scheme.told` gives them, or typed. Raises UsageError."""
    kind = SCHEMES.get(name.removesuffix("+"))
    if kind is None:
        raise UsageError(f"there is no scheme {name!r}", f"known: {', '.join(SCHEMES)}")
    provided = dict(parameters)
    for option, created in (("plus", Plus), ("bands", Bands)):
        if isinstance(provided.get(option), Mapping):
            provided[option] = created(**provided[option])
    try:
        return kind(**provided)
    except TypeError:
        raise UsageError(
            f"{name} has not all of the parameters {', '.join(sorted(provided))}", "see its file"
        ) from None


def scheme_of_recipe(parameters: Mapping[str, Any]) -> Scheme:
    """A recipe's variant: the scheme's parameters, and its name under `scheme` where it is not ObfusLM."""
    provided = dict(parameters)
    return scheme_named(str(provided.pop("scheme", "obfuslm")), provided)

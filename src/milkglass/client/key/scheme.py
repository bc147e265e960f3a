"""Names the scheme of a key or for a model, and refuses a scheme that does not fit."""

from __future__ import annotations

from typing import Any

from milkglass.client.key.key import Key
from milkglass.errors import MissingExtra, UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import Architecture, architecture_of
from milkglass.schemes.catalogue import SCHEMES, scheme_named
from milkglass.schemes.scheme import Scheme


def scheme_for(base: Checkpoint, name: str = "obfuslm", **parameters: Any) -> Scheme:
    """Returns the scheme with these parameters, and with its paper's suggestions for such a model."""
    return scheme_named(
        name, {**SCHEMES[name.removesuffix("+")].suggested_parameters(architecture_of(base).kind), **parameters}
    )


def scheme_of(key: Key) -> Scheme:
    """Returns the scheme that made a key. Raises MissingExtra if it is not installed here."""
    parameters = dict(key.info.scheme)
    name = str(parameters.pop("name"))
    if name.removesuffix("+") not in SCHEMES:
        raise MissingExtra(
            f"this key was made with the scheme {name!r}, which is not installed here",
            "install the package that brings it (the one with an entry point of the group milkglass.scheme)",
        )
    return scheme_named(name, parameters)


def require_kind(architecture: Architecture, scheme: Scheme) -> None:
    """Raises UnsupportedModel for a scheme that is of no use to such a model.

    A decoder whose ids name no token can be trained as a classifier, which a scheme allows by `for_labels`.
    """
    if scheme.shares and not scheme.for_labels and architecture.kind == "decoder":
        raise UnsupportedModel(
            "rows = shared is for models that read: a model that generates would answer in ids that name no token",
            "use obfuslm with --set aliases=2 or --bands for this model; for a classifier --scheme coarse",
        )


def refuse_delta_if_unsupported(scheme: Scheme, delta: bool) -> None:
    """Raises UsageError if a delta was asked for and cannot hold what the scheme changes."""
    if delta and not scheme.supports_delta:
        reason = "coarse makes a smaller table, which no delta can hold"
        if scheme.needs_whole_layers:
            scheme_name = "ObfusLM+" if scheme.plus else scheme.name
            reason = f"{scheme_name} changes every layer: a delta would be the whole model"
        raise UsageError(reason, "leave --delta out")

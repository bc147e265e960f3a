"""The entries of a recipe, checked before anything is run: variants, defences, data, trainings.

What this module does not know: files. That data are there is found out when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from pydantic import ValidationError

from milkglass.errors import UsageError
from milkglass.experiments.recipe_file import made_of
from milkglass.experiments.value_types import kind_of, require_types
from milkglass.hidden_states.catalogue import HIDDEN_STATE_DEFENCES
from milkglass.sanitizers.catalogue import Method
from milkglass.schemes.bands import Bands
from milkglass.schemes.catalogue import SCHEMES, scheme_of_recipe
from milkglass.schemes.obfuslm_plus import Plus
from milkglass.server.spec import Hyperparameters

OF_SCHEMES = (("Plus", Plus), ("Bands", Bands))  # types that schemes name without importing them


@final
@dataclass(frozen=True)
class DatasetSpec:
    """One data set of a comparison.

    Attributes:
        train: a file or a data set by name.
        held_out: likewise.
        rows: how many of train; None: all.
    """

    train: str
    held_out: str
    rows: int | None = None


def hyperparameters(provided: Mapping[str, Any]) -> Hyperparameters:
    """Raises UsageError, naming the setting, its value's type and what is needed."""
    try:
        return Hyperparameters(**provided)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "settings"
        result = f" is {kind_of(provided[name])}" if name in provided else ""
        words = str(first["msg"]).lower()
        raise UsageError(f"training: {name}: {words}{result and f'; it{result}'}", "see the recipe") from None


def require_names(table: Mapping[str, Any], name: str, needed: tuple[str, ...]) -> None:
    if lost := [one for one in needed if one not in table]:
        raise UsageError(f"{name} has no {lost[0]}", f"it needs: {', '.join(needed)}")


def require_variants(variants: Mapping[str, Mapping[str, Any]]) -> None:
    """Parameters of schemes; no parameters mean plain. Raises UsageError."""
    for name, parameters in variants.items():
        if parameters:
            _require_scheme(name, parameters)


def require_data(name: str, entry: Mapping[str, Any]) -> None:
    if strange := sorted(set(entry) - {"train", "held_out", "rows"}):
        raise UsageError(f"data.{name} has no {strange[0]}", "it has: train, held_out, rows")
    require_names(entry, f"data.{name}", ("train", "held_out"))
    made_of(DatasetSpec, entry)


def require_defence(name: str, entry: Mapping[str, Any]) -> None:
    """An entry of [defences], without the tables that are laid over the recipe's. Raises UsageError."""
    provided = dict(entry)
    if "encoder" in provided:
        _require_hidden_state_defence(f"defences.{name}", provided.pop("encoder"), provided)
    elif "sanitizer" in provided:
        created: dict[str, Any] = {"name": provided.pop("sanitizer"), **provided}
        if not isinstance(created.pop("words", ""), str):
            raise UsageError(f"defences.{name}: words is {kind_of(provided['words'])}", "it names a GloVe file")
        _require_known(f"defences.{name}", Method, created)
        require_types(Method, created)
        Method(**created)
    elif provided:
        bands = provided.pop("bands", 1.0)
        if isinstance(bands, bool) or not isinstance(bands, int | float):
            raise UsageError(f"defences.{name}: bands is {kind_of(bands)}", "give a number, the factor of the counts")
        _require_scheme(name, provided)


def _require_scheme(name: str, parameters: Mapping[str, Any]) -> None:
    provided = dict(parameters)
    selected = provided.pop("scheme", "obfuslm")
    kind = SCHEMES.get(selected.removesuffix("+")) if isinstance(selected, str) else None
    if kind is None:
        raise UsageError(f"{name}: there is no scheme {selected!r}", f"known: {', '.join(SCHEMES)}")
    for option, created in (("plus", Plus), ("bands", Bands)):
        if isinstance(table := provided.pop(option, None), dict):
            _require_known(f"{name}.{option}", created, table)
            require_types(created, table)
        elif table is not None:
            raise UsageError(f"{name}: {option} is {kind_of(table)}, a table is needed", "see the recipe")
    _require_known(name, kind, provided)
    require_types(kind, provided, OF_SCHEMES)
    scheme_of_recipe(parameters)


def _require_hidden_state_defence(name: str, method: Any, provided: Mapping[str, Any]) -> None:
    try:
        HIDDEN_STATE_DEFENCES.make(method, provided)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.hint) from None


def _require_known(name: str, kind: type, provided: Mapping[str, Any]) -> None:
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    if strange := [one for one in provided if one not in known]:
        raise UsageError(f"{name} has no {strange[0]}", f"it has: {', '.join(known)}")

"""The entries of a recipe, checked before anything is run: variants, defences, data, trainings.

What this module does not know: files. That data are there is found out when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from pydantic import ValidationError

from milkglass.encoders.catalogue import ENCODERS
from milkglass.errors import UsageError
from milkglass.experiments.settings import made_of
from milkglass.experiments.valuetypes import kind_of, require_types
from milkglass.sanitizers.methods import Method
from milkglass.schemes.bands import Bands
from milkglass.schemes.catalogue import SCHEMES, scheme_of_recipe
from milkglass.schemes.obfuslm_plus import Plus
from milkglass.server.spec import Hyperparameters

OF_SCHEMES = (("Plus", Plus), ("Bands", Bands))  # types that schemes name without importing them


@final
@dataclass(frozen=True)
class Data:
    """One data set of a comparison.

    Attributes:
        train: a file or a data set by name.
        held_out: likewise.
        rows: how many of train; None: all.
    """

    train: str
    held_out: str
    rows: int | None = None


def hyperparameters(given: Mapping[str, Any]) -> Hyperparameters:
    """Raises UsageError, naming the setting, its value's type and what is needed."""
    try:
        return Hyperparameters(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "settings"
        found = f" is {kind_of(given[name])}" if name in given else ""
        said = str(first["msg"]).lower()
        raise UsageError(f"training: {name}: {said}{found and f'; it{found}'}", "see the recipe") from None


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
    made_of(Data, entry)


def require_defence(name: str, entry: Mapping[str, Any]) -> None:
    """An entry of [defences], without the tables that are laid over the recipe's. Raises UsageError."""
    given = dict(entry)
    if "encoder" in given:
        _require_made(f"defences.{name}", ENCODERS, given.pop("encoder"), given)
    elif "sanitizer" in given:
        made: dict[str, Any] = {"name": given.pop("sanitizer"), **given}
        if not isinstance(made.pop("words", ""), str):
            raise UsageError(f"defences.{name}: words is {kind_of(given['words'])}", "it names a GloVe file")
        _require_known(f"defences.{name}", Method, made)
        require_types(Method, made)
        Method(**made)
    elif given:
        bands = given.pop("bands", 1.0)
        if isinstance(bands, bool) or not isinstance(bands, int | float):
            raise UsageError(f"defences.{name}: bands is {kind_of(bands)}", "give a number, the factor of the counts")
        _require_scheme(name, given)


def _require_scheme(name: str, parameters: Mapping[str, Any]) -> None:
    given = dict(parameters)
    chosen = given.pop("scheme", "obfuslm")
    kind = SCHEMES.get(chosen.removesuffix("+")) if isinstance(chosen, str) else None
    if kind is None:
        raise UsageError(f"{name}: there is no scheme {chosen!r}", f"known: {', '.join(SCHEMES)}")
    for option, made in (("plus", Plus), ("bands", Bands)):
        if isinstance(table := given.pop(option, None), dict):
            _require_known(f"{name}.{option}", made, table)
            require_types(made, table)
        elif table is not None:
            raise UsageError(f"{name}: {option} is {kind_of(table)}, a table is needed", "see the recipe")
    _require_known(name, kind, given)
    require_types(kind, given, OF_SCHEMES)
    scheme_of_recipe(parameters)


def _require_made(name: str, kinds: Mapping[str, Any], chosen: Any, given: Mapping[str, Any]) -> None:
    if not isinstance(chosen, str) or chosen not in kinds:
        raise UsageError(f"{name}: there is no encoder {chosen!r}", f"known: {', '.join(kinds)}")
    _require_known(name, kinds[chosen], given)
    require_types(kinds[chosen], given)
    kinds[chosen](**given)


def _require_known(name: str, kind: type, given: Mapping[str, Any]) -> None:
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    if strange := [one for one in given if one not in known]:
        raise UsageError(f"{name} has no {strange[0]}", f"it has: {', '.join(known)}")

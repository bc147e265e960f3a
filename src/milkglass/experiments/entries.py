"""Parses and checks the entries of a recipe before it runs: variants, defences, data, trainings, attacks.

Whether the data exist is checked when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, final

from pydantic import ValidationError

from milkglass.attacks.catalogue import ALL_ATTACKS
from milkglass.defences.catalogue import hidden_state_defence_of, installed_defence_of, sanitizer_of
from milkglass.errors import UsageError
from milkglass.experiments.recipe import from_entries, toml_type
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.server.spec import Hyperparameters
from milkglass.threat.attack import Attack


@final
@dataclass(frozen=True)
class DatasetSpec:
    """Describes one data set of a comparison, an entry of the recipe's table [data].

    Attributes:
        train: the training rows: a file or a named data set.
        held_out: the rows for evaluation: a file or a named data set.
        rows: how many rows of `train` are used. None: all.
        training: overrides the recipe's settings; a defence's own settings override these.
    """

    train: str
    held_out: str
    rows: int | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


def parse_hyperparameters(values: Mapping[str, Any]) -> Hyperparameters:
    """Parses the hyperparameters of a training.

    Raises:
        UsageError: a setting is refused. The message has its name, its value's type and what is needed.
    """
    try:
        training = Hyperparameters(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"])) or "settings"
        current = f" is {toml_type(values[name])}" if name in values else ""
        message = str(fault["msg"]).lower()
        raise UsageError(f"training: {name}: {message}{current and f'; it{current}'}", "see the recipe") from None
    for name, value in values.items():  # the type takes true for 1, and a recipe does not
        if type(value) is bool and type(getattr(training, name)) is not bool:
            raise UsageError(f"training: {name} is {toml_type(value)}, a number is needed", "see the recipe")
    return training


def require_entries(table: Mapping[str, Any], table_name: str, needed: tuple[str, ...]) -> None:
    """Raises UsageError if a table of the recipe, called `table_name`, lacks one of these entries."""
    if missing := [required for required in needed if required not in table]:
        raise UsageError(f"{table_name} has no {missing[0]}", f"it needs: {', '.join(needed)}")


def require_variants(variants: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UsageError for a variant whose scheme refuses its parameters.

    A variant without parameters is the unchanged model.
    """
    for name, parameters in variants.items():
        if parameters:
            with naming_entry(name):
                scheme_of_recipe(parameters)


def require_data_entry(name: str, entry: Mapping[str, Any]) -> None:
    """Raises UsageError for an entry of [data] that `DatasetSpec` does not have, lacks, or has with another type."""
    known_names = [dataset_field.name for dataset_field in fields(DatasetSpec)]
    if unknown := sorted(set(entry) - set(known_names)):
        raise UsageError(f"data.{name} has no {unknown[0]}", f"it has: {', '.join(known_names)}")
    require_entries(entry, f"data.{name}", ("train", "held_out"))
    from_entries(DatasetSpec, entry)


def require_defence_entry(name: str, entry: Mapping[str, Any]) -> None:
    """Raises UsageError for an entry of [defences] that is refused.

    Args:
        name: the defence's name.
        entry: the entry without its tables `training` and `attacked`.
    """
    values = dict(entry)
    if "encoder" in values:
        with naming_entry(f"defences.{name}"):
            hidden_state_defence_of(values.pop("encoder"), values)
    elif "defence" in values:
        with naming_entry(f"defences.{name}"):
            installed_defence_of(values.pop("defence"), values)
    elif "sanitizer" in values:
        if not isinstance(words := values.pop("words", ""), str):
            raise UsageError(f"defences.{name}: words is {toml_type(words)}", "it names a GloVe file")
        with naming_entry(f"defences.{name}"):
            sanitizer_of(values.pop("sanitizer"), values, Path(words) if words else None)
    elif values:
        bands = values.pop("bands", 1.0)
        if isinstance(bands, bool) or not isinstance(bands, int | float):
            raise UsageError(f"defences.{name}: bands is {toml_type(bands)}", "give a number, the factor of the counts")
        with naming_entry(name):
            scheme_of_recipe(values)


@contextmanager
def naming_entry(name: str) -> Iterator[None]:
    """Puts the name of an entry before the message of a UsageError that is raised inside the context."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.hint) from None


# The attacks of a recipe: names of the catalogue, or the recipe's own names for attacks with other parameters.
#
#     attacks = ["knn+", "tfa"]                                       with the catalogue's parameters
#
#     [attacks]                                                       one more than once, under names
#     "knn+" = {}
#     "sda, K_A=3" = { attack = "sda", candidates = 3 }
#
# Figures, and the random draws of an attack, go by the recipe's name.
AttackEntries = list[str] | dict[str, dict[str, Any]]  # as the recipe has them


def attacks_of(entries: AttackEntries) -> dict[str, Attack]:
    """Returns the attacks by the recipe's names, in its order.

    Raises:
        UsageError: a name is listed twice, is unknown or cannot be a name, or an attack refuses a parameter.
    """
    if isinstance(entries, list) and (repeated_names := [name for name in entries if entries.count(name) > 1]):
        raise UsageError(f"{repeated_names[0]} is listed twice", "give each a name of its own in a table [attacks]")
    table = entries if isinstance(entries, dict) else {name: {} for name in entries}
    return {name: _attack(name, parameters) for name, parameters in table.items()}


def _attack(name: str, parameters: Mapping[str, Any]) -> Attack:
    """Returns an attack of a recipe. Raises what `attacks_of` raises."""
    base = str(parameters.get("attack", name))
    attack = ALL_ATTACKS.make(base, {key: value for key, value in parameters.items() if key != "attack"})
    if name in ALL_ATTACKS and (name != base or attack != ALL_ATTACKS[base]):
        raise UsageError(f"{name!r} is the name of an attack with its own parameters", "give this one another name")
    if not name or "/" in name:
        raise UsageError(f"{name!r} cannot be a name", "give a name without /: results are stored in files under it")
    return attack

"""Catalogues find methods by name: schemes, sanitizers, defences, attacks, engines and model families.

An entry is an instance of a frozen dataclass. Its fields are its parameters (parameters.py), with the paper's values as
defaults; `make` returns a copy with other values. A method of this package is one file and one line in its catalogue.
An installed package adds one by an entry point of the catalogue's group, which names an instance or its class:

    [project.entry-points."milkglass.attack"]
    logit-lens = "my_package.logit_lens:LogitLens"

Commands, recipes, audits and the conformance checks find both kinds alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from milkglass.errors import PluginError, UsageError, did_you_mean
from milkglass.parameters import with_values

NONE = "none"  # the name that is never suggested: a typing error must not switch a defence off
FIRST_CLASS_NAMES = {  # of renamed classes: the first name by the present name
    "ClusterConditional": "Conditional",
    "CommonestClassWay": "CommonestClass",
    "GrowthSchedule": "Growth",
    "NoDefence": "Bare",
    "RecordSizes": "Sizes",
}


class HasName(Protocol):
    """Describes an entry: a frozen dataclass with the name by which a catalogue finds it."""

    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=HasName)


class Catalogue(Mapping[str, Entry], Generic[Entry]):
    """Finds instances by name: built-in ones in their order, then those of installed packages by package and name.

    Entry points are loaded when the catalogue is first read, not when it is imported.

    Attributes:
        what: what an instance is, in words for messages: "scheme", "attack".
        group: the group of entry points, such as "milkglass.attack"; empty where no package can add an entry.
        kind: an entry must be an instance of this class. Several catalogues can read one group: each takes the
            instances of its kind.

    Raises:
        ValueError: two built-in instances have one name.
    """

    def __init__(self, what: str, *entries: Entry, group: str = "", kind: type[Any] = object) -> None:
        self.what, self.group, self.kind = what, group, kind
        self.built_in = {entry.name: entry for entry in entries}
        if len(self.built_in) != len(entries):
            raise ValueError(f"two instances of the catalogue of {what}s have one name")

    @cached_property
    def _entries(self) -> Mapping[str, Entry]:
        """Returns all entries by name. Raises PluginError if an installed one cannot be used."""
        entries = dict(self.built_in)
        points = entry_points(group=self.group)
        for point in sorted(points, key=lambda point: (point.dist.name if point.dist else "", point)):
            entry: Entry = load_entry(point)
            if not issubclass(type(entry), self.kind):
                continue
            if entry.name in entries:
                raise PluginError(
                    f"{package_of(point)} brings a second {self.what} named {entry.name}", "uninstall one of the two"
                )
            entries[entry.name] = entry
        return entries

    @property
    def package_entries(self) -> Mapping[str, Entry]:
        """Returns the entries of installed packages. Raises PluginError if one cannot be used."""
        return {name: entry for name, entry in self._entries.items() if name not in self.built_in}

    def __getitem__(self, name: str) -> Entry:
        """Returns the entry of that name. Raises UsageError, which lists all names, if there is none."""
        if name not in self:
            named_entries = [entry for entry in self._entries if entry != NONE]
            hint = did_you_mean(str(name), named_entries) + f"one of {', '.join(self._entries)}"
            if self.group:
                hint += f"; others come with packages that have an entry point of the group {self.group}"
            raise UsageError(f"there is no {self.what} {name!r}", hint)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def make(self, name: str, parameters: Mapping[str, Any]) -> Entry:
        """Returns the entry of that name with these values in place of its own.

        Raises:
            UsageError: the name is unknown, or the method lacks a parameter or refuses its value.
        """
        method: Entry = with_values(self[name], parameters, name)
        return method


class JoinedCatalogues(Catalogue[Entry]):
    """Joins several catalogues in their order. A name must be unique among all of them.

    Attributes:
        parts: the catalogues that are joined.
    """

    def __init__(self, what: str, *parts: Catalogue[Entry]) -> None:
        super().__init__(what)
        self.parts = parts

    @cached_property
    def _entries(self) -> Mapping[str, Entry]:
        """Returns the entries of all parts. Raises PluginError if two have one name."""
        entries: dict[str, Entry] = {}
        for catalogue in self.parts:
            if shared_names := sorted(entries.keys() & catalogue.keys()):
                raise PluginError(
                    f"two {self.what}s are named {shared_names[0]}", "uninstall the package that brings one"
                )
            entries |= catalogue
        return entries


def load_entry(point: EntryPoint) -> Any:
    """Returns the instance that an entry point names, or an instance of the class that it names.

    Raises:
        PluginError: it cannot be imported, is abstract, needs parameters, or has another name than its entry point.
    """
    try:
        entry = point.load()
        entry = entry() if isinstance(entry, type) else entry
    except Exception as error:
        raise PluginError(
            f"{package_of(point)} has an entry point {point.name} = {point.value} in {point.group} that cannot be "
            f"loaded ({type(error).__name__}: {error})",
            f"update or uninstall {package_of(point)}",
        ) from error
    if getattr(entry, "name", None) != point.name:
        raise PluginError(
            f"{package_of(point)} has an entry point {point.name} in {point.group}, and the name of {point.value} is "
            f"{getattr(entry, 'name', None)!r}",
            "both names must be equal",
        )
    return entry


def package_of(point: EntryPoint) -> str:
    """Returns the name of the installed package that has this entry point."""
    return point.dist.name if point.dist else point.value


def signature(method: object) -> str:
    """Returns the `repr` of a frozen dataclass such as an attack, by which digests and stopped runs recognise it.

    A renamed class keeps its first name here, so that folders of earlier versions are recognised.
    """
    return re.sub(r"\w+(?=\()", lambda name: FIRST_CLASS_NAMES.get(name[0], name[0]), repr(method))

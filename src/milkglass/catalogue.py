"""Methods by name: every scheme, sanitizer, defence, attack, engine and model family is an instance in a catalogue.

An instance is a frozen dataclass whose fields are its parameters (parameters.py), with the paper's values as defaults.
`make` returns one with other values. Adding a method here is one file and one line in its catalogue. An installed
package adds one by an entry point of the catalogue's group, which names an instance or its class:

    [project.entry-points."milkglass.attack"]
    logit-lens = "my_package.logit_lens:LogitLens"

Commands, recipes, audits and the conformance checks find both alike. `signature` writes an instance into digests, by
which a stopped run is recognised.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from milkglass.errors import PluginError, UsageError
from milkglass.parameters import with_values

NONE = "none"  # is never suggested: a slip of the pen must not switch a defence off
FIRST_NAMES = {  # of classes that were renamed since the first digests were made, by their names of today
    "ClusterConditional": "Conditional",
    "GrowthSchedule": "Growth",
    "NoDefence": "Bare",
}


class HasName(Protocol):
    """A frozen dataclass with a name."""

    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=HasName)


class Catalogue(Mapping[str, E], Generic[E]):
    """Instances by name: the built-in ones in their order, then those of installed packages by package and name.

    Entry points are loaded when the catalogue is first read, not when it is imported.

    Attributes:
        what: what an instance is, in words for messages: "scheme", "attack".
        group: the group of entry points, such as "milkglass.attack"; empty where no package can add an entry.
        kind: the class of which an entry must be an instance. Several catalogues can read one group: each takes the
            instances of its kind.
    """

    def __init__(self, what: str, *entries: E, group: str = "", kind: type[Any] = object) -> None:
        self.what, self.group, self.kind = what, group, kind
        self.built_in = {entry.name: entry for entry in entries}
        if len(self.built_in) != len(entries):
            raise ValueError(f"two instances of the catalogue of {what}s have one name")

    @cached_property
    def _entries(self) -> Mapping[str, E]:
        """Raises PluginError."""
        entries = dict(self.built_in)
        for point in sorted(entry_points(group=self.group), key=lambda one: (one.dist.name if one.dist else "", one)):
            entry: E = loaded(point)
            if not issubclass(type(entry), self.kind):
                continue
            if entry.name in entries:
                raise PluginError(
                    f"{package_of(point)} brings a second {self.what} named {entry.name}", "uninstall one of the two"
                )
            entries[entry.name] = entry
        return entries

    @property
    def added(self) -> Mapping[str, E]:
        """The entries of installed packages. Raises PluginError."""
        return {name: entry for name, entry in self._entries.items() if name not in self.built_in}

    def __getitem__(self, name: str) -> E:
        """Raises UsageError, with the names that there are, for another name."""
        if name not in self:
            near = difflib.get_close_matches(str(name), [one for one in self._entries if one != NONE], n=1)
            hint = "".join(f"did you mean {one}? " for one in near) + f"one of {', '.join(self._entries)}"
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

    def make(self, name: str, parameters: Mapping[str, Any]) -> E:
        """The instance of that name with these parameters in place of its own.

        Raises:
            UsageError: an unknown name, a parameter that the method does not have, or a value that it refuses.
        """
        result: E = with_values(self[name], parameters, name)
        return result


class JoinedCatalogues(Catalogue[E]):
    """Several catalogues as one, in their order. No two of them may have an entry of one name."""

    def __init__(self, what: str, *parts: Catalogue[E]) -> None:
        super().__init__(what)
        self.parts = parts

    @cached_property
    def _entries(self) -> Mapping[str, E]:
        """Raises PluginError."""
        entries: dict[str, E] = {}
        for part in self.parts:
            if twice := sorted(entries.keys() & part.keys()):
                raise PluginError(f"two {self.what}s are named {twice[0]}", "uninstall the package that brings one")
            entries |= part
        return entries


def loaded(point: EntryPoint) -> Any:
    """The instance that an entry point names, or an instance of the class that it names.

    Raises:
        PluginError: it cannot be imported, is abstract or needs parameters, or has another name than its entry point.
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
    """The installed package that has this entry point."""
    return point.dist.name if point.dist else point.value


def signature(method: object) -> str:
    """How a method with its parameters is written into digests, by which a stopped run is recognised: its `repr`. A
    class that was renamed keeps its first name there, so that folders of earlier versions are still known.

    method: an instance of a frozen dataclass, such as an attack or a defence of gradients; so may its fields be.
    """
    return re.sub(r"\w+(?=\()", lambda name: FIRST_NAMES.get(name[0], name[0]), repr(method))

"""Things by name: every scheme, sanitizer, defence and attack is an instance in a catalogue.

An instance is a frozen dataclass whose fields are its parameters (parameters.py), with the paper's values as defaults.
`make` returns one with other values. Adding a method is one file and one line in its catalogue; commands, recipes and
the conformance tests find it there. `signature` writes an instance into digests, by which a stopped run is recognised.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from milkglass.errors import UsageError
from milkglass.parameters import with_values

NONE = "none"  # is never suggested: a slip of the pen must not switch a defence off
FIRST_NAMES = {  # of classes that were renamed since the first digests were made, by their names of today
    "BagOfWords": "HiddenWords",
    "ClusterConditional": "Conditional",
    "GrowthSchedule": "Growth",
    "NearestState": "NearHidden",
    "NoDefence": "Bare",
    "StateInversion": "InvertHidden",
}


class HasName(Protocol):
    """A frozen dataclass with a name."""

    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=HasName)


class Catalogue(Mapping[str, E], Generic[E]):
    """Instances by name, in the order in which they were given.

    Attributes:
        what: what an instance is, in words for messages: "scheme", "attack".
    """

    def __init__(self, what: str, *entries: E) -> None:
        self.what = what
        self._entries = {entry.name: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise ValueError(f"two instances of the catalogue of {what}s have one name")

    def __getitem__(self, name: str) -> E:
        """Raises UsageError, with the names that there are, for another name."""
        if name not in self:
            near = difflib.get_close_matches(str(name), [one for one in self._entries if one != NONE], n=1)
            hint = "".join(f"did you mean {one}? " for one in near) + f"one of {', '.join(self._entries)}"
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


def signature(method: object) -> str:
    """How a method with its parameters is written into digests, by which a stopped run is recognised: its `repr`. A
    class that was renamed keeps its first name there, so that folders of earlier versions are still known.

    method: an instance of a frozen dataclass, such as an attack or a defence of gradients; so may its fields be.
    """
    return re.sub(r"\w+(?=\()", lambda name: FIRST_NAMES.get(name[0], name[0]), repr(method))

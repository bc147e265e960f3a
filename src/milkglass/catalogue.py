"""Things by name: every scheme, sanitizer, defence and attack is an instance in a catalogue.

An instance is a frozen dataclass whose fields are its parameters, with the paper's values as defaults. `make` returns
one with other values. Adding a method is one file and one line in its catalogue; commands, recipes and the conformance
tests find it there.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from milkglass.errors import MilkglassError, UsageError


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
        if name not in self._entries:
            raise UsageError(f"there is no {self.what} {name!r}", self._suggestion(name, self._entries, "one of"))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def make(self, name: str, parameters: Mapping[str, Any]) -> E:
        """The instance of that name with these parameters in place of its own.

        Args:
            name: in the catalogue.
            parameters: by field. A value that is not of the field's kind is refused.

        Raises:
            UsageError: an unknown name, a field that the method does not have, or a value that it refuses.
        """
        entry: Any = self[name]
        fields = {field.name for field in dataclasses.fields(entry) if field.init}
        for parameter, value in parameters.items():
            if parameter not in fields:
                hint = self._suggestion(parameter, fields, "its parameters are") if fields else "it has no parameters"
                raise UsageError(f"{name} has no parameter {parameter!r}", hint)
            self._require_kind(name, parameter, getattr(entry, parameter), value)
        try:
            result: E = dataclasses.replace(entry, **parameters)
        except MilkglassError:
            raise
        except (TypeError, ValueError) as error:
            given = ", ".join(f"{parameter} = {value!r}" for parameter, value in parameters.items())
            raise UsageError(f"{name} refuses {given}: {error}", "give other values") from error
        return result

    @staticmethod
    def _require_kind(name: str, parameter: str, default: Any, value: Any) -> None:
        """A number where there is a number, text where there is text. A default of None or of another kind allows
        anything: the method checks it."""
        numbers = isinstance(default, int | float) and not isinstance(default, bool)
        right = (
            isinstance(value, bool)
            if isinstance(default, bool)
            else isinstance(value, int | float) and not isinstance(value, bool)
            if numbers
            else isinstance(value, str)
            if isinstance(default, str)
            else True
        )
        whole = isinstance(default, int) and isinstance(value, float) and not value.is_integer()
        if value is not None and (not right or whole):
            kind = "true or false" if isinstance(default, bool) else "a number" if numbers else "a word"
            kind = "a whole number" if isinstance(default, int) and not isinstance(default, bool) else kind
            raise UsageError(f"{name}: {parameter} is {value!r}, which is not {kind}", f"its default is {default!r}")

    @staticmethod
    def _suggestion(name: str, names: Any, words: str) -> str:
        near = difflib.get_close_matches(name, sorted(names), n=1)
        return f"did you mean {near[0]}?" if near else f"{words} {', '.join(sorted(names))}"

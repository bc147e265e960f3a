"""Declares, checks and reads the parameters of a method: the fields of a frozen dataclass.

    epsilon: float = limited_field(8.0, above=0)        a number in a range
    where: Literal["local", "central"] = "local"        a choice
    plus: DimensionMixing | None = None                 parameters of its own, `plus.k` on the command line

Values arrive as words (`--set epsilon=8`), or from Python, TOML or JSON. The declared types decide what is accepted. A
method checks limits that concern more than one value in its own `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, final, get_args, get_origin, get_type_hints

from milkglass.errors import UsageError

LIMIT, HINT = "limit", "hint"  # keys of a field's metadata
NOUNS: Mapping[Any, str] = {
    int: "a whole number", float: "a finite number", bool: "true or false", str: "a word", type(None): "none",
}  # fmt: skip


@final
@dataclass(frozen=True)
class Limit:
    """Limits a number to a range.

    Attributes:
        low: the lower end.
        excludes_low: whether a value must be above `low`; otherwise `low` itself is allowed.
        high: the upper end, which is allowed.
        below: a second upper end, which is not allowed.
    """

    low: float
    excludes_low: bool = False
    high: float = math.inf
    below: float = math.inf

    def holds(self, value: float) -> bool:
        """Returns whether the value is in the range. A value that is not finite never is."""
        is_above_low = value > self.low if self.excludes_low else value >= self.low  # nan is in no range
        return is_above_low and value <= min(self.high, sys.float_info.max) and value < self.below

    def require(self, value: float, name: str, hint: str) -> None:
        """Raises UsageError if the value is outside the range. `name` is the value's name for users, `hint` advice."""
        if not self.holds(value):
            raise UsageError(f"{name} is {value}, a finite number {self} is needed", hint)

    def __str__(self) -> str:
        if math.isfinite(self.high):
            return (
                f"above {self.low:g}, up to {self.high:g}"
                if self.excludes_low
                else f"from {self.low:g} to {self.high:g}"
            )
        low = f"above {self.low:g}" if self.excludes_low else f"of {self.low:g} or more"
        return low + (f" and below {self.below:g}" if math.isfinite(self.below) else "")


UNLIMITED = Limit(-sys.float_info.max)


def limited_field(
    default: Any,
    *,
    least: float = 0,
    above: float | None = None,
    most: float = math.inf,
    below: float = math.inf,
    hint: str = "",
) -> Any:
    """Returns a dataclass field of a number in a range.

    Args:
        default: the field's default.
        least: the smallest value that is allowed, unless `above` is set.
        above: a value must be above this one. None: `least` decides.
        most: the largest value that is allowed.
        below: a value must be below this one.
        hint: what a refusal advises. "": it names the default.
    """
    limit = Limit(least if above is None else above, above is not None, most, below)
    return dataclasses.field(default=default, metadata={LIMIT: limit, HINT: hint})


@final
@dataclass(frozen=True)
class Parameter:
    """Describes a parameter of a method, and reads its values.

    Attributes:
        name: the field's name.
        kind: the declared type of the field.
        default: `dataclasses.MISSING` if there is none.
        limit: the range of a number. None: any finite number.
        hint: what a refusal advises. "": it names the default.
    """

    name: str
    kind: Any
    default: Any
    limit: Limit | None
    hint: str

    @property
    def accepted_words(self) -> str:
        """Returns, in words, what is accepted, such as "a whole number of 1 or more, or none"."""
        return ", or ".join(self._noun(alternative) for alternative in _alternatives(self.kind))

    @property
    def nested_class(self) -> Any | None:
        """Returns the dataclass that a table of parameters is read into, or None if the parameter is a plain value."""
        return next((kind for kind in _alternatives(self.kind) if dataclasses.is_dataclass(kind)), None)

    def read(self, word: str) -> Any:
        """Returns a word's value, by the first of the field's types that accepts it. Raises UsageError if none does."""
        for kind in _alternatives(self.kind):
            value = _value_of(word, kind)
            if value is not None and self._accepts(value, kind):
                return value
        if word.lower() == "none" and type(None) in _alternatives(self.kind):
            return None
        raise self._refusal(f"{self.name}={word}:")

    def convert(self, value: Any, current: Any = None, method: str = "") -> Any:
        """Returns a value as the field stores it: a list as a tuple, a table as its dataclass.

        Args:
            value: from Python, TOML or JSON. No string is read as a number, and true is not 1.
            current: the present value of the field. If it is an instance of `nested_class`, a table changes some of its
                values.
            method: the method's name, for messages.

        Raises:
            UsageError: the value is not of the field's type, or out of its range.
        """
        if self.nested_class is not None and isinstance(value, Mapping):
            target = current if isinstance(current, self.nested_class) else self.nested_class
            return with_values(target, value, f"{method}.{self.name}" if method else self.name)
        for kind in _alternatives(self.kind):
            if self._accepts(value, kind):
                origin = get_origin(kind)
                return origin(value) if origin in (tuple, frozenset) else value
        place = f"{method}: {self.name}" if method else self.name
        raise self._refusal(f"{place} is {repr(value) if isinstance(value, str) else _value_in_words(value)},")

    def _accepts(self, value: Any, kind: Any) -> bool:
        """Returns whether a value is of a kind, and within the limits."""
        origin = get_origin(kind)
        if kind in (int, float):
            is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
            return is_number and (self.limit or UNLIMITED).holds(value)
        if origin is Literal:
            return isinstance(value, str) and value in get_args(kind)
        if origin in (tuple, frozenset):
            element_kind, is_list = get_args(kind)[0], isinstance(value, list | tuple | frozenset)
            return is_list and all(self._accepts(element, element_kind) for element in value)
        return not isinstance(kind, type) or isinstance(value, kind)

    def _noun(self, kind: Any) -> str:
        """Returns a kind in words, with its limits."""
        if get_origin(kind) is Literal:
            return f"one of {', '.join(get_args(kind))}"
        if get_origin(kind) in (tuple, frozenset):
            element_kind = get_args(kind)[0]
            return f"a list of {'numbers' if element_kind in (int, float) else 'words'}"
        noun = NOUNS.get(kind, "a table" if dataclasses.is_dataclass(kind) else "a value")
        return f"{noun} {self.limit}" if self.limit is not None and kind in (int, float) else noun

    def _refusal(self, start: str) -> UsageError:
        """Returns the error for a value that is not accepted, whose message begins with `start`."""
        default = "" if self.default is MISSING else f"{_value_in_words(self.default)} is the default"
        return UsageError(f"{start} {self.accepted_words} is needed", self.hint or default)


@cache
def parameters_of(kind: Any) -> dict[str, Parameter]:
    """Returns the parameters of a dataclass by name, in its order."""
    hints = get_type_hints(kind)
    return {
        field.name: Parameter(
            field.name,
            hints[field.name],
            field.default_factory() if field.default_factory is not MISSING else field.default,
            field.metadata.get(LIMIT),
            field.metadata.get(HINT, ""),
        )
        for field in dataclasses.fields(kind)
        if field.init
    }


def require(method: Any) -> None:
    """Checks all fields of a method, for `__post_init__`. Raises UsageError for the first wrong type or value."""
    for name, parameter in parameters_of(method.__class__).items():
        parameter.convert(getattr(method, name))


def with_values(method: Any, values: Mapping[str, Any], name: str) -> Any:
    """Returns a method with other values of some parameters.

    Args:
        method: an instance, whose other fields stay, or a dataclass.
        values: the values by parameter, as `Parameter.convert` takes them.
        name: the method's name, for messages.

    Raises:
        UsageError: a parameter is unknown or missing, or its value is refused.
    """
    kind = method if isinstance(method, type) else type(method)
    parameters = parameters_of(kind)
    if unknown := [key for key in values if key not in parameters]:
        raise _unknown_parameter(unknown[0], name, ", ".join(parameters))
    converted = {key: parameters[key].convert(value, getattr(method, key, None), name) for key, value in values.items()}
    if method is not kind:
        return dataclasses.replace(method, **converted)
    needed = [parameter.name for parameter in parameters.values() if parameter.default is MISSING]
    if missing := [key for key in needed if key not in values]:
        raise UsageError(f"{name} has no {missing[0]}", f"it needs {', '.join(needed)}")
    return kind(**converted)


def read_words(kind: type, words: Sequence[str], method: str, without: Sequence[str] = ()) -> dict[str, Any]:
    """Returns values by parameter from words such as "epsilon=8" or "plus.k=10", for `with_values`.

    Args:
        kind: the dataclass of the method.
        words: the words, each `name=value`.
        method: the method's name, for messages.
        without: parameters that are set in another way, and refused here.

    Raises:
        UsageError: a word sets nothing, sets a parameter twice, names an unknown parameter, or has a value that is not
            accepted.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} sets nothing", "write name=value")
        outer, dot, inner = name.partition(".")
        if outer not in parameters_of(kind) or outer in without:
            raise _unknown_parameter(outer, method, describe_parameters(kind, without))
        parameter, earlier = parameters_of(kind)[outer], values.get(outer, {})
        if outer in values and not (dot and isinstance(earlier, dict) and inner not in earlier):
            raise UsageError(f"{name} is set twice", "set it once")
        if dot and parameter.nested_class is not None:
            inner_values = read_words(parameter.nested_class, [f"{inner}={value}"], f"{method}.{outer}")
            values[outer] = {**earlier, **inner_values}
        else:
            values[outer] = parameter.read(value)
    return values


def describe_parameters(kind: type, without: Sequence[str] = ()) -> str:
    """Returns all parameters in words, such as "epsilon (a finite number above 0; 8.0), k (a whole number; 10)"."""
    return ", ".join(
        _parameter_in_words(parameter) for name, parameter in parameters_of(kind).items() if name not in without
    )


# --- inside -----------------------------------------------------------------------------------------------------------
def _unknown_parameter(name: str, method: str, listed: str) -> UsageError:
    """Returns the error for a parameter that the method lacks. `listed` are the parameters that it has, in words."""
    return UsageError(f"{method} has no parameter {name!r}", f"it has {listed}" if listed else "it has none")


def _parameter_in_words(parameter: Parameter) -> str:
    """Returns a parameter in words, with its default."""
    if parameter.nested_class is not None:
        return f"{parameter.name}.({describe_parameters(parameter.nested_class)})"
    default = "" if parameter.default is MISSING else f"; {_value_in_words(parameter.default)}"
    return f"{parameter.name} ({parameter.accepted_words}{default})"


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Returns the types that a union joins, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _value_of(word: str, kind: Any) -> Any:
    """Returns the value that a word has as this type, or None if it has none.

    Of a list, "+" separates the elements. An element without a value becomes None.
    """
    if kind is bool:
        return {"true": True, "false": False}.get(word.lower())
    if get_origin(kind) in (tuple, frozenset):
        return [_value_of(part, get_args(kind)[0]) for part in word.split("+")]
    if kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            return None
    return word if kind is str or get_origin(kind) is Literal else None


def _value_in_words(value: Any) -> str:
    """Returns a value in words."""
    return "none" if value is None else "a table" if isinstance(value, Mapping) else str(value)

"""A method's parameters from words, `epsilon=8`, typed by its dataclass, and from JSON again.

What this module does not know: any method. A method's own `__post_init__` says which values it takes.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.hidden_states.catalogue import ENCODERS
from milkglass.hidden_states.defence import EncoderDefence
from milkglass.hidden_states.limits import Limit, limits_of
from milkglass.hidden_states.training import HalvesTraining

TRAINING = "training"  # a field of every method, with options of its own


def chosen(method: str, words: Sequence[str], training: Mapping[str, Any]) -> EncoderDefence:
    """The method with `words` such as "epsilon=8"; training: fields of `HalvesTraining` in place of the method's own.
    Raises UsageError."""
    kind = kind_of(method)
    provided = {}
    for word in words:
        name, there, value = word.partition("=")
        if not there:
            raise UsageError(f"{word!r} sets nothing", "write --set name=value")
        if name in provided:
            raise UsageError(f"{name} is set twice", "set it once")
        if name not in types_of(kind):
            raise UsageError(f"{method} has no parameter {name!r}", f"it has {listed(kind)}")
        provided[name] = _typed(name, value, kind)
    return kind(**provided, training=dataclasses.replace(kind().training, **training))


def kind_of(method: str) -> type[EncoderDefence]:
    if method not in ENCODERS:
        raise UsageError(f"there is no method {method!r}", f"known: {', '.join(ENCODERS)}")
    return ENCODERS[method]


def types_of(kind: type[EncoderDefence]) -> dict[str, Any]:
    """The type of each parameter, but for those of the training."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.name != TRAINING}


def listed(kind: type[EncoderDefence]) -> str:
    """ "epsilon (a finite number above 0; 8.0), where (one of local, central; local), ..."."""
    plain, limits = told(kind()), limits_of(kind)
    return ", ".join(
        f"{name} ({_noun(one, limits.get(name))}; {_shown(plain[name])})" for name, one in types_of(kind).items()
    )


def told(defence: EncoderDefence) -> dict[str, Any]:
    """Its parameters as JSON can hold them, but for those of the training."""
    return {name: getattr(defence, name) for name in types_of(type(defence))}


def rebuilt(method: str, parameters: Mapping[str, Any], training: Mapping[str, Any] | None = None) -> EncoderDefence:
    """What `told`, and for a client half the training's fields, were of. Raises CorruptCheckpoint."""
    more: dict[str, Any] = {}
    try:
        if training is not None:
            more[TRAINING] = HalvesTraining(**training)
        return ENCODERS[method](**parameters, **more)
    except (KeyError, TypeError, UsageError) as error:
        raise CorruptCheckpoint(
            "a half's parameters are none of any method that is known here", "was it made by a newer milkglass?"
        ) from error


# --- one value --------------------------------------------------------------------------------------------------------
def _typed(name: str, value: str, method: type[EncoderDefence]) -> Any:
    kind, limit = types_of(method)[name], limits_of(method).get(name)
    choices = _choices(kind)
    if value.lower() == "none" and type(None) in choices:
        return None
    for one in choices:
        try:
            result: Any = _READERS[one](value) if one in _READERS else _literal(value, one)
        except ValueError:
            continue
        if limit is None or limit.holds(result):
            return result
    raise UsageError(
        f"--set {name}={value}: {_noun(kind, limit)} is needed", f"{_shown(told(method())[name])} is the default"
    )


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _literal(value: str, kind: Any) -> str:
    if get_origin(kind) is not Literal or value not in get_args(kind):
        raise ValueError
    return value


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError
    return value.lower() == "true"


_READERS: Mapping[Any, Any] = {int: int, float: float, bool: _flag, str: str}
_NOUNS: Mapping[Any, str] = {
    int: "a whole number", float: "a finite number", bool: "true or false", str: "a word", type(None): "none",
}  # fmt: skip


def _noun(kind: Any, limit: Limit | None) -> str:
    return ", or ".join(_one_noun(one, limit) for one in _choices(kind))


def _one_noun(kind: Any, limit: Limit | None) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return str(limit) if limit is not None and kind in (int, float) else _NOUNS.get(kind, "a value")


def _shown(value: object) -> str:
    return "none" if value is None else str(value)

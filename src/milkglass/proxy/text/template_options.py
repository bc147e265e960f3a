"""Options of a request for the chat template: how much the model thinks, and options by name.

Applications have several fields for them. Each becomes a variable that the template reads, or is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milkglass.errors import UsageError

SWITCHES = ("enable_thinking", "thinking")  # variables by which templates switch thinking on and off
EFFORT = "reasoning_effort"
OWN = frozenset({"messages", "tools", "add_generation_prompt", "documents"})  # set by the proxy, or never
WORD = re.compile(r"[\w .:+-]{1,64}")  # no special token of a tokenizer is spelled so


def template_options(asked: Mapping[str, Any], known: frozenset[str], reasons: bool) -> dict[str, Any]:
    """Returns variables of the template for the request's fields. It reads `known`, and may mark reasoning.

    Raises UsageError, which names a field, if the template has no variable for it.
    """
    found = _Found(known - OWN, reasons)
    for name, value in asked.items():
        READERS[name](found, name, value)
    return found.options


@dataclass
class _Found:
    known: frozenset[str]
    reasons: bool
    options: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, value: Any, asked: str) -> None:
        if self.options.setdefault(name, value) != value:
            raise UsageError(f"the request asks for two values of {name}", "give one", param=asked)

    def thinks(self, asked: str, value: Any) -> None:
        """Reads a switch of thinking."""
        if not isinstance(value, bool):
            raise UsageError(f"`{asked}` is neither true nor false", "give one of them", param=asked)
        switch = next((one for one in SWITCHES if one in self.known), None)
        if switch is not None:
            self.set(switch, value, asked)
        elif value != self.reasons:  # else the model does so anyway
            what = "thinks always" if self.reasons else "has no marks of thinking"
            raise _refused(asked, f"by its chat template the model {what}")

    def effort(self, asked: str, value: Any) -> None:
        """Reads an effort of thinking."""
        if not isinstance(value, str) or not WORD.fullmatch(value):
            raise UsageError(f"`{asked}` is not a word", "give one such as low", param=asked)
        if EFFORT in self.known:
            self.set(EFFORT, value, asked)
        elif value == "none":
            self.thinks(asked, False)
        else:
            raise _refused(asked, "the model's chat template does not read an effort")

    def variables(self, asked: str, value: Any) -> None:
        """Reads variables of the template by name."""
        for name, one in _fields(asked, value).items():
            if name not in self.known:
                has = ", ".join(sorted(self.known)) or "none"
                shown = name if name.isidentifier() and len(name) <= 60 else "a field"
                why = f"the model's chat template does not read it; options that it reads: {has}"
                raise _refused(f"{asked}.{shown}", why)
            if not isinstance(one, bool | int | float) and not (isinstance(one, str) and WORD.fullmatch(one)):
                raise _refused(f"{asked}.{name}", "an option is true, false, a number or a word")
            self.set(name, one, asked)

    def typed(self, asked: str, value: Any) -> None:
        """Reads `{"type": "enabled"}` or `{"type": "disabled"}`."""
        given = _fields(asked, value)
        kind = given.pop("type", None)
        if kind not in ("enabled", "disabled") or given:
            raise _refused(asked, 'give {"type": "enabled"} or {"type": "disabled"} alone')
        self.thinks(asked, kind == "enabled")

    def reasoning(self, asked: str, value: Any) -> None:
        """Reads `{"enabled": false}` and `{"effort": "low"}`, as several services have them."""
        for name, one in _fields(asked, value).items():
            path = f"{asked}.{name}"
            if name == "enabled":
                self.thinks(path, one)
            elif name == "effort":
                self.effort(path, one)
            elif not (name == "exclude" and one is False) and not (name == "summary" and one == "auto"):
                shown = path if name.isidentifier() and len(name) <= 60 else asked
                raise _refused(shown, "the model's chat template alone decides how it reasons; give enabled or effort")


READERS = {
    "enable_thinking": _Found.thinks,
    "thinking": _Found.typed,
    "reasoning": _Found.reasoning,
    "reasoning_effort": _Found.effort,
    "chat_template_kwargs": _Found.variables,
}


def _fields(asked: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"`{asked}` is not an object", "give its fields by name", param=asked)
    return {name: one for name, one in value.items() if one is not None}


def _refused(asked: str, why: str) -> UsageError:
    return UsageError(f"`{asked}` is not offered: {why}", param=asked)

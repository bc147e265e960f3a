"""Translates a request's options for the chat template: how much the model thinks, and options by name.

Applications have several fields for these options. Each becomes a variable that the template reads, or is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milkglass.errors import UsageError

SWITCH_VARIABLES = ("enable_thinking", "thinking")  # variables by which templates switch thinking on and off
EFFORT_VARIABLE = "reasoning_effort"
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "documents"})  # no request sets these
WORD_PATTERN = re.compile(r"[\w .:+-]{1,64}")  # what an option may be: no special token of a tokenizer is spelled so


def template_options(requested: Mapping[str, Any], variables: frozenset[str], marks_reasoning: bool) -> dict[str, Any]:
    """Returns the values of the template's variables for a request's fields, by the variable's name.

    Args:
        requested: the request's fields by name, among READERS.
        variables: the variables that the template reads.
        marks_reasoning: whether the template's model marks its reasoning.

    Raises:
        UsageError: the template has no variable for a field, or a field has a value that is not offered.
    """
    options = _TemplateOptions(variables - OWN_VARIABLES, marks_reasoning)
    for name, value in requested.items():
        READERS[name](options, name, value)
    return options.options


@dataclass
class _TemplateOptions:
    """Collects variables of the template. Each method reads a field of a request, and raises UsageError for its value.

    Attributes:
        readable: the variables that the template reads.
        marks_reasoning: whether the template's model marks its reasoning.
        options: the values of variables so far, by name.
    """

    readable: frozenset[str]
    marks_reasoning: bool
    options: dict[str, Any] = field(default_factory=dict)

    def set_variable(self, name: str, value: Any, field_path: str) -> None:
        """Sets a variable of the template. Raises UsageError if another field gave it another value."""
        if self.options.setdefault(name, value) != value:
            raise UsageError(f"the request asks for two values of {name}", "give one", param=field_path)

    def read_switch(self, field_path: str, switch_value: Any) -> None:
        """Reads a switch that turns thinking on or off."""
        if not isinstance(switch_value, bool):
            raise UsageError(f"`{field_path}` is neither true nor false", "give one of them", param=field_path)
        switch = next((name for name in SWITCH_VARIABLES if name in self.readable), None)
        if switch is not None:
            self.set_variable(switch, switch_value, field_path)
        elif switch_value != self.marks_reasoning:  # otherwise the model does what is asked without a switch
            problem = "thinks always" if self.marks_reasoning else "has no marks of thinking"
            raise _refusal(field_path, f"by its chat template the model {problem}")

    def read_effort(self, field_path: str, effort: Any) -> None:
        """Reads how much the model shall think, such as "low"."""
        if not isinstance(effort, str) or not WORD_PATTERN.fullmatch(effort):
            raise UsageError(f"`{field_path}` is not a word", "give one such as low", param=field_path)
        if EFFORT_VARIABLE in self.readable:
            self.set_variable(EFFORT_VARIABLE, effort, field_path)
        elif effort == "none":
            self.read_switch(field_path, False)
        else:
            raise _refusal(field_path, "the model's chat template does not read an effort")

    def read_variables(self, field_path: str, options_by_name: Any) -> None:
        """Reads variables of the template by name."""
        for name, option in _fields(field_path, options_by_name).items():
            if name not in self.readable:
                names = ", ".join(sorted(self.readable)) or "none"
                shown_name = name if name.isidentifier() and len(name) <= 60 else "a field"
                reason = f"the model's chat template does not read it; options that it reads: {names}"
                raise _refusal(f"{field_path}.{shown_name}", reason)
            if not isinstance(option, bool | int | float) and not (
                isinstance(option, str) and WORD_PATTERN.fullmatch(option)
            ):
                raise _refusal(f"{field_path}.{name}", "an option is true, false, a number or a word")
            self.set_variable(name, option, field_path)

    def read_thinking(self, field_path: str, value: Any) -> None:
        """Reads `{"type": "enabled"}` or `{"type": "disabled"}`."""
        fields = _fields(field_path, value)
        type_name = fields.pop("type", None)
        if type_name not in ("enabled", "disabled") or fields:
            raise _refusal(field_path, 'give {"type": "enabled"} or {"type": "disabled"} alone')
        self.read_switch(field_path, type_name == "enabled")

    def read_reasoning(self, field_path: str, value: Any) -> None:
        """Reads `{"enabled": false}` and `{"effort": "low"}`, as several services have them."""
        for name, item in _fields(field_path, value).items():
            path = f"{field_path}.{name}"
            if name == "enabled":
                self.read_switch(path, item)
            elif name == "effort":
                self.read_effort(path, item)
            elif not (name == "exclude" and item is False) and not (name == "summary" and item == "auto"):
                shown_name = path if name.isidentifier() and len(name) <= 60 else field_path
                raise _refusal(
                    shown_name, "the model's chat template alone decides how it reasons; give enabled or effort"
                )


READERS = {
    "enable_thinking": _TemplateOptions.read_switch,
    "thinking": _TemplateOptions.read_thinking,
    "reasoning": _TemplateOptions.read_reasoning,
    "reasoning_effort": _TemplateOptions.read_effort,
    "chat_template_kwargs": _TemplateOptions.read_variables,
}


def _fields(field_path: str, value: Any) -> dict[str, Any]:
    """Returns the entries of a field's value that are not null. Raises UsageError if it is no object."""
    if not isinstance(value, Mapping):
        raise UsageError(f"`{field_path}` is not an object", "give its fields by name", param=field_path)
    return {name: item for name, item in value.items() if item is not None}


def _refusal(field_path: str, reason: str) -> UsageError:
    """Returns the error for a field that is not offered."""
    return UsageError(f"`{field_path}` is not offered: {reason}", param=field_path)

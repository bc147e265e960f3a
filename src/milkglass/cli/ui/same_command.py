"""The command that is running, as a person would type it again with other options."""

from __future__ import annotations

import shlex
from typing import Any

import typer


def same_command(context: typer.Context, **changed: Any) -> str:
    """What was given on the command line, with these parameters, by name, in place of what they were."""
    words, options = ["milkglass", *context.command_path.split()[1:]], list[str]()
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in changed and (source is None or source.name != "COMMANDLINE"):
            continue
        value = changed.get(name, context.params.get(name))
        if parameter.param_type_name == "argument":
            words += [str(one) for one in _each(value)]
        elif isinstance(value, bool):
            options += [max(parameter.opts, key=len)] if value else parameter.secondary_opts[:1]
        else:
            options += [word for one in _each(value) for word in (max(parameter.opts, key=len), str(one))]
    return shlex.join([*words, *options])


def _each(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]

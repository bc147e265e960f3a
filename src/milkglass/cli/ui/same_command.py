"""The command that is running, as a person would type it again with other options."""

from __future__ import annotations

import shlex
from typing import Any

import click
from click.core import ParameterSource


def same_command(**changed: Any) -> str:
    """What was given on the command line, with these parameters, by name, in place of what they were."""
    context = click.get_current_context()
    words, options = ["milkglass", *context.command_path.split()[1:]], list[str]()
    for parameter in context.command.params:
        name = str(parameter.name)
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if name not in changed and not given:
            continue
        value = changed.get(name, context.params.get(name))
        if isinstance(parameter, click.Option):
            options += _option(parameter, value)
        else:
            words += [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
    return shlex.join([*words, *options])


def _option(option: click.Option, value: Any) -> list[str]:
    name = max(option.opts, key=len)
    if option.is_flag:
        return [name] if value else option.secondary_opts[:1]
    return [word for one in (value if isinstance(value, list | tuple) else [value]) for word in (name, str(one))]

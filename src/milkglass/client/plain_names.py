"""Names and ids of models, files and jobs that can be part of a URL's path."""

from __future__ import annotations

import re

from milkglass.errors import UsageError

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def is_plain(name: str) -> bool:
    return PLAIN_NAME.fullmatch(name) is not None and ".." not in name


def plain_name(name: str) -> str:
    """Returns an id that can be part of a URL's path. Raises UsageError for another one."""
    if not is_plain(name):
        raise UsageError("an id has other characters than A-Z a-z 0-9 . _ -", "give it as the server printed it")
    return name

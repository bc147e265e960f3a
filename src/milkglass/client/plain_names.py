"""Names and ids of models, files and jobs that can be part of a URL's path."""

from __future__ import annotations

import re

from milkglass.errors import UsageError

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def is_plain(name: str) -> bool:
    """Returns whether a name can be part of a URL's path: at most 128 of A-Z a-z 0-9 . _ -, and no "..".

    Its first character is a letter or a digit.
    """
    return PLAIN_NAME.fullmatch(name) is not None and ".." not in name


def plain_name(name: str) -> str:
    """Returns the given id. Raises UsageError if it cannot be part of a URL's path."""
    if not is_plain(name):
        raise UsageError("an id has other characters than A-Z a-z 0-9 . _ -", "give it as the server printed it")
    return name

"""Opaque names of tokens, for engines that require a vocabulary with a scrambled model.

Token i is `t` and i in seven digits. All names have one width, so that no name begins another and text of names can be
split in one way only. The letter is only at the beginning of names, so that a name is never found across two others.
Names reveal nothing, since the engine sees ids anyway.
"""

from __future__ import annotations

from milkglass.errors import UsageError

DIGITS = 7
MAX_NAMES = 10**DIGITS  # tokens
PATTERN = f"t[0-9]{{{DIGITS}}}"


def opaque_name(token: int) -> str:
    """Returns the name of a token. Raises UsageError for an id that has no such name."""
    if not 0 <= token < MAX_NAMES:
        raise UsageError(f"an id is not below {MAX_NAMES}, which opaque names end at", "give an id of this model")
    return f"t{token:0{DIGITS}}"

"""Where an error was raised, in words that say nothing of what was being worked on."""

from __future__ import annotations

import traceback


def place_of(error: BaseException) -> str:
    """The kind of an error and where it was raised. Never its message: that may quote ids."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}"

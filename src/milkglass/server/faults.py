"""What an error that was raised means to the caller, and where it was raised, in words that repeat nothing private."""

from __future__ import annotations

import sqlite3
import traceback

from milkglass.errors import MilkglassError
from milkglass.server.storage.data_dir import FULL, disk_full


def known_error(error: BaseException) -> MilkglassError | None:
    """What an error of the system means to the caller; None: it is a fault of ours."""
    if isinstance(error, MilkglassError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return disk_full()
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return disk_full()
    return None


def place_of(error: BaseException) -> str:
    """The kind of an error and where it was raised. Never its message: that may quote ids."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}"

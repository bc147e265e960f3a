"""For all tests: what would be done again and again in each, and costs more than most of them."""

from __future__ import annotations

import gc
from functools import cache

from typer import testing

testing._get_command = cache(testing._get_command)  # CliRunner makes all commands of an app anew for each call


def pytest_collection_finish() -> None:
    """What libraries and tests made when they were imported stays: the collector need not look through it each time."""
    gc.collect()
    gc.freeze()

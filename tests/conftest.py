"""For all tests: what would be done again and again in each, and costs more than most of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from functools import cache

import pytest
from typer import testing

os.environ.setdefault("MILKGLASS_DEVICE", "cpu")  # tests of devices choose their own (tests/devices)
testing._get_command = cache(testing._get_command)  # CliRunner makes all commands of an app anew for each call


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and rewritten stays: the collector would look through it for a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if enabled:
            gc.enable()


def pytest_collection_finish() -> None:
    """The collector need not look through it in tests either."""
    gc.collect()
    gc.freeze()

"""A page's attacks run beside it, and no one waits for them when it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from milkglass.errors import UsageError
from milkglass.monitor.attacker import run_in_thread

ENDLESS = """
import asyncio, time
from milkglass.cli.proxy import exit_command
from milkglass.monitor.attacker import is_attacking, run_in_thread

async def work():
    print("begun", is_attacking())
    try:
        await asyncio.wait_for(run_in_thread(lambda: time.sleep(3600)), 0.2)
    except TimeoutError:
        print("not done", is_attacking())

asyncio.run(work())
exit_command(130)
"""


def test_a_thread_gives_its_value_or_its_error() -> None:
    assert asyncio.run(run_in_thread(lambda: 7)) == 7

    def fails() -> None:
        raise UsageError("no", "no")

    with pytest.raises(UsageError, match="no"):
        asyncio.run(run_in_thread(fails))


@pytest.mark.slow
def test_a_command_ends_although_an_attack_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun False\nnot done True\n", "")

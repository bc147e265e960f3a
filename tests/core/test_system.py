from __future__ import annotations

import pytest

from milkglass.system import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["127.evil.example", "localhost.evil.example", "0.0.0.0", "::", "10.0.0.1", ""])
def test_another_machine(host: str) -> None:
    """The server's own test once took every name that begins with 127. for this machine."""
    assert not is_loopback(host)

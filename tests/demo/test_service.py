"""The server's process: here a stand-in that behaves as told, so that stopping can be tested in all its forms."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from milkglass.demo import run
from milkglass.demo.run import ServerProcess
from milkglass.errors import Unreachable

LISTEN = "print('milkglass serve: listening on http://127.0.0.1:1234', flush=True)"


def stand_in(tmp_path: Path, script: str) -> ServerProcess:
    made = ServerProcess(tmp_path / "home", [], tmp_path / "log")
    made._command = [sys.executable, "-c", script]
    return made


def alive(made: ServerProcess) -> bool:
    return made._process.poll() is None


def test_the_command_is_the_real_one(tmp_path: Path) -> None:
    command = ServerProcess(tmp_path / "home", [tmp_path / "base"], tmp_path / "log")._command
    assert command[1:5] == ["-P", "-m", "milkglass.cli.main", "serve"]
    assert command[-2:] == ["--base-models", str(tmp_path / "base")]


def test_it_waits_for_the_address_and_stops_the_server(tmp_path: Path) -> None:
    with stand_in(tmp_path, f"print('warming up'); {LISTEN}; import time; time.sleep(60)") as made:
        assert made.wait_for_url() == "http://127.0.0.1:1234"
        assert made.wait_for_url() == "http://127.0.0.1:1234"
        assert alive(made)
    assert not alive(made)
    assert "warming up" in (tmp_path / "log").read_text()


def test_it_stops_the_server_when_the_demo_fails(tmp_path: Path) -> None:
    made = stand_in(tmp_path, f"{LISTEN}; import time; time.sleep(60)")
    with pytest.raises(KeyboardInterrupt), made:
        assert made.wait_for_url()
        raise KeyboardInterrupt
    assert not alive(made)


def test_a_server_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.3)
    deaf = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {LISTEN}; time.sleep(60)"
    with stand_in(tmp_path, deaf) as made:
        assert made.wait_for_url()
    assert made._process.returncode == -9


def test_a_server_that_dies_at_its_start_is_told(tmp_path: Path) -> None:
    made = stand_in(tmp_path, "import sys; sys.exit('no such port')")
    with pytest.raises(Unreachable, match="stopped while it started"), made:
        assert made.wait_for_url()
    assert "no such port" in (tmp_path / "log").read_text()


def test_a_silent_server_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_SILENT_SECONDS", 0.2)
    with pytest.raises(Unreachable, match="was silent for"), stand_in(tmp_path, "import time; time.sleep(60)") as made:
        assert made.wait_for_url()
    assert not alive(made)


def test_the_clients_secrets_are_not_in_the_servers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILKGLASS_PASSPHRASE", "correct horse")
    script = "import os; print([n for n in os.environ if n.startswith('MILKGLASS')], flush=True); " + LISTEN
    with stand_in(tmp_path, script) as made:
        assert made.wait_for_url()
    assert (tmp_path / "log").read_text().startswith("[]")
    assert os.environ["MILKGLASS_PASSPHRASE"] == "correct horse"

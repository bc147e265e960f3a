"""`milkglass serve` as a process of its own: started, waited for, and stopped whatever happens.

Its home folder is all that it gets. Its output goes to `log`.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from milkglass.errors import Unreachable

READY = "listening on "
PATIENCE = 120.0  # seconds until it must listen
GRACE = 30.0  # seconds to stop in good order


class Service:
    """A context that runs a server. `url` waits until the server listens; leaving the block stops it."""

    def __init__(self, home: Path, base_models: Sequence[Path], log: Path) -> None:
        self.home, self.log = home, log
        self._command = [
            *(sys.executable, "-P", "-m"),  # -P: nothing is imported from the folder that the demo is called in
            *("milkglass.cli.main", "serve", "--home", str(home), "--port", "0"),
        ]
        for folder in base_models:
            self._command += ["--base-models", str(folder)]
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._url: str | None = None

    def __enter__(self) -> Service:
        # A session of its own, so that Ctrl-C in the terminal reaches the demo, which stops the server in good order.
        # The client's secrets are not in the server's environment.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MILKGLASS_")}
        with self.log.open("wb") as errors:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True, start_new_session=True
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        """Reads to the end, so that the server never waits for a full pipe."""
        assert self._process.stdout is not None
        with self._process.stdout as lines, self.log.open("a", encoding="utf-8") as copy:
            for line in lines:
                copy.write(line)
                copy.flush()
                self._lines.put(line)
        self._lines.put(None)

    @property
    def url(self) -> str:
        """The server's address. Raises Unreachable if the server stops, or says nothing for two minutes."""
        while self._url is None:
            try:
                line = self._lines.get(timeout=PATIENCE)
            except queue.Empty:
                raise Unreachable(f"the server did not start within {PATIENCE:.0f} s", f"see {self.log}") from None
            if line is None:
                raise Unreachable("the server stopped while it started", f"see {self.log}")
            if READY in line:
                self._url = line.rpartition(READY)[2].strip()
        return self._url

    @property
    def token(self) -> str:
        """The token that the server made at its first start. Whoever runs the server gives it to the client."""
        return (self.home / "token").read_text("utf-8").strip()

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads its own session: this is the server and no other
            self._process.wait()
        self._reader.join(GRACE)

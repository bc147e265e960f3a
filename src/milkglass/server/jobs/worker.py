"""A job's process: it runs in its own process group, is found again by a restarted server, and never starts twice.

The worker inherits a lock on `worker.lock`, which the kernel releases when the worker dies in any way. The lock says
whether a worker lives; a process id would be a guess.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from milkglass import device
from milkglass.system import LIBRARY_DEFAULTS

POLL_SECONDS = 0.1  # seconds between looks at whether a worker still runs
MAX_LOG_BYTES = 1 << 20  # bytes of worker.log that are kept from one start to the next
_SHELL_SCRIPT = 'echo $$ > worker.pid && exec "$@"'  # the worker itself writes its id, so that the id is always known


def _worker_environment() -> dict[str, str]:
    """Returns a worker's environment: offline, without Milkglass's variables (a passphrase, a token) but the device."""
    allowed_names = (name for name in os.environ if name == device.DEVICE_VARIABLE or not name.startswith("MILKGLASS_"))
    environment = device.child_environment({name: os.environ[name] for name in allowed_names})
    return {**LIBRARY_DEFAULTS, **environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _keep_end(path: Path, max_bytes: int) -> None:
    """Cuts a file, which no one writes to, to its last `max_bytes` bytes."""
    if path.stat().st_size > max_bytes:
        with path.open("r+b") as file:
            file.seek(-max_bytes, os.SEEK_END)
            end = file.read()
            file.seek(0)
            file.write(end)
            file.truncate()


class Worker:
    """Starts, watches and stops the process of one job, which another server may have started.

    Args:
        folder: the job's folder, in which the process runs.
        command: the program and its arguments. The folder is added as the last one.
    """

    def __init__(self, folder: Path, command: tuple[str, ...]) -> None:
        self._folder, self._command = folder, command
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Starts the process. Returns False if it is running already."""
        with (self._folder / "worker.lock").open("ab") as lock, (self._folder / "worker.log").open("ab") as log:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            _keep_end(self._folder / "worker.log", MAX_LOG_BYTES)
            (self._folder / "worker.pid").unlink(missing_ok=True)
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL_SCRIPT, "sh", *self._command, str(self._folder)],
                cwd=self._folder,
                env=_worker_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock.fileno()],
                start_new_session=True,
            )
        return True

    def is_alive(self) -> bool:
        """Returns whether the process runs. A child that has ended is reaped."""
        if self._child is not None:
            return self._child.poll() is None
        try:
            with (self._folder / "worker.lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def exit_code(self) -> int | None:
        """Returns the exit code. None: the process runs, or another server started it."""
        return None if self._child is None else self._child.returncode

    def wait(self, timeout: float) -> bool:
        """Waits until the process has ended. Returns whether it has."""
        deadline = time.monotonic() + timeout
        while self.is_alive():
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return False
            time.sleep(min(POLL_SECONDS, seconds_left))
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Sends SIGTERM to the worker alone, which saves a checkpoint, or SIGKILL to its whole group."""
        pid = self._pid()
        if pid is None or not self.is_alive():
            return
        send = os.killpg if number == signal.SIGKILL else os.kill
        with suppress(ProcessLookupError):  # it ended in the meantime, as it should
            send(pid, number)

    def stop(self, grace_seconds: float) -> None:
        """Asks the process to save a checkpoint and end, and kills it if it still runs after `grace_seconds`."""
        self.send_signal(signal.SIGTERM)
        if not self.wait(grace_seconds):
            self.send_signal(signal.SIGKILL)
            self.wait(grace_seconds)

    def _pid(self) -> int | None:
        """Returns the worker's process id, or None if it is not known."""
        if self._child is not None:
            return self._child.pid
        path = self._folder / "worker.pid"
        text = path.read_text("ascii").strip() if path.is_file() else ""
        return int(text) if text.isdigit() else None

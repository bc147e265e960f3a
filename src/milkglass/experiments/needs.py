"""What a run of a recipe needs, which is checked before it starts, and what it used, which is noted in its folder.

    [needs]
    memory = 3           GB of the machine's memory, at least, with one training at a time
    device = 8           GB of the GPU's memory, with two side by side, where it runs on one
    at_once = 1          trainings side by side at most, where two would need much memory
    minutes = 40         on two cores
    device_minutes = 5   on an H100-class GPU

`used.json` of a run folder has the most memory and the minutes of each start, from which these numbers are set.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milkglass import device, files, system
from milkglass.errors import UsageError
from milkglass.parameters import limited_field, require
from milkglass.progress import Log, duration_text

GB = 10**9  # bytes
USAGE_FILE = "used.json"
SAMPLE_SECONDS = 1.0  # between two samples of the memory


@dataclass(frozen=True)
class RecipeNeeds:
    """Compares a recipe's table [needs] with this machine. A need that is not known is None.

    Attributes:
        memory: GB of the machine's memory.
        device: GB of the GPU's memory.
        at_once: how many trainings run side by side at most.
        minutes: how long the run takes on two cores.
        device_minutes: how long the run takes on an H100-class GPU.
    """

    memory: float | None = limited_field(None, above=0)
    device: float | None = limited_field(None, above=0)
    at_once: int | None = limited_field(None, least=1)
    minutes: float | None = limited_field(None, above=0)
    device_minutes: float | None = limited_field(None, above=0)

    def __post_init__(self) -> None:
        require(self)

    def check(self, name: str, log: Log) -> None:
        """Reports what the run takes. Raises UsageError, with both numbers, if this machine has too little."""
        free_memory = system.memory_bytes(only_available=True)
        if self.memory is not None and free_memory is not None and free_memory < self.memory * GB:
            raise UsageError(
                f"{name} needs at least {self.memory:g} GB of memory, and {free_memory / GB:.1f} GB are free here",
                "close other programs, run it with --quick, or take a larger machine",
            )
        free_gpu_memory = device.memory_bytes(only_free=True)
        if self.device is not None and free_gpu_memory is not None and free_gpu_memory < self.device * GB:
            raise UsageError(
                f"{name} needs at least {self.device:g} GB of the GPU's memory, and "
                f"{free_gpu_memory / GB:.1f} GB are free there",
                f"end what else runs on it, run it with --quick, or set {device.DEVICE_VARIABLE} to cpu",
            )
        if needs := self._needs_text(free_gpu_memory is not None):
            log(f"{name} takes {needs}")

    def trainings_at_once(self, requested: int, log: Log) -> int:
        """Returns how many trainings run side by side: as requested, or fewer for the recipe or the free memory."""
        requested = min(requested, self.at_once or requested)
        free_memory = system.memory_bytes(only_available=True)
        if self.memory is None or free_memory is None:
            return requested
        count = max(1, min(requested, int(free_memory / (self.memory * GB))))
        if count < requested:
            memory_text = f"each needs {self.memory:g} GB of memory, {free_memory / GB:.1f} GB are free"
            log(f"trains {count} at a time in place of {requested}: {memory_text}")
        return count

    def _needs_text(self, on_gpu: bool) -> str:
        needs = [] if self.memory is None else [f"at least {self.memory:g} GB of memory"]
        if on_gpu and self.device is not None:
            needs.append(f"{self.device:g} GB of the GPU's")
        minutes, machine = (self.device_minutes, "an H100") if on_gpu else (self.minutes, "two cores")
        if minutes is not None:
            needs.append(f"about {duration_text(60 * minutes)} on {machine}")
        return ", ".join(needs)


class MemorySampler(threading.Thread):
    """Notes the most memory that this process and its children hold together.

    Pages that several processes share count once (proportional set size). A peak between two samples is not seen.
    Between samples it waits a second, or a hundred times as long as a sample takes, so that timings are not disturbed.

    Attributes:
        peak_bytes: the largest sum so far.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._stop_requested = threading.Event()

    def run(self) -> None:
        """Samples until `stop`."""
        last_sample_seconds = 0.0
        while not self._stop_requested.wait(max(SAMPLE_SECONDS, 100 * last_sample_seconds)):
            started = time.monotonic()
            self.sample()
            last_sample_seconds = time.monotonic() - started

    def stop(self) -> None:
        """Ends the thread and takes the last sample."""
        self._stop_requested.set()
        self.join()
        self.sample()

    def sample(self) -> None:
        """Takes one sample."""
        import psutil  # of the extra `recipes`; comparisons import this module without it

        process = psutil.Process()
        total = sum(map(_memory_bytes, (process, *process.children(recursive=True))))
        self.peak_bytes = max(self.peak_bytes, total)


def _memory_bytes(process: Any) -> int:
    """Returns a process's share of the memory; 0 if it has ended. Without shares, all that it has in memory."""
    import psutil

    try:
        usage = process.memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(usage, "pss", usage.rss))


@contextmanager
def note_usage(out: Path) -> Iterator[None]:
    """Notes in the run folder, when the run ends in any way, what it used."""
    started, sampler = time.monotonic(), MemorySampler()
    sampler.sample()  # a library that is missing is missed now, and not after hours
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()
        if (out / "run.json").is_file():  # else nothing was begun
            path = out / USAGE_FILE
            earlier = json.loads(path.read_text("utf-8")) if path.is_file() else []
            files.write(path, json.dumps([*earlier, _usage(started, sampler.peak_bytes)], indent=1) + "\n")


def _usage(started: float, peak_bytes: int) -> dict[str, float]:
    """Returns the minutes since `started`, and the peak of memory, and of the GPU's if there is one, in GB."""
    usage = {"minutes": (time.monotonic() - started) / 60, "memory": peak_bytes / GB}
    if device.on_gpu():
        import torch

        usage["device"] = torch.cuda.max_memory_allocated(device.current()) / GB  # of this process alone
    return {name: round(amount, 2) for name, amount in usage.items()}

"""The processes that train one job together: which one this is, what they agree on, and which rows each reads.

They meet over a file in the job's folder and talk over the loopback interface (gloo), and GPUs among themselves (nccl):
no port is open to a network. Only tensors are exchanged, never objects, which would be pickled.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import final

import torch
from torch import distributed

from milkglass.errors import UsageError
from milkglass.server.jobs.launch import MEETING

PATIENCE = timedelta(hours=2)  # of a process for the others; one that dies is noticed at once
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@final
@dataclass(frozen=True)
class Ranks:
    """One of `count` processes.

    Attributes:
        place: of this process, from 0. The first one reports and saves.
        count: of all.
    """

    place: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.place == 0

    def join(self, job: Path) -> None:
        """Meet the others. Raises UsageError where there are GPUs, but fewer than processes."""
        if self.count == 1:
            return
        gpus = torch.cuda.device_count()
        if 0 < gpus < self.count:
            raise UsageError(
                f"{self.count} processes need a GPU each, and this machine has {gpus}",
                f"start the server with --processes {gpus}, or less",
            )
        os.environ.update(LOOPBACK)
        store = distributed.FileStore(str(job / MEETING), self.count)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        if gpus:
            torch.cuda.set_device(self.place)
        distributed.init_process_group(
            backend, store=store, rank=self.place, world_size=self.count, timeout=PATIENCE
        )  # accelerate finds it, and makes none of its own

    def any(self, *flags: bool) -> list[bool]:
        """Of each flag, whether it is set in any process. All processes ask at the same step."""
        if self.count == 1:
            return list(flags)
        said = torch.tensor(flags, dtype=torch.int32)
        distributed.all_reduce(said, distributed.ReduceOp.MAX)
        return [bool(one) for one in said.tolist()]

    def wait(self) -> None:
        """Until all are here."""
        self.any(False)

    def numbers_of_first(self, numbers: Sequence[int] | None, count: int) -> list[int]:
        """`count` numbers that the first process has, for all."""
        said = torch.zeros(count, dtype=torch.int64) if numbers is None else torch.tensor(numbers, dtype=torch.int64)
        distributed.broadcast(said, 0)
        result: list[int] = said.tolist()
        return result


def end(code: int) -> None:
    """End this process without taking the group down: gloo's destructor and its threads can wait for each other."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent(stop: Callable[[], object] = lambda: os._exit(1)) -> None:
    """From here on this process stops when the one that started it ends: its standard input then closes."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        stop()

    threading.Thread(target=watch, name="parent", daemon=True).start()

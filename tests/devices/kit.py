"""Runs a part on the processor and on another device, and compares.

The other device is a CUDA GPU where there is one, and else a pretended GPU (pretended.py), which shows that no tensor
is left behind. One process cannot have both: PyTorch takes the pretended one for its accelerator, and then no gradient
can be computed on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from milkglass import device

T = TypeVar("T")
if torch.cuda.is_available():
    OTHERS: tuple[str, ...] = ("cuda",)
else:  # imported before any gradient is computed: PyTorch asks once which devices there are
    from tests.devices import pretended

    OTHERS = ("pretended",)


@contextmanager
def on(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chooses a device inside, and checks that something was computed there."""
    if name == "pretended":
        pretended.DONE[0] = 0
        with pretended.pretend_gpu(monkeypatch):
            yield
        assert pretended.DONE[0], "nothing was computed on the device"
        return
    with monkeypatch.context() as patch:
        patch.setenv(device.DEVICE_VARIABLE, name)
        if name == "cpu":
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        assert torch.cuda.max_memory_allocated() > before, "nothing was computed on the device"


def both(work: Callable[[], T], other: str, monkeypatch: pytest.MonkeyPatch) -> tuple[T, T]:
    """Returns what the work gives on the processor and on the other device."""
    with on("cpu", monkeypatch):
        here = work()
    with on(other, monkeypatch):
        return here, work()


def near(there: Any, here: Any, tolerance: float) -> None:
    """Compares tensors of any device, relative to the largest number of the first."""
    one, two = (
        torch.as_tensor(device.array(each) if isinstance(each, torch.Tensor) else each) for each in (there, here)
    )
    assert one.shape == two.shape
    assert float((one.double() - two.double()).abs().max()) <= tolerance * max(1e-30, float(two.double().abs().max()))

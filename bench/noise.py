"""What exact noise costs: samples a second beside PyTorch's generator, and a gradient's noise beside the gradient.

    python bench/noise.py [--threads 1]

Ratios of one run, medians of five.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from milkglass.models.resolve import resolve_model
from milkglass.noise import grid, rounded
from milkglass.noise.stream import Stream
from milkglass.threat.training_step import SharedStep, pad_texts

COUNT = 4_000_000


def median(work: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def drawn(sample: Callable[[Stream, int, float], object]) -> object:
    """Draws COUNT samples from a new stream."""
    return sample(Stream(bytes(32)), COUNT, 2.0**24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    generator = torch.Generator()
    plain = median(lambda: torch.randn(COUNT, generator=generator))
    for sample in (rounded.gaussian, rounded.laplace):
        exact = median(partial(drawn, sample))
        print(
            f"{sample.__name__}: {COUNT / exact / 1e6:.1f} million exact samples/s, {exact / plain:.1f} x torch.randn"
        )
    step = SharedStep.open(resolve_model("demo:minilm"), "classification", 2, 0)
    ids, mask = pad_texts([list(range(2000, 2032))] * 8, pad_id=0)
    targets = torch.zeros(8, dtype=torch.long)
    taken = median(lambda: step.gradient(ids, mask, targets), 3)
    tensors = step.gradient(ids, mask, targets)
    noisy = median(lambda: [grid.add_gaussian(one, 1.0, Stream(bytes(32)), 1.0) for one in tensors.values()], 3)
    numbers = sum(one.numel() for one in tensors.values())
    print(f"a gradient of MiniLM ({numbers / 1e6:.1f} million numbers), 8 texts of 32 tokens: {taken:.2f} s;"
          f" its noise {noisy:.2f} s, {noisy / taken:.2f} x")  # fmt: skip


if __name__ == "__main__":
    main()

"""A table of Llama 3's size, in bf16 on the disk: seconds, and memory beyond the mapped file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from frame.child import in_child, memory_used
from frame.clustered import clustered
from frame.figure import Figure
from frame.rounds import seconds
from safetensors import safe_open
from safetensors.torch import save_file

from milkglass.nearest.products import blocks, product
from milkglass.schemes.obfuslm import ObfusLM

SIZE, QUICK = (128_256, 4096), (6000, 256)
SAMPLE = 320  # rows of the bare product, as many as clustering makes at a time
WRITTEN = 2048  # rows mixed at a time, as a checkpoint is written
RUNS = 3  # each in a new process: memory may differ by where its heap begins


def measure(quick: bool) -> Iterator[Figure]:
    n, d = QUICK if quick else SIZE
    with tempfile.TemporaryDirectory(prefix="milkglass-bench-") as held:
        path = Path(held, "table.safetensors")
        in_child(_write, path, n, d)
        spent, most, threads = zip(*(in_child(_cost, path) for _ in range(1 if quick else RUNS)), strict=True)
        clusters, product = in_child(_product_cost, path)
    time = Figure("large table, time", spent, asked=180.0, dtype="bfloat16", threads=threads[0],
                  note=f"{n:,} x {d:,} synthetic rows, k = 10")  # fmt: skip
    yield time
    what = f"oneDNN's product {clusters:,} x {n:,} x {d:,} of rows in fp32, of {SAMPLE} rows, extrapolated"
    yield replace(time, name="large table, cost", other=(product,), what=what, asked=None)
    yield replace(time, name="large table, memory", ours=(max(most) / 1e9,), asked=4.0, unit="GB",
                  note=f"{time.note}; the most of {len(most)} runs")  # fmt: skip


def _product_cost(path: Path) -> tuple[int, float]:
    """How many clusters there are, and seconds for the similarities of a row of each with all."""
    with safe_open(path, "pt") as file:
        table = file.get_tensor("table")
    order = np.random.default_rng(0).permutation(len(table))
    clusters = len(ObfusLM(k=10, beta=0.99, leftover="paper").cluster(table, order))
    rows, spent = table[:SAMPLE].float(), 0.0
    for part in blocks(table):
        some = table[part].float()  # which is not timed: nor is the memory that it takes
        product(rows, some)
        spent += seconds(lambda some=some: product(rows, some))  # type: ignore[misc]
    return clusters, spent / len(rows) * clusters


def _write(path: Path, n: int, d: int) -> None:
    save_file({"table": clustered(n, d, torch.bfloat16)}, path)


def _cost(path: Path) -> tuple[float, float, int]:
    """Seconds, bytes and threads. The mixed rows are dropped, as those that were written are."""
    scheme, draws = ObfusLM(k=10, epsilon=1.0, beta=0.99), np.random.default_rng(1)

    def work() -> None:
        with safe_open(path, "pt") as file:
            table = file.get_tensor("table")  # mapped: a copy in memory would count
        order = np.random.default_rng(0).permutation(len(table))
        mixture = scheme.mixture(table, order, lambda count: draws.laplace(size=count))
        for start in range(0, len(table), WRITTEN):
            mixture.apply(table, order[start : start + WRITTEN])

    _, spent, most = memory_used(work)
    return spent, most, torch.get_num_threads()

"""Fast against literal: EmbedCluster, WeightSynth and the mixing of MiniLM's real table, in one run on one machine.

    python bench/obfuscate.py [--runs 5] [--rows 30522]

Prints medians and the ratio. The literal side (reference/obfuslm.py) runs once: it takes minutes and about 24 GB at the
full size; --rows cuts the table for both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "reference"))
import obfuslm as literal  # noqa: E402

from milkglass.models.checkpoint import Checkpoint  # noqa: E402
from milkglass.models.families import of  # noqa: E402
from milkglass.models.resolve import resolve  # noqa: E402
from milkglass.schemes.mixture import Mixture  # noqa: E402
from milkglass.schemes.obfuslm import ObfusLM  # noqa: E402

CLUSTER_ROWS = 2048


def fast(table: torch.Tensor, order: np.ndarray, seed: int, leftover: str) -> tuple[Mixture, float]:
    began = time.perf_counter()
    generator = np.random.default_rng(seed)
    mixture = ObfusLM(k=10, epsilon=0.1, leftover=leftover).mixture(table, order, lambda n: generator.laplace(size=n))
    for start in range(0, len(table), CLUSTER_ROWS):
        mixture.apply(table, order[start : start + CLUSTER_ROWS])
    return mixture, time.perf_counter() - began


def slow(table: torch.Tensor, order: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
    began = time.perf_counter()
    x = table.double().numpy()[order]
    clusters = literal.embed_cluster(x, 10, 0.99)
    noise = np.random.default_rng(seed).laplace(size=sum(len(c) ** 2 for c in clusters))
    w = literal.weight_synth(x, clusters, 0.1, noise)
    result = w @ x
    return result, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=30_522)
    arguments = parser.parse_args()
    base = Checkpoint.open(resolve("demo:minilm"))
    table = base.read(of(base).table)[: arguments.rows].clone()
    order = np.random.default_rng(0).permutation(len(table))
    print(f"{len(table)} x {table.shape[1]}, {torch.get_num_threads()} threads", flush=True)
    for leftover in ("merge", "paper"):  # the product's default, and what the literal side does
        times = [fast(table, order, seed, leftover)[1] for seed in range(arguments.runs)]
        median = statistics.median(times)
        print(
            f"fast, {leftover:7} median {median:.2f} s of {len(times)} ({min(times):.2f} to {max(times):.2f})",
            flush=True,
        )
    expected, seconds = slow(table, order, 0)
    mixed = fast(table, order, 0, "paper")[0].apply(table, order)
    print(f"literal       {seconds:.2f} s, once")
    print(f"ratio of literal to fast, both as the paper: {seconds / median:.1f}")
    print(f"largest difference of the two tables {np.abs(expected - mixed.numpy()).max():.1e}")


if __name__ == "__main__":
    main()

"""Candidate lists: seconds, and ratios to the literal program and to whole rows compared at a time, in one run.

    python bench/nearest.py [--model demo:minilm] [--k 30] [--sample 100] [--rounds 3]

"Whole rows" is how lists were made before: every pair is multiplied twice, and each row is ranked at once. "Product" is
the floor: the tiles on and above the diagonal are multiplied, and nothing else is done. Ours and these use all cores;
others' work on the machine moves the clock, so that processor seconds are given beside it. The literal program
(reference/sanitizers.py) does --sample rows drawn evenly, whose lists are compared; its time for all rows is that
times rows / sample.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).parent.parent / "reference"))
import sanitizers as literal  # noqa: E402

from milkglass.models.resolve import resolve  # noqa: E402
from milkglass.nearest.all_rows import ROWS, TILE, nearest  # noqa: E402
from milkglass.nearest.select import best  # noqa: E402
from milkglass.nearest.similarities import directions  # noqa: E402
from milkglass.sanitizers.tables.vocabulary import opened  # noqa: E402
from milkglass.system import cores  # noqa: E402


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def whole_rows(unit: NDArray[np.float32], k: int) -> None:
    turned = np.ascontiguousarray(unit.T)
    for start in range(0, len(unit), ROWS):
        block = unit[start : start + ROWS] @ turned
        rows = np.arange(len(block))
        block[rows, start + rows] = -np.inf
        best(block, k)


def product(unit: NDArray[np.float32]) -> None:
    def tile(at: tuple[int, int]) -> None:
        np.matmul(unit[at[0] : at[0] + TILE], unit[at[1] : at[1] + TILE].T)

    n = len(unit)
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(cores()) as pool:
        list(pool.map(tile, [(top, left) for top in range(0, n, TILE) for left in range(top, n, TILE)]))


def alike(vectors: NDArray[np.float32], k: int, sample: int) -> tuple[float, float]:
    """Processor seconds of the literal program for all rows, and the largest difference of a cosine."""
    _, cosines = nearest(vectors, k)
    x, worst = vectors.astype(np.float64), 0.0
    norms = literal.lengths(x)
    chosen = np.linspace(0, len(x) - 1, min(sample, len(x))).astype(int)
    lists = list[list[int]]()
    _, cpu = timed(lambda: lists.extend(literal.candidate_list(x, int(i), k, norms)[0] for i in chosen))
    for i, wanted in zip(chosen, lists, strict=True):
        worst = max(worst, float(np.abs(cosines[i] - literal.cosine_row(x, int(i), norms)[wanted]).max()))
    return cpu * len(x) / len(chosen), worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:minilm")
    parser.add_argument("--k", type=int, default=30)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    vectors = opened(resolve(asked.model))[1]
    unit = directions(vectors)
    print(f"{len(vectors)} x {vectors.shape[1]}, k = {asked.k}, {cores()} cores; best of {asked.rounds} rounds")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    nearest(vectors, asked.k)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    works = (lambda: nearest(vectors, asked.k), lambda: product(unit), lambda: whole_rows(unit, asked.k))
    # In turn, so that a ratio compares what ran in the same minute.
    rounds = [[timed(work) for work in works] for _ in range(asked.rounds)]
    ours, floor, rows = (tuple(min(one[i][j] for one in rounds) for j in (0, 1)) for i in range(3))
    slow, worst = alike(vectors, asked.k, asked.sample)
    print(f"  ours        {ours[0]:7.2f} s, processor {ours[1]:7.2f} s, at most {more:.0f} MB more")
    for name, (wall, cpu) in (("product", floor), ("whole rows", rows)):
        print(f"  {name:11} {wall:7.2f} s, processor {cpu:7.2f} s: {cpu / ours[1]:.2f} times ours")
    print(f"  literal     {' ' * 9}  processor {slow:7.0f} s: {slow / ours[1]:.0f} times ours ({asked.sample} rows)")
    print(f"  cosines differ from the literal program's by {worst:.1e} at most")


if __name__ == "__main__":
    main()

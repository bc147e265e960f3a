"""The k nearest tokens of every token, each pair of tokens compared once.

The cosine of i and j is that of j and i, so that only tiles on and above the diagonal are multiplied: half the work of
`neighbours.nearest`, which has a row's similarities at a time and ranks them at once. What a row must reach to be
ranked is guessed from a sample of columns. A guess that was too high leaves fewer than k; such a row is compared with
all others again, so that guesses cost time and never a neighbour. Memory: a tile and what reached, never n x n.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from milkglass.sanitizers.tables.neighbours import best, require_k
from milkglass.sanitizers.tables.table import Ids, Vectors
from milkglass.system import cores

Lists = NDArray[np.int32]
Pairs = tuple[NDArray[np.int16], NDArray[np.int32], NDArray[np.float32]]  # a row in its strip, a column, a cosine
TILE = 1024  # rows and columns of a tile: 4 MB
SAMPLE = 2048  # columns that guesses are made from
ROWS = 256  # rows compared at a time where single rows are asked for


def nearest_of(unit: Vectors, rows: Ids, k: int) -> Lists:
    """(r, k): for each of these rows of unit (m, d), of length one or zero, the k others of the largest cosine, best
    first, ties by index."""
    result = np.empty((len(rows), k), np.int32)
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        block = unit[part] @ unit.T
        block[np.arange(len(part)), part] = -np.inf
        result[start : start + ROWS] = best(block, k)[0]
    return result


def nearest_lists(unit: Vectors, k: int) -> Lists:
    """(m, k): the same for every row. Raises UsageError where k is not from 1 to m - 1."""
    m = len(unit)
    require_k(k, m - 1, lowest=1)
    strips = [list[Pairs]() for _ in range(0, m, TILE)]
    result, short = np.empty((m, k), np.int32), list[Future[Ids]]()
    # A worker multiplies its own tile; threads of the BLAS beside the workers only wait for one another.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(cores()) as pool:
        bounds = _guesses(unit, k, pool)
        for number, top in enumerate(range(0, m, TILE)):
            tiles = pool.map(partial(_compare, unit, bounds, top), range(top, m, TILE))
            for other, (mine, theirs) in enumerate(tiles, number):  # in order, whichever is done first
                strips[number].append(mine)
                if other > number:
                    strips[other].append(theirs)
            short.append(pool.submit(_ranked, strips[number], result[top : top + TILE], top))
            strips[number] = []
    again = np.concatenate([one.result() for one in short])
    result[again] = nearest_of(unit, again, k)
    return result


def _guesses(unit: Vectors, k: int, pool: ThreadPoolExecutor) -> NDArray[np.float32]:
    """(m,) a cosine that more than k others are likely to reach: three deviations more than k are expected to."""
    m = len(unit)
    sample = np.ascontiguousarray(unit[np.linspace(0, m - 1, min(SAMPLE, m)).astype(np.int64)].T)
    expected = k * sample.shape[1] / m
    place = min(sample.shape[1], math.ceil(expected + 3 * math.sqrt(expected)) + 2)  # one more: it may hold the row

    def guessed(top: int) -> NDArray[np.float32]:
        block = unit[top : top + TILE] @ sample
        return np.partition(block, block.shape[1] - place, axis=1)[:, block.shape[1] - place]

    return np.concatenate([*pool.map(guessed, range(0, m, TILE))])


def _compare(unit: Vectors, bounds: NDArray[np.float32], top: int, left: int) -> tuple[Pairs, Pairs]:
    """One tile: what reaches its row's bound; and what reaches its column's, turned. On the diagonal both are alike."""
    block = unit[top : top + TILE] @ unit[left : left + TILE].T
    if top == left:
        np.fill_diagonal(block, -np.inf)
    row, column, value = _reached(block, block >= bounds[top : top + TILE, None])
    mine = (row.astype(np.int16), column + np.int32(left), value)
    row, column, value = _reached(block, block >= bounds[left : left + TILE])
    return mine, (column.astype(np.int16), row + np.int32(top), value)


def _reached(
    block: NDArray[np.float32], reached: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    at = np.flatnonzero(reached)
    row, column = np.divmod(at.astype(np.int32), np.int32(block.shape[1]))
    return row, column, block.ravel()[at]


def _ranked(pairs: list[Pairs], lists: Lists, top: int) -> Ids:
    """Write the lists of a strip that begins at row `top`; which rows have fewer than k neighbours, and no list.

    Pairs come in the order of their columns, which a stable sort keeps: so ties fall to the smaller index.
    """
    count, k = lists.shape
    row, column, value = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=count)
    width = max(k, int(counts.max()))
    at = np.arange(width) < counts[:, None]
    columns, values = np.zeros((count, width), np.int32), np.full((count, width), np.inf, np.float32)
    columns[at], values[at] = column[order], -value[order]
    lists[:] = np.take_along_axis(columns, np.argsort(values, axis=1, kind="stable")[:, :k], 1)
    return top + np.flatnonzero(counts < k)


# A look at all candidates in bf16, so that only those that may be among the best are measured in fp32.
#
# Used on processors that multiply bf16 faster than fp32 (AMX, AVX-512 BF16). A loss in bf16 differs from that in fp32
# by about 0.01 % of it, and the candidates of a place by 2 to 4 %: with whoever is within MARGIN of the best measured
# again, the choices are those of fp32, unless bf16 is wrong by half of MARGIN (not proven, tested; `bench/ghost.py
# --bf16` tells how far it was wrong). Out of scope: models, beams' sequences.
MARGIN = 0.005  # relative


def quick_in_bf16() -> bool:
    """Whether this processor has instructions for bf16. Older releases of torch cannot say: then it has none."""
    requested: Any = getattr(torch.cpu, "get_capabilities", dict)
    info = requested()
    return bool(info.get("amx_bf16") or info.get("avx512_bf16"))


def in_bf16() -> torch.autocast:
    """While this lasts, matrices are multiplied in bf16."""
    return torch.autocast("cpu", torch.bfloat16)


def worth(rough: NDArray[np.float64], owner: NDArray[np.int64], widths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(r,) which of these candidates may be among the `widths` best (r,) of their owner (r,), whose numbers are in
    order; inf is never among the best."""
    result = np.zeros(len(rough), np.bool_)
    for begin in np.flatnonzero(np.diff(owner, prepend=-1)):
        mine = slice(begin, np.searchsorted(owner, owner[begin], side="right"))
        part = np.sort(rough[mine])
        last = part[min(int(widths[begin]), len(part)) - 1]
        result[mine] = np.isfinite(rough[mine]) & (rough[mine] <= last * (1 + MARGIN))
    return result

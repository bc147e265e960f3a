"""Search all 2^32 seeds of PyTorch's CPU generator for one whose first numbers are known nearly.

`torch.Generator().manual_seed(s)` keeps the low 32 bits of s and fills the state of a Mersenne Twister with

    x_0 = s,    x_i = 1812433253 (x_{i-1} xor x_{i-1} >> 30) + i

(Matsumoto and Nishimura 1998, in the revision of 2002). Output number j follows from x_j, x_{j+1} and x_{j+397}, so the
first outputs cost 400 steps a seed and nothing else of the state. Seeds are tried in blocks, a step for all of a block
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Test = Callable[[Words], NDArray[np.bool_]]

SEEDS = 1 << 32
BLOCK = 1 << 14  # seeds at a time: 64 KiB a row, which a processor's cache holds
FAR = 397


def outputs(seeds: Words, places: Sequence[int]) -> Iterator[Words]:
    """For ascending places below 227 (where the first twist uses no new word), the outputs (n,) of every seed (n,)."""
    state, work = seeds.copy(), np.empty_like(seeds)
    near: dict[int, Words] = {0: seeds}
    expected = {at + step for at in places for step in (0, 1)}
    ends = {at + FAR: at for at in places}
    for i in range(1, max(ends) + 1):
        np.right_shift(state, np.uint32(30), out=work)
        np.bitwise_xor(state, work, out=state)
        np.multiply(state, np.uint32(1812433253), out=state)
        np.add(state, np.uint32(i), out=state)
        if i in expected:
            near[i] = state.copy()
        if i in ends:
            at = ends[i]
            yield _tempered(_twisted(near[at], near[at + 1], state))


def search(
    tests: Sequence[tuple[int, Test]], first: int, count: int, stopped: Callable[[], bool], threads: int = 2
) -> Iterator[int]:
    """Every seed from `first` on, of `count`, whose outputs at these places pass their tests; the first one is a sieve.

    Args:
        stopped: asked between blocks; the search ends where it says so.
    """
    starts = range(first, min(first + count, SEEDS), BLOCK)
    with ThreadPoolExecutor(threads) as pool:
        for at in range(0, len(starts), 4 * threads):
            if stopped():
                return
            part = starts[at : at + 4 * threads]
            for seeds in pool.map(lambda start: _passing(tests, start, min(BLOCK, first + count - start)), part):
                yield from seeds


def _passing(tests: Sequence[tuple[int, Test]], start: int, count: int) -> list[int]:
    seeds = (np.arange(count, dtype=np.uint64) + np.uint64(start)).astype(np.uint32)
    place, test = tests[0]
    (drawn,) = outputs(seeds, [place])
    left = seeds[test(drawn)]
    if not len(left):
        return []
    passed = np.ones(len(left), np.bool_)
    rest = dict(tests)
    for at, drawn in zip(sorted(rest), outputs(left, sorted(rest)), strict=True):
        passed &= rest[at](drawn)
    return [int(one) for one in left[passed]]


def _twisted(one: Words, two: Words, far: Words) -> Words:
    mixed = (one & np.uint32(0x80000000)) | (two & np.uint32(0x7FFFFFFF))
    return far ^ (mixed >> np.uint32(1)) ^ ((two & np.uint32(1)) * np.uint32(0x9908B0DF))


def _tempered(y: Words) -> Words:
    y = y ^ (y >> np.uint32(11))
    y = y ^ ((y << np.uint32(7)) & np.uint32(0x9D2C5680))
    y = y ^ ((y << np.uint32(15)) & np.uint32(0xEFC60000))
    return y ^ (y >> np.uint32(18))

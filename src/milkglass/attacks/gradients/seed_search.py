"""Searches for the 32-bit seed of noise, and subtracts the noise from the gradient.

PyTorch's CPU generator keeps 32 bits of a seed. The first row of the embeddings' gradient, that of id 0, is noise alone
in a text without that token ([PAD] of BERT's family is never read). So the generator's first numbers are known, up to
rounding and the width of the noise, which is estimated from the other rows:

    Gaussian     numbers 0 and 8 come from outputs 0 and 8 by Box and Muller: r^2 = -2 ln(1 - u_0), angle = 2 pi u_8
    Laplacian    number i comes from outputs 2 i and 2 i + 1 by its inverse distribution function

`torch.Generator().manual_seed(s)` fills the state of a Mersenne Twister with

    x_0 = s,    x_i = 1812433253 (x_{i-1} xor x_{i-1} >> 30) + i

(Matsumoto and Nishimura 1998, in the revision of 2002). Output j follows from x_j, x_{j+1} and x_{j+397}. So the first
outputs of a seed cost 400 steps, without the rest of the state.

All seeds are tried in blocks, and each that passes is checked by the noise that it makes. That noise is subtracted, and
the rows that remain are the tokens that were read (free_tokens.py). The key of a stream of 256 bits cannot be searched:
every seed fails, and nothing is named. A search takes up to an hour of two cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.attacks.gradients.free_tokens import NOT_SHARED_REASON, divide_among_texts, read_tokens, table_gradient
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import require_known

MAX_WIDTH_ERROR = 0.02  # share of the noise's width by which its estimate may be wrong
NUMBERS_COMPARED = 12  # numbers of the first row that are compared with those of a Laplacian seed
MIN_CORRELATION = 0.99  # correlation of a seed's noise with the first rows
ROWS_COMPARED = 64  # rows with which a seed's noise is compared
MIN_ENTRY = 1e-5  # share of the noise's width below which an entry is rounding

Words = NDArray[np.uint32]
OutputTest = Callable[[Words], NDArray[np.bool_]]
SEED_COUNT = 1 << 32
SEEDS_AT_A_TIME = 1 << 14  # seeds at a time: 64 KiB a row, which a processor's cache holds
TWIST_OFFSET = 397


@dataclass(frozen=True)
class SeedSearch(Inversion):
    """Finds the 32-bit seed of the noise, and reads the tokens of the gradient without it.

    Attributes:
        first, count: the seeds that are tried: so many, from this one on.
        threads: how many blocks of seeds are tried at the same time.
    """

    first: int = 0
    count: int = SEED_COUNT
    threads: int = 2

    name = "seed-search"
    title = "Search for the seed of the noise"
    paper = papers.MERSENNE_TWISTER.with_deviations(
        "Ours: the paper describes the generator, and says that it is not for secrets."
    )
    uses = frozenset({"lengths"})
    min_seconds = 60.0

    def why_unreadable(self, batch: SharedBatch) -> str | None:
        grad = table_gradient(batch)
        if grad is None:
            return NOT_SHARED_REASON
        if batch.step.parameter_names[0] != batch.step.table_name:
            return "the embeddings are not the first tensor that noise was drawn for"
        if grad.shape[1] < 16:
            return "a row is too short to hold a generator's first numbers"
        return "no noise was added to the embeddings' gradient" if (grad == 0).all(1).any() else None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        grad = require_known(table_gradient(batch))
        seed = self.seed(grad, budget)
        return divide_among_texts(
            None if seed is None else read_tokens(_NoiseModel(grad).without_noise(grad, seed)), batch
        )

    def seed(self, grad: torch.Tensor, budget: Budget) -> int | None:
        """Returns the seed of the noise in the embeddings' gradient (v, d), or None if no seed explains it."""
        model = _NoiseModel(grad)

        def is_stopped() -> bool:
            is_over = budget.left() <= 0
            budget.spend(work.elements(4 * self.threads * SEEDS_AT_A_TIME * TWIST_OFFSET / 20))
            return is_over

        tests = model.tests(device.array(grad[0].double()))
        passing = search(tests, self.first, self.count, is_stopped, self.threads)
        return next((seed for seed in passing if model.explains(grad, seed)), None)


class _NoiseModel:
    """Estimates the distribution of the noise, and makes the noise of a seed.

    Attributes:
        is_gaussian: whether the noise is Gaussian; else it is Laplacian.
        width: the noise's standard deviation, from the median of the entries, nearly all of which are noise.
    """

    def __init__(self, grad: torch.Tensor) -> None:
        sizes = grad.double().abs().flatten()[: 1 << 22]
        deviation = float(sizes.square().mean().sqrt())
        # half of a normal variable's sizes are below 0.674 deviations, half of a Laplacian's below 0.490
        self.is_gaussian = float(sizes.median()) / deviation > 0.58
        self.width = float(sizes.median()) / (0.674490 if self.is_gaussian else math.log(2) / math.sqrt(2))

    def tests(self, row: NDArray[np.float64]) -> Sequence[tuple[int, OutputTest]]:
        """Returns indices of outputs, each with a test that the output passes if its seed made the row (d,)."""
        return self._gaussian_tests(row) if self.is_gaussian else self._laplace_tests(row)

    def _gaussian_tests(self, row: NDArray[np.float64]) -> Sequence[tuple[int, OutputTest]]:
        """Returns the tests of a seed of Gaussian noise: the angle and the radius of numbers 0 and 8."""
        square = (row[0] ** 2 + row[8] ** 2) / self.width**2
        angle = math.atan2(row[8], row[0]) / (2 * math.pi) % 1
        bounds = [1 - math.exp(-square * (1 + step) / 2) for step in (-2 * MAX_WIDTH_ERROR, 2 * MAX_WIDTH_ERROR)]
        middle, half_width = sum(bounds) / 2, (bounds[1] - bounds[0]) / 2 + 1e-6
        return ((8, _near_test(24, angle, 1e-5)), (0, _near_test(24, middle, half_width)))

    def _laplace_tests(self, row: NDArray[np.float64]) -> Sequence[tuple[int, OutputTest]]:
        """Returns the tests of a seed of Laplacian noise: each of the row's first numbers, within the width's error."""
        tests = []
        for index, entry in enumerate(row[:NUMBERS_COMPARED]):
            sizes = [
                abs(entry) * math.sqrt(2) / self.width * (1 + step) for step in (-MAX_WIDTH_ERROR, MAX_WIDTH_ERROR)
            ]
            low, high = (0.5 + math.copysign(0.5 * -math.expm1(-size), entry) for size in sizes)
            # of 53 bits, the highest 21 are the lowest of the first output
            tests.append((2 * index, _near_test(21, (low + high) / 2, abs(high - low) / 2 + 2.0**-20)))
        return tests

    def noise(self, shape: torch.Size, seed: int) -> torch.Tensor:
        """Returns the noise that the seed makes, with standard deviation 1, in fp64."""
        generator = torch.Generator().manual_seed(seed)
        if self.is_gaussian:
            return torch.randn(shape, generator=generator, dtype=torch.float32).double()
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        return -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_max(0.5 - 2.0**-54)) / math.sqrt(2)

    def explains(self, grad: torch.Tensor, seed: int) -> bool:
        """Returns whether the first rows of the gradient are the seed's noise, apart from a few of them."""
        first_rows = grad[:ROWS_COMPARED].double()
        noise = self.noise(first_rows.shape, seed).to(first_rows.device)
        return bool(torch.corrcoef(torch.stack([first_rows.flatten(), noise.flatten()]))[0, 1] > MIN_CORRELATION)

    def without_noise(self, grad: torch.Tensor, seed: int) -> torch.Tensor:
        """Returns the gradient without the noise (most entries give its exact width), 0 where only rounding is."""
        noise, noisy = self.noise(grad.shape, seed).to(grad.device), grad.double()
        width = float((noisy[:, 0] / noise[:, 0]).median())
        denoised = noisy - width * noise
        return torch.where(denoised.abs() > MIN_ENTRY * width, denoised, 0.0).float()


def _near_test(bits: int, middle: float, half_width: float) -> OutputTest:
    """Returns a test whether an output's lowest bits, as a number from 0 to 1, are near `middle`, around the circle."""
    mask, scale = np.uint32((1 << bits) - 1), 2.0**-bits

    def test(words: Words) -> NDArray[np.bool_]:
        gap = np.abs((words & mask) * scale - middle)
        return np.minimum(gap, 1 - gap) <= half_width

    return test


def outputs(seeds: Words, indices: Sequence[int]) -> Iterator[Words]:
    """Yields for each of the ascending indices the outputs (n,) of all seeds.

    Indices are below 227: up to there a twist uses words of the initial state only.
    """
    state, high = seeds.copy(), np.empty_like(seeds)
    kept_states: dict[int, Words] = {0: seeds}
    kept_indices = {index + step for index in indices for step in (0, 1)}
    last_words = {index + TWIST_OFFSET for index in indices}
    for i in range(1, max(last_words) + 1):
        np.right_shift(state, np.uint32(30), out=high)
        np.bitwise_xor(state, high, out=state)
        np.multiply(state, np.uint32(1812433253), out=state)
        np.add(state, np.uint32(i), out=state)
        if i in kept_indices:
            kept_states[i] = state.copy()
        if i in last_words:
            index = i - TWIST_OFFSET
            yield _temper(_twist(kept_states[index], kept_states[index + 1], state))


def search(
    tests: Sequence[tuple[int, OutputTest]], first: int, count: int, is_stopped: Callable[[], bool], threads: int = 2
) -> Iterator[int]:
    """Yields every seed, of `count` from `first` on, whose outputs pass their tests.

    `tests` are pairs of an output's index and its test; the first is a sieve. `is_stopped` is asked before some blocks.
    """
    stop = min(first + count, SEED_COUNT)
    starts = range(first, stop, SEEDS_AT_A_TIME)
    with ThreadPoolExecutor(threads) as pool:
        for next_start in range(0, len(starts), 4 * threads):
            if is_stopped():
                return
            blocks = [
                range(start, min(start + SEEDS_AT_A_TIME, stop))
                for start in starts[next_start : next_start + 4 * threads]
            ]
            for passing in pool.map(partial(_passing_seeds, tests), blocks):
                yield from passing


def _passing_seeds(tests: Sequence[tuple[int, OutputTest]], block: range) -> list[int]:
    """Returns the seeds of a block whose outputs pass all tests."""
    seeds = np.arange(block.start, block.stop, dtype=np.uint64).astype(np.uint32)
    sieve_index, sieve_test = tests[0]
    (words,) = outputs(seeds, [sieve_index])
    sieved = seeds[sieve_test(words)]
    if not len(sieved):
        return []
    passed = np.ones(len(sieved), np.bool_)
    test_of_index = dict(tests)
    for index, words in zip(sorted(test_of_index), outputs(sieved, sorted(test_of_index)), strict=True):
        passed &= test_of_index[index](words)
    return sieved[passed].tolist()


def _twist(word: Words, next_word: Words, far_word: Words) -> Words:
    """Returns the Mersenne Twister's next words from the words at j, j + 1 and j + 397."""
    joined = (word & np.uint32(0x80000000)) | (next_word & np.uint32(0x7FFFFFFF))
    return far_word ^ (joined >> np.uint32(1)) ^ ((next_word & np.uint32(1)) * np.uint32(0x9908B0DF))


def _temper(y: Words) -> Words:
    """Returns the outputs that the Mersenne Twister makes of its words."""
    y = y ^ (y >> np.uint32(11))
    y = y ^ ((y << np.uint32(7)) & np.uint32(0x9D2C5680))
    y = y ^ ((y << np.uint32(15)) & np.uint32(0xEFC60000))
    return y ^ (y >> np.uint32(18))

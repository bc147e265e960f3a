"""Exact samples against the literal program, their laws, and what decides a sample that fp64 cannot decide."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import chisquare, kstest, norm
from scipy.stats import laplace as laplacian

from milkglass.noise import rounded
from milkglass.noise.stream import Stream
from tests.noise.kit import FINE, KEY, literal, without_generators

VECTORS = Path(__file__).parents[2] / "vectors" / "noise.json"
LAWS: list[tuple[Callable[..., Any], Callable[..., Any], Any]] = [
    (rounded.gaussian, literal.gaussian_tail, norm()),
    (rounded.laplace, literal.laplace_tail, laplacian()),
]
each_law = pytest.mark.parametrize(("sample", "tail", "law"), LAWS, ids=["gaussian", "laplace"])


@each_law
@pytest.mark.parametrize("ratio", [0.3, 1.0, 37.5, FINE, 2.0**51])
def test_samples_are_the_literal_ones(sample: Any, tail: Any, law: Any, ratio: float) -> None:
    assert sample(Stream(KEY), 40, ratio).tolist() == literal.samples(KEY, 40, ratio, tail)


def test_samples_are_the_known_answers() -> None:
    known = json.loads(VECTORS.read_text("utf-8"))
    for case in known["cases"]:
        sample = getattr(rounded, case["law"])
        assert (
            sample(Stream(bytes.fromhex(known["key"])), len(case["samples"]), case["ratio"]).tolist() == case["samples"]
        )


@each_law
def test_every_sample_worked_out_with_60_digits_is_the_same(
    sample: Any, tail: Any, law: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast way is right wherever it is taken: taken nowhere, nothing changes."""
    fast = sample(Stream(KEY), 300, FINE)
    monkeypatch.setattr(rounded, "INVERSE_ERROR", 1.0)
    assert (sample(Stream(KEY), 300, FINE) == fast).all()


@each_law
def test_the_law_of_few_values_is_that_of_the_bins(sample: Any, tail: Any, law: Any) -> None:
    ratio, count = 0.9, 200_000
    drawn = sample(Stream(KEY), count, ratio)
    edges = (np.arange(-4, 5) - 0.5) / ratio
    inner = np.diff(law.cdf(edges))
    expected = np.concatenate([[law.cdf(edges[0])], inner, [law.sf(edges[-1])]]) * count
    seen = [int((drawn < -4).sum()), *(int((drawn == k).sum()) for k in range(-4, 4)), int((drawn > 3).sum())]
    assert chisquare(seen, expected).pvalue > 1e-3
    assert kstest(sample(Stream(KEY), count, FINE) / FINE, law.cdf).pvalue > 1e-3


@each_law
def test_both_signs_and_all_low_bits_occur_alike(sample: Any, tail: Any, law: Any) -> None:
    drawn = sample(Stream(KEY), 100_000, FINE)
    for bit in [(drawn > 0), *((np.abs(drawn) >> place) & 1 for place in range(8))]:
        assert abs(float(np.mean(bit)) - 0.5) < 5 * 0.5 / math.sqrt(len(drawn))


def test_the_inverse_in_fp64_is_as_good_as_is_assumed() -> None:
    """A two-hundredth of the margin, from the middle to the tail at which 60 digits take over."""
    tails = np.concatenate([2.0 ** -np.linspace(1, 32, 400), 0.5 - 2.0 ** -np.linspace(2, 52, 200)])
    with mpmath.workdps(50):
        for tail, z in zip(tails.tolist(), (-ndtri(tails)).tolist(), strict=True):
            exact = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(tail))
            assert abs(z - exact) <= rounded.INVERSE_ERROR / 200 * (1 + exact)


@each_law
@pytest.mark.parametrize("bits", [0, 1, 5, 2**31])
def test_the_farthest_tail_has_an_answer(sample: Any, tail: Any, law: Any, bits: int) -> None:
    """The probabilities that fp64 is not trusted with, down to 0 followed by the bits of the further stream."""
    more = Stream(KEY).reserve
    found = rounded._magnitude_by_bits(bits, FINE, 0, tail, more)
    width, words = 64, literal.words(KEY, 1)
    whole = bits
    while (expected := literal.magnitude(_part(whole, width), _part(whole + 1, width), _part(FINE, 0), tail)) is None:
        whole, width = (whole << 64) | next(words), width + 64
    assert found == expected and found > 5 * FINE


def _part(number: float, width: int) -> Any:
    return literal.Fraction(number) / 2**width


class Shifted(Stream):
    """The words of KEY's stream plus a multiple of 2^32: equal to them modulo 2^32."""

    def __init__(self, high: int) -> None:
        super().__init__(KEY)
        self.high, self.read = np.uint64(high << 32), 0

    def long_words(self, count: int) -> np.ndarray:
        self.read += count
        return super().long_words(count) + self.high

    def words(self, count: int) -> np.ndarray:
        raise AssertionError("32 bits are too few for a sample")


@each_law
def test_two_streams_equal_modulo_2_to_the_32_give_other_noise(sample: Any, tail: Any, law: Any) -> None:
    """A sampler that hands any 32 bits of a word to another generator would give the same."""
    one, other = Shifted(0), Shifted(0x4000_0001)
    first, second = (sample(stream, 5000, FINE) for stream in (one, other))
    assert (first != second).mean() > 0.99
    assert one.read >= 5000, "a word of 64 secret bits at least for each sample"


@each_law
def test_no_other_generator_is_asked(sample: Any, tail: Any, law: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_generators(monkeypatch)
    sample(Stream(KEY), 100, FINE)


def test_noise_that_is_no_number_is_refused() -> None:
    for ratio in (0.0, -1.0, math.nan, math.inf, 2.0**56):
        with pytest.raises(ValueError, match="grid steps"):
            rounded.gaussian(Stream(KEY), 1, ratio)

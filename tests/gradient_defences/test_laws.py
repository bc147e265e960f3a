"""Noise, clipping, pruning and DP-SGD follow their laws."""

from __future__ import annotations

import math

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, get_epsilon_gaussian
from dp_accounting.rdp import RdpAccountant
from hypothesis import given as drawn_by
from hypothesis import settings
from hypothesis import strategies as st
from scipy.stats import binom, kstest, laplace, norm

from milkglass.errors import UsageError
from milkglass.gradient_defences.defence import NoDefence
from milkglass.gradient_defences.dp_sgd import DPSGD, EXCHANGE_SENSITIVITY, epsilon_after_steps
from milkglass.gradient_defences.noise import AdditiveNoise, GaussianNoise, LaplaceNoise
from milkglass.gradient_defences.pruning import MagnitudePruning, RandomPruning, largest_mask
from milkglass.noise import clipping
from milkglass.threat.training_step import SharedStep
from tests.gradient_defences.kit import IDS, flat, literal, shared

LAWS = [(GaussianNoise, norm()), (LaplaceNoise, laplace(scale=1 / math.sqrt(2)))]


# --- noise ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "law"), LAWS, ids=["gaussian", "laplace"])
@pytest.mark.parametrize(("level", "clip"), [(0.05, 0.1), (0.3, 0.05), (0.05, None)])
def test_noise_follows_its_law_around_the_clipped_gradient(
    bert: SharedStep, kind: type[AdditiveNoise], law: object, level: float, clip: float | None
) -> None:
    bare = shared(bert, NoDefence())
    assert flat(bare).norm() > 0.2, "a gradient that no clip touches tests nothing"
    middle = bare if clip is None else clipping.l2(bare, clip)
    noise = (flat(shared(bert, kind(level, clip))) - flat(middle)).numpy()
    deviation = level * (clip or 1)
    assert kstest(noise / deviation, law.cdf).pvalue > 1e-3  # type: ignore[attr-defined]
    assert noise.std() == pytest.approx(deviation, rel=0.02)
    other = norm() if kind is LaplaceNoise else LAWS[1][1]
    assert kstest(noise / deviation, other.cdf).pvalue < 1e-6, "too few entries to tell the laws apart"


@pytest.mark.parametrize("kind", [GaussianNoise, LaplaceNoise])
def test_entries_and_tensors_draw_by_themselves(bert: SharedStep, kind: type[AdditiveNoise]) -> None:
    bare = shared(bert, NoDefence())
    found = shared(bert, kind(1.0))
    noise = flat({name: found[name] - bare[name] for name in found})
    for lag in (1, 2, 32):
        pair = float((noise[lag:] * noise[:-lag]).mean())
        assert abs(pair) < 4 / math.sqrt(len(noise)), lag
    same = [name for name in found if found[name].shape == (32, 32)]
    assert not torch.allclose(*(found[name] - bare[name] for name in same[:2]))


def test_what_a_gaussian_promises() -> None:
    """Sensitivity 2 C: twice the clip, whatever the clip is. Never below what holds."""
    for clip in (0.1, 1.0, 7.0):
        guarantee = GaussianNoise(4.0, clip).guarantee
        assert guarantee is not None and "one batch" in guarantee
        number = float(guarantee[1:].split(",")[0])
        exact = get_epsilon_gaussian(2.0, 1e-5)
        assert exact <= number <= 1.001 * exact
        assert literal.gaussian_delta(number, 2.0) <= 1e-5
    assert GaussianNoise(0.05, None).guarantee is None
    assert LaplaceNoise().guarantee is None
    guarantee = GaussianNoise().guarantee
    assert guarantee is not None and float(guarantee[1:].split(",")[0]) > 500, (
        "the paper's level promises next to nothing"
    )


def test_what_dp_sgd_spends_in_a_run() -> None:
    """Known values for noise 1, sensitivity 2 and delta 1e-5, and the analytic Gaussian mechanism: k mechanisms are one
    with noise 1 / sqrt(k). Never below what holds."""
    for rounds, known in ((1, 9.99725), (10, 46.2112), (100, 284.3918)):
        guarantee = DPSGD().guarantee_after(rounds)
        assert guarantee is not None and f"DP after {rounds} round" in guarantee
        number = float(guarantee[1:].split(",")[0])
        assert known <= number <= 1.001 * known
        assert literal.gaussian_delta(number, 0.5 / math.sqrt(rounds)) <= 1e-5
        assert literal.gaussian_delta(0.999 * known, 0.5 / math.sqrt(rounds)) > 1e-5
    once = DPSGD().guarantee
    assert once is not None and once.split(",")[0] == str(DPSGD().guarantee_after(1)).split(",")[0]
    assert NoDefence().guarantee_after(10) is None and LaplaceNoise().guarantee_after(10) is None
    with pytest.raises(UsageError, match="steps is 0"):
        DPSGD().guarantee_after(0)


def norm_of(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(math.fsum(x * x for x in flat(tensors).tolist()))


# --- clipping ---------------------------------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@drawn_by(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=12), st.sampled_from([0.1, 1.0, 50.0]))
def test_clipping_is_the_literal_one(values: list[float], most: float) -> None:
    tensors = {"a": torch.tensor(values[:1]), "b": torch.tensor(values[1:])}
    found = flat(clipping.l2(tensors, most))
    assert found.tolist() == pytest.approx(literal.clip(values, most), rel=1e-5, abs=1e-6)
    assert norm_of(clipping.l2(tensors, most)) <= most


def test_a_small_gradient_is_not_touched_and_a_large_one_is_of_the_clip(bert: SharedStep) -> None:
    bare = shared(bert, NoDefence())
    length = norm_of(bare)
    assert all(torch.equal(one, bare[name].double()) for name, one in clipping.l2(bare, 2 * length).items())
    third = norm_of(clipping.l2(bare, length / 3))
    assert third == pytest.approx(length / 3, rel=2e-6) and third <= length / 3
    assert norm_of(clipping.l2({"a": torch.zeros(3)}, 1)) == 0


# --- pruning ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ratio", [0.5, 0.99])
def test_each_entry_is_dropped_with_the_ratio_whatever_its_size(bert: SharedStep, ratio: float) -> None:
    bare, found = flat(shared(bert, NoDefence())), flat(shared(bert, RandomPruning(ratio)))
    there = bare != 0
    kept = found != 0
    assert torch.equal(found[kept], bare[kept])
    low, high = binom(int(there.sum()), 1 - ratio).interval(1 - 1e-4)
    assert low <= int(kept.sum()) <= high
    large = there & (bare.abs() > bare[there].abs().median())
    low, high = binom(int(large.sum()), 1 - ratio).interval(1 - 1e-4)
    assert low <= int((kept & large).sum()) <= high


@pytest.mark.parametrize("ratio", [0.29, 0.5, 0.9, 0.99])
def test_the_largest_of_each_tensor_are_kept(bert: SharedStep, ratio: float) -> None:
    bare, found = shared(bert, NoDefence()), shared(bert, MagnitudePruning(ratio))
    for name, one in found.items():
        assert one.flatten().tolist() == literal.keep_largest(bare[name].flatten().tolist(), str(ratio)), name


def test_the_largest_of_all_are_kept(bert: SharedStep) -> None:
    bare, found = shared(bert, NoDefence()), shared(bert, MagnitudePruning(0.95, "all"))
    whole = [x for one in bare.values() for x in one.flatten().tolist()]
    assert [x for one in found.values() for x in one.flatten().tolist()] == literal.keep_largest(whole, "0.95")


@settings(max_examples=60, deadline=None)
@drawn_by(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(1, 30))
def test_of_equals_the_first(values: list[int], count: int) -> None:
    found = largest_mask(torch.tensor(values, dtype=torch.float32), count)
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    assert {i for i, one in enumerate(found.tolist()) if one} == set(order[:count])


# --- DP-SGD -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clip", [0.05, 1.0, 1e6])
def test_each_text_is_clipped_by_itself(step: SharedStep, clip: float) -> None:
    alone = []
    for number, ids in enumerate(IDS):
        targets = torch.tensor([number]) if step.task == "classification" else None
        alone.append(flat(step.gradient(torch.tensor([ids]), torch.ones(1, len(ids)).long(), targets)).tolist())
    found = flat(shared(step, DPSGD(1e-9 / clip, clip)))
    expected = torch.tensor(literal.mean_of_clipped(alone, clip), dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_sums_with_one_text_exchanged_are_within_what_is_accounted(bert: SharedStep) -> None:
    """The batches that a site can have: of a fixed number of texts, which crosses. Two sums that differ in a label are
    more than a clip apart, and never more than two."""
    ids = torch.tensor([list(IDS[0])] * 3)
    mask, shield = torch.ones_like(ids), DPSGD(1e-9, 1e-3)
    labels = torch.tensor([0, 1, 0])
    other_text = ids.clone()
    other_text[0] = other_text[0].flip(0)

    def total(which: torch.Tensor, named: torch.Tensor) -> torch.Tensor:
        return flat(shield.compute_gradient(bert, which, mask, named))

    base = total(ids, labels)
    for which, named in ((ids, torch.tensor([1, 1, 0])), (other_text, labels), (other_text, torch.tensor([1, 1, 0]))):
        apart = float((total(which, named) - base).norm())
        assert 0 < apart <= EXCHANGE_SENSITIVITY * shield.clip * (1 + 1e-6)
    assert float((total(ids, torch.tensor([1, 1, 0])) - base).norm()) > 1.5 * shield.clip


def test_without_a_clip_that_bites_it_is_the_batch_s_own_gradient(bert: SharedStep) -> None:
    assert torch.allclose(flat(shared(bert, DPSGD(1e-12, 1e6))), flat(shared(bert, NoDefence())), atol=1e-5)


@pytest.mark.parametrize(("noise", "clip"), [(1.0, 1.0), (0.5, 0.1)])
def test_its_noise_is_the_multiplier_times_the_clip_over_the_texts(bert: SharedStep, noise: float, clip: float) -> None:
    middle = flat(shared(bert, DPSGD(1e-12, clip)))
    found = (flat(shared(bert, DPSGD(noise, clip))) - middle).numpy() / (noise * clip / len(IDS))
    assert kstest(found, norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (2.0, 10), (0.7, 3)])
def test_epsilon_is_the_gaussian_s_own_and_never_below(noise: float, steps: int) -> None:
    exact = get_epsilon_gaussian(noise / math.sqrt(steps), 1e-5)
    found = epsilon_after_steps(noise, 1e-5, steps)
    assert exact <= found <= 1.01 * exact
    assert literal.gaussian_delta(found, noise / math.sqrt(steps)) <= 1e-5 * (1 + 1e-6)


def test_epsilon_with_sampling() -> None:
    """Below the moments accountant's bound, above what a finer one finds, and growing with the steps."""
    event = SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1)), 1000)
    moments = RdpAccountant().compose(event).get_epsilon(1e-5)
    found = epsilon_after_steps(1.1, 1e-5, 1000, 0.01)
    assert 0.7 * moments < found < moments
    assert found >= 1.5153, "dp-accounting's finer distributions find 1.51537, and err upward by less than 1e-4"
    assert found < epsilon_after_steps(1.1, 1e-5, 2000, 0.01) < epsilon_after_steps(1.1, 1e-5, 1000)


def test_what_dp_sgd_promises_is_rounded_up() -> None:
    guarantee = DPSGD(1.3).guarantee
    assert guarantee is not None and "one text or label" in guarantee
    assert (
        epsilon_after_steps(0.65, 1e-5, 1)
        <= float(guarantee[1:].split(",")[0])
        <= 1.001 * epsilon_after_steps(0.65, 1e-5, 1)
    )
    for wrong in (
        {"step_count": 0},
        {"delta": 0.0},
        {"delta": 1.0},
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.1},
        {"noise_multiplier": math.nan},
    ):
        with pytest.raises(UsageError):
            epsilon_after_steps(**({"noise_multiplier": 1.0, "delta": 1e-5, "step_count": 1} | wrong))  # type: ignore[arg-type]

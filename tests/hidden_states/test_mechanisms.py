"""Each mechanism against the literal one with the same noise, and its noise against its law."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from milkglass.hidden_states import cape, textmixer, textobfuscator
from milkglass.hidden_states.cape import CAPE
from milkglass.hidden_states.dp_forward import DPForward
from milkglass.hidden_states.textobfuscator import TextObfuscator
from milkglass.noise import grid, rounded
from milkglass.noise.root import NoiseRoot, NoiseStream
from tests.hidden_states.kit import SECRET, literal

KEY = b"\7" * 32


def states(t: int = 7, d: int = 16, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(scale * np.random.default_rng(seed).normal(size=(t, d))).float()


def as64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def noise(law: str, width: float, *shape: int) -> np.ndarray:
    """What the mechanism draws under KEY, with standard deviation or scale 1."""
    step = grid.step_size(width)
    drawn = getattr(rounded, law)(NoiseStream(KEY).stream, int(np.prod(shape)), width / step)
    return (drawn * step / width).reshape(shape)


# --- draws ------------------------------------------------------------------------------------------------------------
def test_draws_follow_their_laws() -> None:
    draws = NoiseStream(KEY)
    gaussian = draws.gaussian(200, 500).flatten().numpy()
    assert kstest(gaussian, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(gaussian[:-1], gaussian[1:])[0, 1]) < 0.02
    counts = np.bincount(draws.stream.integers(7, 70_000), minlength=7)
    assert len(counts) == 7
    assert (abs(counts - 10_000) < 5 * 93).all()
    assert sorted(draws.order(50).tolist()) == list(range(50))


def test_one_text_has_one_stream_and_two_texts_have_two() -> None:
    root, ids = NoiseRoot(SECRET, "a"), np.array([5, 6, 7])
    first = root.of_text(ids, "send", 0).gaussian(50)
    assert torch.equal(first, root.of_text(ids, "send", 0).gaussian(50))
    others = [
        root.of_text(np.array([5, 6, 8]), "send", 0),
        root.of_text(ids, "send", 1),
        NoiseRoot(SECRET, "b").of_text(ids, "send", 0),
        NoiseRoot(SECRET[::-1], "a").of_text(ids, "send", 0),
    ]
    for other in others:
        assert abs(np.corrcoef(first.numpy(), other.gaussian(50).numpy())[0, 1]) < 0.6


# --- DP-Forward -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [0.001, 1.0, 100.0])
def test_dp_forward_is_the_literal_one(scale: float) -> None:
    defence, x = DPForward(epsilon=3.0, clip=2.0), states(scale=scale)
    expected = literal.dp_forward(as64(x), 2.0, defence.sigma, noise("gaussian", defence.sigma, 7, 16))
    assert np.allclose(defence.mechanism(x, NoiseStream(KEY)).numpy(), expected, atol=1e-5)


def test_dp_forward_adds_gaussian_noise_of_sigma_around_a_matrix_of_norm_c() -> None:
    defence, x = DPForward(epsilon=8.0), states(300, 200, 50.0)
    noise = (defence.mechanism(x, NoiseStream(KEY)) - x / x.norm()).flatten().numpy()
    assert np.std(noise) == pytest.approx(2 * 0.6002, rel=0.01)
    assert kstest(noise / defence.sigma, "norm").pvalue > 1e-3


def test_two_clipped_texts_are_never_further_apart_than_the_sensitivity() -> None:
    still = DPForward(epsilon=1e6, clip=1.5)  # sigma is about 1e-3
    for seed in range(20):
        one, two = (still.mechanism(states(scale=10.0, seed=seed + at), NoiseStream(KEY)) for at in (0, 100))
        assert float((one - two).norm()) <= 3.0 + 1e-4
    x = states(scale=10.0)
    assert float(
        (still.mechanism(x, NoiseStream(KEY)) - still.mechanism(-x, NoiseStream(KEY))).norm()
    ) == pytest.approx(3.0, abs=1e-4)


# --- CAPE -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("calibration", "scale"), [("paper", 1 / 5), ("strict", 16 / 5)])
def test_cape_is_the_literal_one(calibration: str, scale: float) -> None:
    x, z = states(), noise("laplace", scale, 16)
    found = CAPE(calibration=calibration).mechanism(x, NoiseStream(KEY))  # type: ignore[arg-type]
    assert found.shape == (1, 16)
    assert np.allclose(found[0].numpy(), literal.cape(as64(x), scale, z), atol=1e-5)


def test_cape_adds_laplace_noise_to_numbers_between_0_and_1() -> None:
    x = states(4, 50_000)
    z = cape.normalise(x.mean(0))
    assert (float(z.min()), float(z.max())) == (0.0, 1.0)
    noise = (CAPE(epsilon=2.0).mechanism(x, NoiseStream(KEY))[0] - z).numpy()
    assert kstest(noise * 2.0, "laplace").pvalue > 1e-3


def test_a_vector_without_spread_is_one_half() -> None:
    assert torch.equal(cape.normalise(torch.full((4,), 3.0)), torch.full((4,), 0.5))


def test_the_adversary_weighs_words_as_the_literal_one_does() -> None:
    scores, bag = states(5, 9), (states(5, 9, seed=3) > 0.8).float()
    assert 0 < bag.sum() < bag.numel()
    assert float(cape.balanced_loss(scores, bag)) == pytest.approx(literal.balanced(as64(scores), as64(bag)), rel=1e-5)
    assert float(cape.balanced_loss(scores, 0 * bag)) == pytest.approx(
        literal.balanced(as64(scores), as64(0 * bag)), rel=1e-5
    )


def test_the_adversarys_gradient_turns_round_before_the_encoder() -> None:
    vector = states(3, 8).requires_grad_()
    weight = states(8, 1, seed=2).requires_grad_()
    (cape.GradientReversal.apply(vector) @ weight).sum().backward()
    reversed_, kept = vector.grad.clone(), weight.grad.clone()
    vector.grad = weight.grad = None
    (vector @ weight).sum().backward()
    assert torch.equal(reversed_, -vector.grad)
    assert torch.equal(kept, weight.grad)


# --- TextObfuscator ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clip", [None, 0.3, 5.0])
def test_textobfuscator_is_the_literal_one(clip: float | None) -> None:
    x, z = states(), noise("laplace", 0.7, 7, 16)
    found = TextObfuscator(clip=clip, scale=0.7).mechanism(x, NoiseStream(KEY))
    assert np.allclose(found.numpy(), literal.textobfuscator(as64(x), clip, 0.7, z), atol=1e-5)


def test_textobfuscators_noise_is_laplace_and_a_state_is_bounded() -> None:
    x = states(200, 300, 9.0)
    bounded = TextObfuscator(clip=0.4, scale=0.0).mechanism(x, NoiseStream(KEY))
    assert torch.allclose(bounded.abs().mean(1), torch.tensor(0.4), atol=1e-4)
    noise = (TextObfuscator(clip=0.4, scale=0.5).mechanism(x, NoiseStream(KEY)) - bounded).flatten().numpy()
    assert kstest(noise / 0.5, "laplace").pvalue > 1e-3


@pytest.mark.parametrize("count", [1, 2, 4])
def test_both_losses_of_textobfuscator_are_the_literal_ones(count: int) -> None:
    x = states(12)
    clusters = torch.arange(12) % count
    auxiliary = textobfuscator.Centres(torch.zeros(3, dtype=torch.long), count, 16)
    means, present = auxiliary.batch_means(x, clusters)
    assert float(textobfuscator.repulsion_loss(means)) == pytest.approx(
        literal.away(as64(x), clusters.tolist()), rel=1e-4
    )
    auxiliary.update(means, present)
    expected = literal.close(as64(x), clusters.tolist(), as64(means))
    assert float(textobfuscator.attraction_loss(x, auxiliary.centres[clusters])) == pytest.approx(expected, rel=1e-5)


def test_a_centre_follows_its_tokens_and_leaves_others_alone() -> None:
    auxiliary = textobfuscator.Centres(torch.zeros(3, dtype=torch.long), 3, 2)
    auxiliary.update(torch.tensor([[1.0, 1.0]]), torch.tensor([1]))
    auxiliary.update(torch.tensor([[2.0, 1.0]]), torch.tensor([1]))
    assert torch.allclose(auxiliary.centres, torch.tensor([[0.0, 0.0], [1.1, 1.0], [0.0, 0.0]]))
    assert auxiliary.seen.tolist() == [False, True, False]


def test_clusters_find_groups_that_are_far_apart() -> None:
    groups = torch.arange(60) % 3
    rows = 10.0 * torch.eye(8)[groups] + 0.1 * states(60, 8)
    for key in range(3):  # Lloyd's rounds may begin with two rows of one group
        found = textobfuscator.k_means(rows, 6, NoiseStream(bytes([key]) * 32))
        pairs = {(int(a), int(b)) for a, b in zip(found, groups, strict=True)}
        assert len(pairs) == len(set(found.tolist())), "a cluster holds rows of two groups"


# --- TextMixer --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mixing", ["hadamard", "rotation"])
def test_mixing_is_the_literal_one(mixing: str) -> None:
    keys = textmixer.keys_of(NoiseRoot(SECRET, "x"), mixing, 3, 16)
    parts = [states(5), states(9, seed=1), states(2, seed=2)]
    expected = literal.mixed([as64(one) for one in parts], [as64(one) for one in keys], 6)
    assert np.allclose(textmixer.mixture(parts, keys, 6).numpy(), expected, atol=1e-5)


def test_rotations_are_orthogonal_and_differ_from_place_to_place() -> None:
    one, two = textmixer.keys_of(NoiseRoot(SECRET, "x"), "rotation", 2, 16)
    assert torch.allclose(one @ one.T, torch.eye(16), atol=1e-5)
    assert not torch.allclose(one, two, atol=0.1)

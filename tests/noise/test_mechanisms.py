"""What every mechanism releases: a whole number of steps, drawn from nothing but a key stream, bound to its data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from milkglass.gradient_defences.defence import GradientDefence
from milkglass.gradient_defences.dp_sgd import DPSGD
from milkglass.gradient_defences.noise import GaussianNoise, LaplaceNoise
from milkglass.hidden_states.cape import CAPE
from milkglass.hidden_states.dp_forward import DPForward
from milkglass.hidden_states.textobfuscator import TextObfuscator
from milkglass.noise import grid
from milkglass.noise.root import NoiseStream
from milkglass.noise.stream import Stream, stream_for
from tests.noise.kit import KEY, without_generators

STATES = [  # a mechanism, the width of its noise, and the bound of its data, for 64 dimensions
    (DPForward(epsilon=8.0), DPForward(epsilon=8.0).sigma, 1.0),
    (DPForward(epsilon=1.0, clip=3.0), DPForward(epsilon=1.0, clip=3.0).sigma, 3.0),
    (CAPE(epsilon=3.0), 1 / 3, 1.0),
    (CAPE(epsilon=3.0, calibration="strict"), 64 / 3, 1.0),
    (TextObfuscator(clip=0.4, scale=0.7), 0.7, 0.4 * 64),
    (TextObfuscator(clip=None, scale=0.7), 0.7, None),
]
SHIELDS = [
    (DPSGD(0.7, 1.3), 0.7 * 1.3),
    (GaussianNoise(0.3, 0.7), 0.3 * 0.7),
    (LaplaceNoise(0.3, 0.7), 0.3 * 0.7 / 2**0.5),
]


def whole(numbers: torch.Tensor, step: float) -> bool:
    """Whether they are multiples of the step, up to what fp32 rounds away: those below 2^24 steps are exact."""
    steps = numbers.double() / step
    small = steps.abs() < 2**24
    return bool(small.any()) and torch.equal(steps[small], steps[small].round())


@pytest.mark.parametrize(("mechanism", "width", "most"), STATES, ids=lambda one: getattr(one, "name", None))
def test_states_are_sent_on_the_grid(mechanism: Any, width: float, most: float | None) -> None:
    step = grid.step_size(width, most)
    for seed in range(10):
        hidden = torch.from_numpy(np.random.default_rng(seed).normal(size=(9, 64))).float()
        assert whole(mechanism.mechanism(hidden, NoiseStream(Stream.of_seed(seed))), step)


@pytest.mark.parametrize(("shield", "width"), SHIELDS, ids=lambda one: getattr(one, "name", None))
def test_gradients_are_shared_on_the_grid(shield: GradientDefence, width: float) -> None:
    """One text, so that DP-SGD divides by 1; the tensors that DP-SGD is given here are cut by it before."""
    step = grid.step_size(width, getattr(shield, "clip", None))
    tensors = {"a": torch.from_numpy(np.random.default_rng(0).normal(size=(40, 8))).float() / 20}
    assert whole(shield.protect_gradient(tensors, 1, Stream(KEY))["a"], step)


@pytest.mark.parametrize(("mechanism", "width", "most"), STATES, ids=lambda one: getattr(one, "name", None))
def test_states_are_drawn_from_the_stream_alone(
    mechanism: Any, width: float, most: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.linspace(-1, 1, 192).reshape(3, 64)
    without_generators(monkeypatch)
    mechanism.mechanism(hidden, NoiseStream(KEY))


def test_noise_is_bound_to_every_bit_of_the_data() -> None:
    """The last bit of one number of many: all noise is another. With one noise the difference would name the number."""
    tensors = {"a": torch.ones(50), "b": torch.zeros(4, 4)}
    close = {**tensors, "a": tensors["a"].clone()}
    close["a"][7] = torch.nextafter(close["a"][7], torch.tensor(2.0))
    draws = [
        stream_for(one, Stream(KEY)).long_words(64)
        for one in (tensors, tensors, close, {**tensors, "c": torch.ones(1)})
    ]
    assert (draws[0] == draws[1]).all()
    assert not (draws[0] == draws[2]).any() and not (draws[0] == draws[3]).any()
    stream = Stream(KEY)
    stream_for(tensors, stream)
    assert (stream.long_words(3) == Stream(KEY).long_words(3)).all(), "the stream itself does not move on"

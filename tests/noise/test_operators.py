"""Dropout inside `drawing_from` follows the stream and nothing else, and no random operator slips through."""

from __future__ import annotations

import pytest
import torch

from milkglass.errors import UnsupportedModel
from milkglass.noise.operators import drawing_from
from milkglass.noise.stream import Stream
from tests.noise.kit import KEY


def dropped(key: bytes, p: float = 0.3) -> torch.Tensor:
    with drawing_from(Stream(key)):
        return torch.nn.functional.dropout(torch.ones(20_000), p)


def test_dropout_is_the_streams() -> None:
    state = torch.random.get_rng_state()
    first = dropped(KEY)
    torch.manual_seed(3)
    assert torch.equal(dropped(KEY), first) and not torch.equal(dropped(b"\1" * 32), first)
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert float((first == 0).float().mean()) == pytest.approx(0.3, abs=0.02)
    torch.random.set_rng_state(state)
    dropped(KEY)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_extremes(p: float) -> None:
    assert torch.equal(dropped(KEY, p), torch.full((20_000,), 1 - p))


def test_the_gradient_goes_through_the_same_mask() -> None:
    x = torch.ones(1000, requires_grad=True)
    with drawing_from(Stream(KEY)):
        y = torch.nn.functional.dropout(x, 0.5)
        y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_attention_drops_from_the_stream_too() -> None:
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))

    def attend(key: bytes) -> torch.Tensor:
        with drawing_from(Stream(key)):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    assert torch.equal(attend(KEY), attend(KEY)) and not torch.equal(attend(KEY), attend(b"\1" * 32))


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.randn(3), lambda: torch.rand(3), lambda: torch.randperm(3), lambda: torch.randint(3, (2,)),
     lambda: torch.multinomial(torch.ones(3), 1), lambda: torch.empty(3).uniform_(), lambda: torch.ones(3).normal_(),
     lambda: torch.nn.functional.rrelu(torch.randn(3), training=True)],
    ids=["randn", "rand", "randperm", "randint", "multinomial", "uniform_", "normal_", "rrelu"],
)  # fmt: skip
def test_any_other_random_operator_is_refused(draw: object) -> None:
    with drawing_from(Stream(KEY)), pytest.raises(UnsupportedModel, match="32 bits"):
        draw()  # type: ignore[operator]

"""What crosses the wire: the same numbers come out, and nothing that `encode` does not make gets in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from milkglass.errors import BadUpload
from milkglass.hidden_states import frames
from milkglass.threat.observations import Activations


def made(lengths: list[int], d: int = 4, layer: int = 2, pooled: bool = False) -> Activations:
    hidden = torch.from_numpy(np.random.default_rng(0).normal(size=(sum(lengths), d))).float()
    return Activations(hidden, np.array(lengths, np.int64), layer, pooled)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=5), st.integers(1, 6), st.integers(0, 24))
def test_a_frame_gives_back_what_went_in(lengths: list[int], d: int, layer: int) -> None:
    sent = made(lengths, d, layer)
    found = frames.decode(frames.encode(sent))
    assert torch.equal(found.hidden, sent.hidden)
    assert found.lengths.tolist() == lengths
    assert (found.layer, found.pooled) == (layer, False)


def test_a_pooled_frame_says_so() -> None:
    assert frames.decode(frames.encode(made([1, 1, 1], pooled=True))).pooled


def parts(**changed: torch.Tensor) -> bytes:
    whole = {"hidden": torch.zeros(5, 4), "lengths": torch.tensor([2, 3]), "about": torch.tensor([1, 0])}
    return save({**whole, **changed})


BAD = {
    "nothing": b"",
    "no file": b"\x80\x04pickle?",
    "lengths too long": parts(lengths=torch.tensor([2, 4])),
    "an empty text": parts(lengths=torch.tensor([5, 0])),
    "a negative length": parts(lengths=torch.tensor([7, -2])),
    "lengths that overflow": parts(lengths=torch.tensor([2**63 - 1, -(2**63) + 6])),
    "other numbers": parts(hidden=torch.zeros(5, 4, dtype=torch.float16)),
    "another rank": parts(hidden=torch.zeros(5, 4, 1)),
    "not finite": parts(hidden=torch.full((5, 4), float("nan"))),
    "a layer below": parts(about=torch.tensor([-1, 0])),
    "a layer beyond": parts(about=torch.tensor([5000, 0])),
    "pooled in part": parts(about=torch.tensor([1, 2])),
    "pooled and long": parts(about=torch.tensor([1, 1])),
    "one tensor more": parts(more=torch.zeros(1)),
}


@pytest.mark.parametrize("name", BAD)
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(BadUpload):
        frames.decode(BAD[name])


def test_the_good_one_of_these_is_not() -> None:
    assert frames.decode(parts()).lengths.tolist() == [2, 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_frame_is_refused_or_still_checked(place: int, change: int) -> None:
    frame = bytearray(frames.encode(made([2, 3])))
    frame[place % len(frame)] ^= change
    try:
        found = frames.decode(bytes(frame))
    except BadUpload:
        return
    assert int(found.lengths.sum()) == len(found.hidden)
    assert torch.isfinite(found.hidden).all()


def test_a_cut_frame_is_refused() -> None:
    frame = frames.encode(made([2, 3]))
    for end in range(0, len(frame), 7):
        with pytest.raises(BadUpload):
            frames.decode(frame[:end])


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = frames.encode(made([2, 3]))
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", len(frame) - 1)
    with pytest.raises(BadUpload, match=rf"\b{len(frame)} bytes\b.*\b{len(frame) - 1}\b"):
        frames.decode(frame)

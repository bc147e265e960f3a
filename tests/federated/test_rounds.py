"""What is made of updates, and which are refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from milkglass.errors import InvalidUpdate, TooFewSites, UsageError
from milkglass.federated.rounds import Update, check_update, first_misfit, mean_update, step_weights

WEIGHTS = {"w": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(2)}


def update(site: str, seed: int, text_count: int) -> Update:
    made = torch.Generator().manual_seed(seed)
    return Update(site, {name: torch.randn(one.shape, generator=made) for name, one in WEIGHTS.items()}, text_count)


def test_the_mean_is_weighted_by_texts_and_order_changes_nothing() -> None:
    one, two, three = update("a", 1, 3), update("b", 2, 5), update("c", 3, 2)
    found = mean_update([one, two, three], WEIGHTS)
    for name in WEIGHTS:
        by_hand = (3 * one.tensors[name] + 5 * two.tensors[name] + 2 * three.tensors[name]) / 10
        assert torch.allclose(found[name], by_hand, atol=1e-6)
        assert torch.equal(found[name], mean_update([three, one, two], WEIGHTS)[name])
        assert torch.allclose(step_weights(WEIGHTS, found, 0.1)[name], WEIGHTS[name] - 0.1 * by_hand, atol=1e-6)
    assert torch.equal(mean_update([one], WEIGHTS)["w"], one.tensors["w"])


def spoiled(name: str, tensor: torch.Tensor | None) -> Update:
    good = update("north", 1, 3)
    tensors = dict(good.tensors) | ({} if tensor is None else {name: tensor})
    if tensor is None:
        del tensors[name]
    return replace(good, tensors=tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "fault"),
    [
        ("w", torch.zeros(3, 2), "w of shape (3, 2), not (2, 3)"),
        ("w", torch.zeros(2, 3, 1), "w of shape (2, 3, 1)"),
        ("w", torch.zeros(2, 3, dtype=torch.float64), "w as torch.float64"),
        ("w", torch.tensor([[0, 0, 0], [0, 0, float("nan")]]), "w with 1 of 6 "),
        ("b", torch.tensor([float("inf"), float("-inf")]), "b with 2 of 2 "),
        ("b", None, "no b"),
        ("x" * 200, torch.zeros(1), f"({'x' * 60})"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_by_site_and_tensor(
    name: str, tensor: torch.Tensor | None, fault: str
) -> None:
    for refused in (lambda one: check_update(one, WEIGHTS), lambda one: mean_update([update("a", 1, 3), one], WEIGHTS)):
        with pytest.raises(InvalidUpdate, match=f"site north .*{re.escape(fault)}"):
            refused(spoiled(name, tensor))


@pytest.mark.parametrize("text_count", [0, -1, 2.5, True])
def test_a_site_that_counts_wrongly_is_refused(text_count: int) -> None:
    with pytest.raises(InvalidUpdate, match=f"site a .*{text_count} texts"):
        check_update(replace(update("a", 1, 3), text_count=text_count), WEIGHTS)


def test_what_came_from_elsewhere_fits_or_is_told() -> None:
    assert first_misfit(WEIGHTS, WEIGHTS) is None
    assert first_misfit({"b": torch.ones(2)}, WEIGHTS) == "no w"
    assert first_misfit(WEIGHTS | {"b": torch.ones(1)}, WEIGHTS) == "b of shape (1,), not (2,)"


def test_finite_updates_that_add_up_to_more_than_fits() -> None:
    large = [replace(update(site, 1, 1), tensors={n: torch.full_like(w, 3e38) for n, w in WEIGHTS.items()})
             for site in "ab"]  # fmt: skip
    with pytest.raises(InvalidUpdate, match="w not finite"):
        step_weights(WEIGHTS, mean_update(large, WEIGHTS), 100.0)


def test_too_few_and_two_of_one_name() -> None:
    with pytest.raises(TooFewSites, match=r"\b1 sites\b.*\b2\b"):
        mean_update([update("a", 1, 3)], WEIGHTS, 2)
    with pytest.raises(TooFewSites, match="0 sites"):
        mean_update([], WEIGHTS)
    with pytest.raises(UsageError, match="same site"):
        mean_update([update("a", 1, 3), update("a", 2, 3)], WEIGHTS)

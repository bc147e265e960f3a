"""FedSGD and FedAvg (McMahan et al. 2017, algorithm 1): how the updates of one round become new weights.

    w <- w - lr sum over sites of n_k / n u_k,     n_k: texts of site k, n: of all sites that answered

A site is weighted by the number of texts that it reports. Only the site can count them: run.py bounds the number, and a
site that claims the most allowed weighs most.

FedSGD: u_k is the gradient of a batch of n_k texts. FedAvg: u_k is the sum of the gradients of the site's local steps,
each taken where the one before ended. So w - lr u_k are the weights that the site arrived at, and the rule is the mean
of all sites' weights. The paper's sites send the weights themselves; anyone with w has both.

An update is checked before it is used. A check finds what is broken, not what is meant to harm: a site may send any
finite numbers of the right shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from milkglass.errors import InvalidUpdate, TooFewSites, UsageError

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Update:
    """Holds what a site sends in a round.

    Attributes:
        site: the site's name.
        tensors: a gradient, or the sum of several, by parameter name.
        text_count: how many texts the site saw.
        step_count: how many steps the site took; 1 in FedSGD.
    """

    site: str
    tensors: Tensors = field(repr=False)
    text_count: int
    step_count: int = 1


def check_update(update: Update, weights: Tensors) -> None:
    """Raises InvalidUpdate, with the site and the first tensor by name, if an update does not fit the weights."""
    if type(update.text_count) is not int or update.text_count < 1:
        raise InvalidUpdate(f"site {update.site} says that it saw {update.text_count!r} texts", "it must be at least 1")
    if fault := first_misfit(update.tensors, weights):
        hint = "nothing of this round was used: mend the site or leave it out, and run it again"
        raise InvalidUpdate(f"site {update.site} sent {fault}", hint)


def first_misfit(tensors: Tensors, expected: Tensors) -> str | None:
    """Returns, in words, the first tensor by name that differs from what is expected; None if all fit.

    A tensor differs in name, shape or dtype, or has numbers that are not finite.
    """
    if unknown_names := sorted({*tensors} - {*expected}):
        printable = "".join(c for c in unknown_names[0] if c.isprintable())[:60]
        return f"a tensor of a name that is not trained ({printable})"
    for name in sorted(expected):
        tensor = tensors.get(name)
        if tensor is None:
            return f"no {name}"
        if tensor.shape != expected[name].shape:
            return f"{name} of shape {tuple(tensor.shape)}, not {tuple(expected[name].shape)}"
        if tensor.dtype != expected[name].dtype:
            return f"{name} as {tensor.dtype}, not {expected[name].dtype}"
        if nonfinite_count := int((~torch.isfinite(tensor)).sum()):
            return f"{name} with {nonfinite_count:,} of {tensor.numel():,} numbers not finite"
    return None


def mean_update(updates: Sequence[Update], weights: Tensors, minimum: int = 1) -> dict[str, torch.Tensor]:
    """Returns the mean of all updates, weighted by their texts, after checking each. Their order does not matter.

    Raises InvalidUpdate for one that does not fit, TooFewSites below `minimum`, and UsageError for two of one site.
    """
    ordered = sorted(updates, key=lambda update: update.site)
    if len({update.site for update in ordered}) < len(ordered):
        raise UsageError("two updates of one round have the same site", "give each site a name of its own")
    if len(ordered) < max(1, minimum):
        raise TooFewSites(
            f"{len(ordered)} sites sent an update, at least {max(1, minimum)} are needed",
            "bring a site back, or lower the minimum; then run it again, which goes on with this round",
        )
    for update in ordered:
        check_update(update, weights)
    text_count = sum(update.text_count for update in ordered)
    return {
        name: torch.stack([update.tensors[name] * (update.text_count / text_count) for update in ordered]).sum(0)
        for name in weights
    }


def step_weights(weights: Tensors, update: Tensors, lr: float) -> dict[str, torch.Tensor]:
    """Returns the weights after a round with the mean update `update`.

    Raises InvalidUpdate if finite updates overflow when added.
    """
    stepped = {name: tensor - lr * update[name] for name, tensor in weights.items()}
    for name, tensor in stepped.items():
        if not torch.isfinite(tensor).all():
            raise InvalidUpdate(f"the round's updates leave {name} not finite", f"give a learning rate below {lr}")
    return stepped


def l2_norm(update: Tensors) -> float:
    """Returns the L2 norm of an update."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in update.values()))

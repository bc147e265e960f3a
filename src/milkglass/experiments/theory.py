"""GHOST's section 5.2: whether its assumptions' bound exists, and which deviation grows faster (Figures 3 and 4).

With x a text and x' its shadow, t the model before, t* and t' after training on texts and on shadows:

    drift*, drift'        |t* - t|, |t' - t|                                    Assumption 3
    loss, gradient        |L(x; t) - L(x'; t)|, |grad L(x; t) - grad L(x'; t)|  Assumption 4, a number for each pair
    epsilon               the largest of the four, for each pair; "local": of the last two
    deviations            the same two differences at t', against epsilon: a straight line by least squares

The bound "exists" for any finite numbers: what Figure 3 shows is how large it is. And a slope is not dimensionless: a
gradient's norm over all parameters and a loss have other units, so that one slope being larger says less than the
paper concludes. So the slopes are told as shares of each deviation's mean as well, where units cancel.

What this module does not know: training.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.experiments.owner import Rows
from milkglass.sequences import Ids
from milkglass.shared_step import SharedStep


def check(
    before: SharedStep, plain: SharedStep, ghost: SharedStep, texts: Rows, shadows: Rows
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The figures, and for each pair "loss", "gradient", "local", "epsilon", "loss after" and "gradient after"."""
    losses, gradients = deviations(before, texts, shadows)
    after_losses, after_gradients = deviations(ghost, texts, shadows)
    drifts = drift(before, plain), drift(before, ghost)
    local = np.maximum(losses, gradients)
    epsilon = np.maximum(local, max(drifts))
    found = {
        "drift, texts": drifts[0],
        "drift, shadows": drifts[1],
        "loss deviation": float(losses.mean()),
        "gradient deviation": float(gradients.mean()),
        "epsilon, mean": float(epsilon.mean()),
        "epsilon, largest": float(epsilon.max()),
        "loss deviation after": float(after_losses.mean()),
        "gradient deviation after": float(after_gradients.mean()),
    }
    for name, values in (("loss", after_losses), ("gradient", after_gradients)):
        steep = slope(epsilon, values)
        found[f"slope of the {name} deviation"] = steep
        found[f"slope of the {name} deviation, of its mean"] = steep / float(values.mean())
    columns = (losses, gradients, local, epsilon, after_losses, after_gradients)
    names = ("loss", "gradient", "local", "epsilon", "loss after", "gradient after")
    return found, {name: column.tolist() for name, column in zip(names, columns, strict=True)}


def drift(before: SharedStep, after: SharedStep) -> float:
    """|t' - t| over all that is trained."""
    first, second = (dict(one.module.named_parameters()) for one in (before, after))
    squares = [float((second[n] - first[n]).detach().double().square().sum()) for n in before.names]
    return math.sqrt(sum(squares))


def deviations(step: SharedStep, texts: Rows, shadows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(b,) how far the loss of each text is from its shadow's, and (b,) how far its gradient."""
    losses, gradients = [], []
    for i, (one, other) in enumerate(zip(texts.ids, shadows.ids, strict=True)):
        target = None if texts.labels is None else torch.tensor([int(texts.labels[i])])
        (loss, own), (loss_, shadow) = (_at(step, ids, target) for ids in (one, other))
        losses.append(abs(loss - loss_))
        gradients.append(math.sqrt(sum(float((own[n] - shadow[n]).double().square().sum()) for n in own)))
    return np.array(losses), np.array(gradients)


def _at(step: SharedStep, ids: Ids, target: torch.Tensor | None) -> tuple[float, dict[str, torch.Tensor]]:
    row = torch.from_numpy(ids)[None]
    mask = torch.ones_like(row)
    with torch.no_grad():
        loss = float(step.loss(step.embedded(row), mask, row if target is None else target))
    return loss, step.gradient(row, mask, target)


def slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Of the line of least squares; nan where x does not vary."""
    spread = x - x.mean()
    below = float(spread @ spread)
    return float(spread @ (y - y.mean())) / below if below > 0 else float("nan")

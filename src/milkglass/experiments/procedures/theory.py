"""GHOST's section 5.2: whether its assumptions' bound exists, and which deviation grows faster (Figures 3 and 4).

With x a text and x' its shadow, t the model before, t* and t' after training on texts and on shadows:

    drift*, drift'        |t* - t|, |t' - t|                                    Assumption 3
    loss, gradient        |L(x; t) - L(x'; t)|, |grad L(x; t) - grad L(x'; t)|  Assumption 4, a number for each pair
    epsilon               the largest of the four, for each pair; "local": of the last two
    deviations            the same two differences at t', against epsilon, and against the local one: straight lines by
                          least squares

The bound "exists" for any finite numbers; Figure 3 shows how large it is. A slope has units: a gradient's norm over all
parameters and a loss have different ones, so that a larger slope says less than the paper concludes. So slopes are also
reported as shares of each deviation's mean, which have none. If a drift exceeds both deviations of every pair, epsilon
is constant and no line is defined: the slope is then missing, with a reason. The local epsilon's slope remains.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.experiments.procedures.private_rows import PrivateRows
from milkglass.sequences import Ids
from milkglass.threat.training_step import SharedStep

Floats = NDArray[np.float64]
ROUNDING_SHARE = 1e-9  # of the largest epsilon: numbers that vary less are one number, computed in fp32


@dataclass(frozen=True)
class FittedLine:
    """Describes the line y = slope x + intercept."""

    slope: float
    intercept: float


@dataclass(frozen=True)
class TheoryFigures:
    """Holds the measurements for section 5.2 of GHOST.

    Attributes:
        figures: the values by name.
        pairs: (pairs,) the values of each pair by the names "loss", "gradient", "local", "epsilon", "loss after" and
            "gradient after".
        lines: the lines of Figure 4, by "DEVIATION, EPSILON".
        undefined: the reason for each undefined figure.
    """

    figures: dict[str, float]
    pairs: dict[str, list[float]]
    lines: dict[str, FittedLine]
    undefined: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns pairs, lines and undefined figures as JSON-like data, from which the plots are drawn."""
        lines = {name: asdict(line) for name, line in self.lines.items()}
        return {"pairs": self.pairs, "lines": lines, "undefined": self.undefined}


def measure_theory(
    initial: SharedStep, plain: SharedStep, ghost: SharedStep, texts: PrivateRows, shadows: PrivateRows
) -> TheoryFigures:
    """Measures the theory's quantities before the training, and after it on plain texts and on shadows.

    Args:
        initial: the model before the training.
        plain: the model that was trained on the texts.
        ghost: the model that was trained on their shadows.
        shadows: the rows after GHOST.
    """
    losses, gradients = deviations(initial, texts, shadows)
    after_losses, after_gradients = deviations(ghost, texts, shadows)
    return theory_figures(
        losses, gradients, after_losses, after_gradients, (drift(initial, plain), drift(initial, ghost))
    )


def theory_figures(
    losses: Floats, gradients: Floats, losses_after: Floats, gradients_after: Floats, drifts: tuple[float, float]
) -> TheoryFigures:
    """Returns the figures from the deviations and drifts.

    Args:
        losses: (pairs,) the deviations of the loss before the training.
        gradients: (pairs,) the deviations of the gradient before the training.
        losses_after: (pairs,) the deviations of the loss after the training.
        gradients_after: (pairs,) the deviations of the gradient after the training.
        drifts: the drifts of the trainings on texts and on shadows.
    """
    local = np.maximum(losses, gradients)
    epsilon = np.maximum(local, max(drifts))
    measured = {
        "drift, texts": drifts[0],
        "drift, shadows": drifts[1],
        "loss deviation": float(losses.mean()),
        "gradient deviation": float(gradients.mean()),
        "epsilon, mean": float(epsilon.mean()),
        "epsilon, largest": float(epsilon.max()),
        "epsilon is a drift": float((local < max(drifts)).mean()),
        "loss deviation after": float(losses_after.mean()),
        "gradient deviation after": float(gradients_after.mean()),
    }
    lines, undefined = dict[str, FittedLine](), dict[str, str]()
    for epsilon_kind, x in (("epsilon", epsilon), ("local epsilon", local)):
        for name, y in (("loss", losses_after), ("gradient", gradients_after)):
            slope_name = f"slope of the {name} deviation" + ("" if epsilon_kind == "epsilon" else ", local")
            fitted, mean = fitted_line(x, y), float(y.mean())
            if fitted is None:
                reason = _why_constant(epsilon_kind, local, max(drifts))
                undefined |= {slope_name: reason, f"{slope_name}, of its mean": reason}
                continue
            lines[f"{name}, {epsilon_kind}"] = fitted
            measured[slope_name] = fitted.slope
            if mean > 0:
                measured[f"{slope_name}, of its mean"] = fitted.slope / mean
            else:
                undefined[f"{slope_name}, of its mean"] = "the deviation is 0 for all pairs"
    columns = (losses, gradients, local, epsilon, losses_after, gradients_after)
    names = ("loss", "gradient", "local", "epsilon", "loss after", "gradient after")
    pairs = {name: column.tolist() for name, column in zip(names, columns, strict=True)}
    return TheoryFigures(measured, pairs, lines, undefined)


def _why_constant(epsilon_kind: str, local: Floats, max_drift: float) -> str:
    is_drift = epsilon_kind == "epsilon" and (local <= max_drift).all()
    reason = ": a drift is larger than every pair's deviations" if is_drift else ""
    return f"{epsilon_kind} is the same for all pairs{reason}"


def drift(initial: SharedStep, trained: SharedStep) -> float:
    """Returns |t' - t| over all trained parameters."""
    trained_weights = trained.parameters
    squares = [
        float((trained_weights[name] - weight).detach().double().square().sum())
        for name, weight in initial.parameters.items()
    ]
    return math.sqrt(sum(squares))


def deviations(step: SharedStep, texts: PrivateRows, shadows: PrivateRows) -> tuple[Floats, Floats]:
    """Returns (pairs,) how far the losses of each text and its shadow differ, and (pairs,) the gradients' distance."""
    losses, gradients = [], []
    for i, (text_ids, shadow_ids) in enumerate(zip(texts.ids, shadows.ids, strict=True)):
        target = None if texts.labels is None else torch.tensor([int(texts.labels[i])])
        text_loss, gradient = _loss_and_gradient(step, text_ids, target)
        shadow_loss, shadow_gradient = _loss_and_gradient(step, shadow_ids, target)
        losses.append(abs(text_loss - shadow_loss))
        gradients.append(
            math.sqrt(sum(float((gradient[name] - shadow_gradient[name]).double().square().sum()) for name in gradient))
        )
    return np.array(losses), np.array(gradients)


def _loss_and_gradient(
    step: SharedStep, ids: Ids, target: torch.Tensor | None
) -> tuple[float, dict[str, torch.Tensor]]:
    row = torch.from_numpy(ids)[None]
    mask = torch.ones_like(row)
    with torch.no_grad():
        loss = float(step.loss(step.embed(row), mask, row if target is None else target))
    return loss, step.gradient(row, mask, target)


def fitted_line(x: Floats, y: Floats) -> FittedLine | None:
    """Returns the least-squares line; None if x varies by rounding only, since x - mean(x) is hardly ever exactly 0."""
    spread = x - x.mean()
    if np.abs(spread).max() <= ROUNDING_SHARE * np.abs(x).max():
        return None
    slope = float(spread @ (y - y.mean())) / float(spread @ spread)
    return FittedLine(slope, float(y.mean()) - slope * float(x.mean()))

"""Fit of layers: which of a model's matrices are public ones multiplied from one side, and by what.

**Which matrices.** No names are needed. Matrices of one kind (the same name but for the layer's number) are stacked, as
they are and transposed, with and without one of their layer's norm gains folded in, as schemes for pre-norm models
must; the fit tells which of these hold. Its test is the share that it leaves unexplained, corrected for its d degrees
of freedom a column, so that it is about 1 where nothing connects the two and 0 where one T does:

    unexplained = ||Phi T - Phi*|| / ||Phi*|| / sqrt(1 - d / rows)

Training adds drift to that; it averages out over the kinds that agree on one T, which are stacked in the end.

What this module does not know: what T does to the table (known_weight.py). Gains of the form 1 + g (Gemma) and biases
folded into matrices are not tried, nor a T of each layer's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from milkglass.errors import UsageError
from milkglass.modelview import Model

LAYERS = 6  # of each kind, spread over the model: more adds nothing but time
SURPLUS = 1.1  # rows for each dimension, at least, before a fit means anything
MOVED = 0.1  # a matrix that differs less from the public one was trained, not transformed
AGREE = 0.3  # two kinds whose T differ by less are stacked


@dataclass(frozen=True)
class Estimate:
    """transformation: (d, d). residual: relative error of the fit, 0 to 1. condition: of the stacked public weights.
    rows: how many were stacked."""

    transformation: Tensor
    residual: float
    condition: float
    rows: int

    @property
    def unexplained(self) -> float:
        """The residual over what it would be if nothing connected the two; 1 for too few rows to say."""
        d = len(self.transformation)
        return self.residual / (1 - d / self.rows) ** 0.5 if self.rows >= SURPLUS * d else 1.0


@dataclass(frozen=True)
class Normal:
    """The normal equations of Phi T = Phi*, fp64: they add up, so weights of any number are never held at once.

    gram: Phi^T Phi. cross: Phi^T Phi*. power: ||Phi*||^2. moved: ||Phi* - Phi||^2. rows: of Phi.
    """

    gram: Tensor
    cross: Tensor
    power: float
    moved: float
    rows: int

    @classmethod
    def of(cls, before: Tensor, after: Tensor) -> Normal:
        a, b = before.double(), after.double()
        return cls(a.T @ a, a.T @ b, float((b * b).sum()), float(((b - a) ** 2).sum()), len(a))

    def __add__(self, other: Normal) -> Normal:
        return Normal(
            self.gram + other.gram,
            self.cross + other.cross,
            self.power + other.power,
            self.moved + other.moved,
            self.rows + other.rows,
        )

    def scaled(self, gain: Tensor) -> Normal:
        """The same with Phi diag(gain) for Phi."""
        g = gain.double()
        return replace(self, gram=g[:, None] * self.gram * g, cross=g[:, None] * self.cross)

    @property
    def change(self) -> float:
        """How far the transformed weights are from the public ones, relative to their size."""
        return (self.moved / self.power) ** 0.5 if self.power else 0.0

    def solve(self) -> Estimate:
        spread = torch.linalg.eigvalsh(self.gram)
        ridge = 1e-13 * float(spread[-1].clamp_min(torch.finfo(torch.float64).tiny))
        found = torch.linalg.solve(self.gram + ridge * torch.eye(len(self.gram), dtype=torch.float64), self.cross)
        left = self.power - 2 * float((found * self.cross).sum()) + float((found * (self.gram @ found)).sum())
        condition = float((spread[-1] / spread[0].clamp_min(ridge)).sqrt())
        return Estimate(found, (max(left, 0.0) / max(self.power, 1e-300)) ** 0.5, condition, self.rows)


def estimate(public: Sequence[Tensor], transformed: Sequence[Tensor]) -> Estimate:
    """T from pairs (Phi (g, d), Phi* (g, d)). Raises UsageError where they have fewer than d rows together."""
    if [one.shape for one in public] != [one.shape for one in transformed] or not public:
        raise UsageError(f"{len(public)} public and {len(transformed)} transformed weights", "give them in pairs")
    rows, d = sum(len(one) for one in public), public[0].shape[1]
    if rows < d:
        raise UsageError(f"{rows} rows do not determine a matrix of {d} dimensions", "give more layers")
    total = Normal.of(public[0], transformed[0])
    for before, after in zip(public[1:], transformed[1:], strict=True):
        total += Normal.of(before, after)
    return total.solve()


# --- which matrices --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kind:
    """Matrices of one name but for the layer's number, viewed as rows of d. gain: the norm folded in, if any."""

    name: str
    gain: str | None
    normal: Normal
    fit: Estimate


def kinds(public: Model, seen: Model) -> Iterator[Kind]:
    """Every kind that both models have, each in the one view and with the one gain that fit best."""
    size, d = public.table.shape
    grouped: dict[str, list[str]] = {}
    for name in public.tensors:
        if name.endswith("weight") and name in seen.tensors:
            grouped.setdefault(_stem(name), []).append(name)
    gains = [stem for stem in grouped if "*" in stem and _gain(public, grouped[stem], d)]
    for stem, names in grouped.items():
        chosen = [names[i] for i in np.unique(np.linspace(0, len(names) - 1, min(len(names), LAYERS)).astype(int))]
        pairs = {name: (public.tensors[name], seen.tensors[name]) for name in chosen}
        shape = next(iter(pairs.values()))[0].shape
        if len(shape) != 2 or size in shape or any(a.shape != b.shape or a.shape != shape for a, b in pairs.values()):
            continue
        for turned in (False, True):
            if shape[0 if turned else 1] == d and len(chosen) * shape[1 if turned else 0] >= SURPLUS * d:
                parts = {n: Normal.of(a.T, b.T) if turned else Normal.of(a, b) for n, (a, b) in pairs.items()}
                yield _best(stem, parts, public, gains)


def _stem(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _gain(public: Model, names: list[str], d: int) -> bool:
    return public.tensors[names[0]].shape == (d,)


def _best(stem: str, parts: Mapping[str, Normal], public: Model, gains: list[str]) -> Kind:
    found: list[Kind] = []
    for gain in (None, *(gains if "*" in stem else [])):
        scaled = [part if gain is None else part.scaled(_beside(public, gain, n)) for n, part in parts.items()]
        total = scaled[0]
        for one in scaled[1:]:
            total += one
        found.append(Kind(stem, gain, total, total.solve()))
        if found[0].fit.unexplained < 1e-3:  # nothing was folded
            break
    return min(found, key=lambda one: one.fit.unexplained)


def _beside(public: Model, gain: str, name: str) -> Tensor:
    """The norm gain of the layer that `name` is in."""
    layer = re.search(r"\.(\d+)\.", name)
    assert layer is not None
    return public.tensors[gain.replace(".*.", f".{layer[1]}.", 1)]


# --- what they say together ------------------------------------------------------------------------------------------
def find(public: Model, seen: Model, tolerance: float) -> tuple[Estimate, ...] | str:
    """The transformations of the layers, the surest first, or why there are none."""
    every = list(kinds(public, seen))
    if not every:
        return "no kind of matrix of the layers is in both models with enough rows"
    moved = [one for one in every if one.normal.change > MOVED]
    if not moved:
        return "the layers are the public ones: nothing but the tables was transformed"
    best = min(one.fit.unexplained for one in moved)
    if best > tolerance:
        return f"no matrix of the layers is a public one multiplied from one side: the best fit misses {best:.0%}"
    groups: list[Normal] = []
    for one in sorted(moved, key=lambda one: one.fit.unexplained):
        if one.fit.unexplained > tolerance:
            break
        for number, group in enumerate(groups):
            known = group.solve().transformation
            if float((one.fit.transformation - known).norm() / known.norm()) < AGREE:
                groups[number] = group + one.normal
                break
        else:
            groups.append(one.normal)
    return tuple(group.solve() for group in groups)

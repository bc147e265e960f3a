"""Finds which of a model's matrices are public ones multiplied from one side, and by which T.

Names are not needed. Matrices whose names differ only in the layer's number are stacked, as they are and transposed,
without and with one of their layer's norm gains folded in (schemes for pre-norm models must fold it). The fit shows
which of these hold. Its test is the unexplained share, corrected for d degrees of freedom a column. It is about 1 if
nothing connects the two stacks, and 0 if one T does:

    unexplained = ||Phi T - Phi*|| / ||Phi*|| / sqrt(1 - d / rows)

Training adds drift, which averages out over the kinds that agree on one T: they are stacked in the end.

known_weight.py applies T to the table. Not tried: gains of the form 1 + g (Gemma), biases folded into matrices, and a
different T for each layer.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from milkglass.models.view import Model

SAMPLE_LAYERS = 6  # matrices of each stack that are fitted, spread over the model
MIN_ROWS_PER_DIMENSION = 1.1  # rows of a stack for each dimension: with fewer, every T fits
MIN_CHANGE = 0.1  # a matrix that differs less from the public one was trained, not transformed
MAX_STACKED_DIFFERENCE = 0.3  # two kinds whose T differ by less are stacked


@dataclass(frozen=True)
class Estimate:
    """Holds the transformation that fits one kind of matrix best.

    Attributes:
        transformation: (d, d) T.
        residual: the relative error of the fit.
        row_count: the number of rows of Phi that were fitted.
    """

    transformation: Tensor
    residual: float
    row_count: int

    @property
    def unexplained_share(self) -> float:
        """Returns the residual relative to that of unrelated matrices, or 1 if there are too few rows."""
        d = len(self.transformation)
        return self.residual / (1 - d / self.row_count) ** 0.5 if self.row_count >= MIN_ROWS_PER_DIMENSION * d else 1.0


@dataclass(frozen=True)
class NormalEquations:
    """Solves Phi T = Phi* by its normal equations in fp64.

    The equations can be added, so that not all matrices are in memory at once.

    Attributes:
        gram: (d, d) Phi^T Phi.
        cross: (d, d) Phi^T Phi*.
        power: ||Phi*||^2.
        row_count: the number of rows of Phi.
    """

    gram: Tensor
    cross: Tensor
    power: float
    row_count: int

    @classmethod
    def of(cls, public: Tensor, uploaded: Tensor) -> NormalEquations:
        """Returns the equations for Phi = `public` and Phi* = `uploaded`."""
        a, b = public.double(), uploaded.double()
        return cls(a.T @ a, a.T @ b, float((b * b).sum()), len(a))

    def __add__(self, other: NormalEquations) -> NormalEquations:
        return NormalEquations(
            self.gram + other.gram, self.cross + other.cross, self.power + other.power, self.row_count + other.row_count
        )

    def with_gain(self, gain: Tensor) -> NormalEquations:
        """Returns the equations with Phi diag(gain) in place of Phi."""
        g = gain.double()
        return replace(self, gram=g[:, None] * self.gram * g, cross=g[:, None] * self.cross)

    def solve(self) -> Estimate:
        """Returns the T that minimises ||Phi T - Phi*||, with its relative error."""
        eigenvalues = torch.linalg.eigvalsh(self.gram)
        ridge = 1e-13 * float(eigenvalues[-1].clamp_min(torch.finfo(torch.float64).tiny))
        t = torch.linalg.solve(self.gram + ridge * torch.eye(len(self.gram), dtype=torch.float64), self.cross)
        square_error = self.power - 2 * float((t * self.cross).sum()) + float((t * (self.gram @ t)).sum())
        return Estimate(t, (max(square_error, 0.0) / max(self.power, 1e-300)) ** 0.5, self.row_count)


# --- which matrices --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Stack:
    """Groups matrices whose names differ only in the layer's number.

    Attributes:
        stem: the name with * for the number.
        names: the names of the matrices that are fitted.
        transposed: in which views rows have d numbers: as they are (False), transposed (True), or both if matrices are
            square.
    """

    stem: str
    names: tuple[str, ...]
    transposed: tuple[bool, ...]

    def relative_change(self, public: Model, uploaded: Model) -> float:
        """Returns the norm of the difference between uploaded and public matrices, relative to the uploaded ones."""
        difference = power = 0.0
        for name in self.names:
            public_matrix, uploaded_matrix = public.tensors[name].float(), uploaded.tensors[name].float()
            difference += float(((uploaded_matrix - public_matrix) ** 2).sum())
            power += float((uploaded_matrix * uploaded_matrix).sum())
        return (difference / power) ** 0.5 if power else 0.0


@dataclass(frozen=True)
class FittedStack:
    """Holds one stack in one view, with the transformation that fits it.

    Attributes:
        name: the stack's `stem`.
        gain: the norm gain that is folded into the public matrices. None if the stack fits best without one.
        normal: the sum of the matrices' normal equations.
        fit: the solution of these equations.
    """

    name: str
    gain: str | None
    normal: NormalEquations
    fit: Estimate


def stacks(public: Model, uploaded: Model) -> Iterator[Stack]:
    """Yields every stack that both models have with enough rows for a fit."""
    size, d = public.table.shape
    grouped: dict[str, list[str]] = {}
    for name in public.tensors:
        if name.endswith("weight") and name in uploaded.tensors:
            grouped.setdefault(_stem(name), []).append(name)
    for stem, names in grouped.items():
        selected = [
            names[i] for i in np.unique(np.linspace(0, len(names) - 1, min(len(names), SAMPLE_LAYERS)).astype(int))
        ]
        shapes = {tuple(model.tensors[name].shape) for name in selected for model in (public, uploaded)}
        shape = shapes.pop()
        if shapes or len(shape) != 2 or size in shape:
            continue
        views = ((False, shape[0], shape[1]), (True, shape[1], shape[0]))
        min_rows = MIN_ROWS_PER_DIMENSION * d
        transposed = tuple(
            is_transposed for is_transposed, rows, columns in views if columns == d and len(selected) * rows >= min_rows
        )
        if transposed:
            yield Stack(stem, tuple(selected), transposed)


def fitted_stacks(public: Model, uploaded: Model) -> Iterator[FittedStack]:
    """Yields every stack that was changed, in each view, with the gain that fits best."""
    for stack in stacks(public, uploaded):
        if stack.relative_change(public, uploaded) > MIN_CHANGE:
            pairs = {name: (public.tensors[name], uploaded.tensors[name]) for name in stack.names}
            for transposed in stack.transposed:
                views = {name: (a.T, b.T) if transposed else (a, b) for name, (a, b) in pairs.items()}
                yield _best_fit(stack.stem, {name: NormalEquations.of(a, b) for name, (a, b) in views.items()}, public)


def _stem(name: str) -> str:
    """Returns a tensor's name with * for the layer's number."""
    return re.sub(r"\.\d+\.", ".*.", name)


def gains_beside(public: Model, name: str) -> list[str]:
    """Returns the names of the norm gains in the layer of the matrix `name`; none if it is in no layer."""
    layer = re.match(r"(.*?\.\d+\.)", name)
    if layer is None:
        return []
    weights = [tensor for tensor in public.tensors if tensor.startswith(layer[1]) and tensor.endswith("weight")]
    return [tensor for tensor in weights if public.tensors[tensor].shape == (public.width,)]


def _best_fit(stem: str, normals: Mapping[str, NormalEquations], public: Model) -> FittedStack:
    """Fits the matrices of a stack (normal equations by name) with each gain of their layers, and returns the best."""
    gains_of_matrix = {name: {_stem(gain): gain for gain in gains_beside(public, name)} for name in normals}
    first_gains, *other_gains = gains_of_matrix.values()
    common_gains = [gain for gain in first_gains if all(gain in gains for gains in other_gains)]
    fitted: list[FittedStack] = []
    for gain in (None, *common_gains):
        scaled = [
            normal if gain is None else normal.with_gain(public.tensors[gains_of_matrix[name][gain]])
            for name, normal in normals.items()
        ]
        total = functools.reduce(operator.add, scaled)
        fitted.append(FittedStack(stem, gain, total, total.solve()))
        if fitted[0].fit.unexplained_share < 1e-3:  # nothing was folded
            break
    return min(fitted, key=lambda stack: stack.fit.unexplained_share)


# --- which transformations -------------------------------------------------------------------------------------------
def find_transformations(public: Model, uploaded: Model, tolerance: float) -> tuple[Estimate, ...] | str:
    """Returns the transformations of the layers, the one that fits best first, or why there is none."""
    if not any(stacks(public, uploaded)):
        return "no kind of matrix of the layers is in both models with enough rows"
    fitted = list(fitted_stacks(public, uploaded))
    if not fitted:
        return "the layers are the public ones: nothing but the tables was transformed"
    best = min(stack.fit.unexplained_share for stack in fitted)
    if best > tolerance:
        return f"no matrix of the layers is a public one multiplied from one side: the best fit misses {best:.0%}"
    groups: list[NormalEquations] = []
    for stack in sorted(fitted, key=lambda stack: stack.fit.unexplained_share):
        if stack.fit.unexplained_share > tolerance:
            break
        for index, group in enumerate(groups):
            t = group.solve().transformation
            if float((stack.fit.transformation - t).norm() / t.norm()) < MAX_STACKED_DIFFERENCE:
                groups[index] = group + stack.normal
                break
        else:
            groups.append(stack.normal)
    return tuple(group.solve() for group in groups)

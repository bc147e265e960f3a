"""Measures all candidates in bf16 first, so that only those that may be among the best are measured in fp32.

It is used on processors that multiply bf16 faster than fp32 (AMX, AVX-512 BF16). With d the distance of the states and
e the error of bf16, a loss is |d + e|^2 and not |d|^2. It is off by |e|^2, the noise, and by 2 d e, at most 2 sqrt(loss
noise) (Cauchy-Schwarz). The noise of a sentence is its own loss in bf16, where d is 0. Errors of single numbers have
their own signs, so a quarter of that bound is allowed. That the choices are those of fp32 is tested, also with shadows
so near that noise dominates, and not proven; bench/parts/ghost.py compares them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ALLOWED = 0.5  # times sqrt(loss noise)
SEEN = 4  # times the noise: a sentence that is nearer is not looked at in bf16


def off_by(losses: NDArray[np.float64], noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns by how much losses in bf16 may be off, given the noise; inf for inf."""
    return np.asarray(2 * noise + ALLOWED * np.sqrt(losses * noise))


def worth(
    rough: NDArray[np.float64], owner: NDArray[np.int64], widths: NDArray[np.int64], noise: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Returns (r,) which candidates may be among the best of their owners; inf never is.

    Args:
        rough: (r,) the losses in bf16.
        owner: (r,) in ascending order.
        widths: (r,) how many are the best of the owner.
        noise: (r,), above 0.
    """
    result = np.zeros(len(rough), np.bool_)
    for begin in np.flatnonzero(np.diff(owner, prepend=-1)):
        mine = slice(begin, np.searchsorted(owner, owner[begin], side="right"))
        part = np.sort(rough[mine])
        last = part[min(int(widths[begin]), len(part)) - 1]
        result[mine] = np.isfinite(rough[mine]) & (rough[mine] <= last + off_by(last, noise[begin]))
    return result

"""A look at all candidates in bf16, so that only those that may be among the best are measured in fp32.

Used on processors that multiply bf16 faster than fp32 (AMX, AVX-512 BF16). With d the distance of the states and e what
bf16 adds to them, a loss is |d + e|^2 and not |d|^2: it is off by |e|^2, the noise, and by 2 d e, at most 2 sqrt(loss
noise) (Cauchy-Schwarz). The noise of a sentence is its own loss in bf16, where d is 0. Errors of single numbers have
signs of their own, so that a quarter of that bound is allowed for; on MiniLM 2 d e stays below a fifteenth of it. So
the choices are those of fp32, which is tested, also with shadows so near that noise is all there is to see, and not
proven; bench/parts/ghost.py compares them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ALLOWED = 0.5  # times sqrt(loss noise)
SEEN = 4  # times the noise: a sentence that is nearer is not looked at in bf16


def off_by(losses: NDArray[np.float64], noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """By how much losses in bf16 are allowed to be off, where this is the noise; inf of inf."""
    return np.asarray(2 * noise + ALLOWED * np.sqrt(losses * noise))


def worth(
    rough: NDArray[np.float64], owner: NDArray[np.int64], widths: NDArray[np.int64], noise: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """(r,) which of these candidates may be among the `widths` best (r,) of their owner (r,), whose numbers are in
    order; inf is never among the best. noise: (r,), above 0."""
    result = np.zeros(len(rough), np.bool_)
    for begin in np.flatnonzero(np.diff(owner, prepend=-1)):
        mine = slice(begin, np.searchsorted(owner, owner[begin], side="right"))
        part = np.sort(rough[mine])
        last = part[min(int(widths[begin]), len(part)) - 1]
        result[mine] = np.isfinite(rough[mine]) & (rough[mine] <= last + off_by(last, noise[begin]))
    return result

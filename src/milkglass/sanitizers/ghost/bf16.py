"""A look at all candidates in bf16, so that only those that may be among the best are measured in fp32.

Used on processors that multiply bf16 faster than fp32 (AMX, AVX-512 BF16). A loss in bf16 differs from that in fp32
by about 0.01 % of it, and the candidates of a place by 2 to 4 %: with all that are within MARGIN of the best measured
again, the choices are those of fp32, unless bf16 is wrong by half of MARGIN (not proven, but tested, and
bench/parts/ghost.py compares the choices). Out of scope: models, beams' sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

MARGIN = 0.005  # relative


def quick_in_bf16() -> bool:
    """Whether this processor has instructions for bf16. Older releases of torch cannot say: then it has none."""
    requested: Any = getattr(torch.cpu, "get_capabilities", dict)
    info = requested()
    return bool(info.get("amx_bf16") or info.get("avx512_bf16"))


def worth(rough: NDArray[np.float64], owner: NDArray[np.int64], widths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(r,) which of these candidates may be among the `widths` best (r,) of their owner (r,), whose numbers are in
    order; inf is never among the best."""
    result = np.zeros(len(rough), np.bool_)
    for begin in np.flatnonzero(np.diff(owner, prepend=-1)):
        mine = slice(begin, np.searchsorted(owner, owner[begin], side="right"))
        part = np.sort(rough[mine])
        last = part[min(int(widths[begin]), len(part)) - 1]
        result[mine] = np.isfinite(rough[mine]) & (rough[mine] <= last * (1 + MARGIN))
    return result

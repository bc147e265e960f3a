"""oneDNN's linear layer, by the operators that torch's compiler uses, where torch has them for this processor."""

from __future__ import annotations

from collections.abc import Callable

import torch

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def onednn_linear() -> Linear | None:
    """x (..., d), weight (m, d) and bias (m,) or None, all of one dtype on the processor, to (..., m)."""
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch.backends.mkldnn.is_available():
        return None
    return lambda x, weight, bias: operator(x, weight, bias, "none", [], "")


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight (m, d) as oneDNN lays it out, for an operator of `onednn_linear` that will be called often: it
    would do so at each call. The products are the same but for rounding. The weight itself where torch cannot."""
    operator = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    return weight if operator is None else operator(weight, None)

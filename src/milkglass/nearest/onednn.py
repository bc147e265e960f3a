"""oneDNN's linear layer, by the operator that torch's compiler uses, where torch has one for this processor."""

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

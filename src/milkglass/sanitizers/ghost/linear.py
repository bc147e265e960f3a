"""The linear layers of a model that only computes, multiplied by oneDNN: in fp32 as nearest/cosines.py multiplies, and
in bf16, where autocast asks for it, with weights that are converted once and not at each call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from milkglass.nearest.onednn import Linear, onednn_linear


def multiply_by_onednn(model: torch.nn.Module, bf16: bool) -> None:
    """Where torch has it for a processor. The model must not be trained, copied or loaded into afterwards.

    bf16: whether it will be asked in bf16 too.
    """
    linear = onednn_linear()
    if linear is None:
        return
    for one in model.modules():
        if type(one) is torch.nn.Linear and one.weight.device.type == "cpu" and one.weight.dtype == torch.float32:
            whole = (one.weight.detach(), one.bias)
            rough = [None if part is None else part.detach().bfloat16() for part in whole] if bf16 else None
            one.forward = partial(_linear, linear, whole, rough)  # type: ignore[method-assign]


def _linear(linear: Linear, whole: Any, rough: Any, x: torch.Tensor) -> torch.Tensor:
    if not torch.is_autocast_enabled("cpu"):
        return linear(x, *whole)
    return torch.nn.functional.linear(x, *whole) if rough is None else linear(x.bfloat16(), *rough)

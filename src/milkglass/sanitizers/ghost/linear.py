"""The linear layers of a model that only computes, multiplied by oneDNN: in fp32 as nearest/cosines.py multiplies, and
in bf16, where autocast asks for it. Weights are converted and laid out once, not at each call: the model takes more
memory by a copy of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from milkglass.nearest.onednn import Linear, onednn_linear, packed


def multiply_by_onednn(model: torch.nn.Module, bf16: bool) -> None:
    """Where torch has it for a processor. The model must not be trained, copied or loaded into afterwards.

    bf16: whether it will be asked in bf16 too.
    """
    linear = onednn_linear()
    if linear is None:
        return
    for one in model.modules():
        if type(one) is torch.nn.Linear and one.weight.device.type == "cpu" and one.weight.dtype == torch.float32:
            weight, bias = one.weight.detach(), one.bias
            whole = (packed(weight), bias)
            rough = (packed(weight.bfloat16()), None if bias is None else bias.detach().bfloat16()) if bf16 else None
            one.forward = partial(_linear, linear, whole, rough)  # type: ignore[method-assign]


def _linear(linear: Linear, whole: Any, rough: Any, x: torch.Tensor) -> torch.Tensor:
    if rough is not None and torch.is_autocast_enabled("cpu"):
        return linear(x.bfloat16(), *rough)
    return linear(x.float(), *whole)

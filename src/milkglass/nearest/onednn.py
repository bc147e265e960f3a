"""oneDNN's linear layer, by the operators that torch's compiler uses, where torch has them for this processor; and a
model whose linear layers are multiplied by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def quick_in_bf16() -> bool:
    """Whether this processor has instructions for bf16, and oneDNN may use them: DNNL_MAX_CPU_ISA can forbid it. Older
    releases of torch cannot say: then it has none."""
    requested: Any = getattr(torch.cpu, "get_capabilities", dict)
    info = requested()
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(info.get("amx_bf16") or info.get("avx512_bf16")) and supported is not None and bool(supported())


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


def multiply_by_onednn(model: torch.nn.Module, bf16: bool) -> None:
    """The linear layers of a model that only computes, where torch has it for a processor: in fp32, and in bf16, where
    autocast asks for it. Weights are converted and laid out once, not at each call: the model takes more memory by a
    copy of them. It must not be trained, copied or loaded into afterwards.

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

"""A pretended GPU: tensors of a device of their own and are computed by the processor.

As on a GPU, an operation that mixes both devices fails, and NumPy cannot read what is not on the processor. So a run on
it shows, without a GPU, that a part leaves no tensor behind, and its results can be compared with the processor's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures.thread import _WorkItem
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from milkglass import device


class _Backend(_DummyBackendModule):  # type: ignore[misc]
    """PyTorch's stand-in, with the state of a generator that is never used: `fork_rng` asks every backend."""

    def get_rng_state(self, place: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, place: Any = None) -> None:
        return


_setup_privateuseone_for_python_backend("pretended", backend_module=_Backend())
GPU = torch.device("pretended", 0)
ops = torch.ops.aten
# What CUDA takes together with tensors of the processor
COPIES = {ops._to_copy.default, ops.copy_.default}
LENGTHS = {ops._pack_padded_sequence.default}
INDEXED = {ops.index.Tensor, ops.index_put.default, ops.index_put_.default, ops._index_put_impl_.default}
READS = {getattr(torch.Tensor, name) for name in ("__float__", "__int__", "__bool__", "__index__", "tolist", "item")}
DONE = [0]  # operations on the pretended GPU


class GPUTensor(torch.Tensor):
    """A tensor that says that it is on the GPU.

    Attributes:
        inner: the same on the processor.
    """

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> GPUTensor:
        result = torch.Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=GPU,
            requires_grad=real.requires_grad,
        )
        result.inner = real
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        return f"on the GPU: {self.inner!r}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return attention(*args, **(kwargs or {}))
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise TypeError("can't convert pretended:0 device type tensor to numpy")
        if func is torch.Tensor.data_ptr:
            return args[0].inner.data_ptr()
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], _as_tensors(args[1]), *(_placed(one, args[0].dtype) for one in args[2:]))
        if func in READS:
            return func(args[0].detach().cpu(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def _as_tensors(index: Any) -> Any:
    """Returns an index without lists and arrays, of which PyTorch makes tensors below all dispatch."""
    if isinstance(index, tuple):
        return tuple(_as_tensors(one) for one in index)
    return torch.as_tensor(np.asarray(index)) if isinstance(index, list | np.ndarray) else index


def _placed(value: Any, dtype: torch.dtype) -> Any:
    return value if isinstance(value, torch.Tensor) else GPUTensor(torch.tensor(value, dtype=dtype))


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention written out: CPU builds of torch do not choose among CUDA's kernels."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _cell(x: Any, h: Any, cell: Any, bias: Any = None, more: Any = None) -> Any:
    gates = x + h + (0 if bias is None else bias) + (0 if more is None else more)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def _cell_backward(of_h: Any, of_cell: Any, before: Any, after: Any, gates: Any, bias: bool) -> Any:
    i, f, g, o = gates.chunk(4, 1)
    of_h = torch.zeros_like(after) if of_h is None else of_h
    total = of_h * o * (1 - after.tanh() ** 2) + (0 if of_cell is None else of_cell)
    parts = (
        total * g * i * (1 - i),
        total * before * f * (1 - f),
        total * i * (1 - g * g),
        of_h * after.tanh() * o * (1 - o),
    )
    grad = torch.cat(parts, 1)
    return grad, total * f, grad.sum(0) if bias else None


# Operations that only GPUs have
WRITTEN_OUT = {
    ops._thnn_fused_lstm_cell.default: _cell,
    ops._thnn_fused_lstm_cell_backward_impl.default: _cell_backward,
}


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns an operation's result, computed by the processor. Raises RuntimeError if it mixes devices."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    there = any(isinstance(one, GPUTensor) for one in tensors)
    target = kwargs.get("device")
    asked = None if target is None else torch.device(target).type
    if there and func not in COPIES | LENGTHS:
        self = tensors[0]
        for one in tensors:
            index = func in INDEXED and isinstance(self, GPUTensor) and any(one is it for it in tree_leaves(args[1]))
            if not isinstance(one, GPUTensor) and one.dim() and not index:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"pretended:0 and cpu: {func}, {[(type(one).__name__, tuple(one.shape)) for one in tensors]}"
                )
    if func is ops.copy_.default:
        there = isinstance(args[0], GPUTensor)
    on_gpu = there if asked is None else asked == GPU.type
    real_args, real_kwargs = tree_map_only(GPUTensor, lambda one: one.inner, (args, kwargs))
    if asked == GPU.type:
        real_kwargs["device"] = torch.device("cpu")
    if on_gpu:
        DONE[0] += 1
    result = WRITTEN_OUT.get(func, func)(*real_args, **real_kwargs)
    if func is ops._to_copy.default and result is real_args[0]:
        result = result.clone()
    if not on_gpu:
        return args[0] if func is ops.copy_.default else result
    if func in LENGTHS:
        return GPUTensor(result[0]), result[1]
    wrapped = tree_map(lambda one: GPUTensor(one) if isinstance(one, torch.Tensor) else one, result)
    if not there:
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


class _Factories(TorchDispatchMode):
    """Makes tensors on the pretended GPU where a factory or a copy names one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Makes tensors from Python's numbers, which PyTorch does below all dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            target = kwargs.pop("device", None)
            result = func(*args, **kwargs)
            return result if target is None else result.to(target)
        return func(*args, **kwargs)


def _entered() -> torch.no_grad:
    result = torch.no_grad()
    result.__enter__()
    return result


def _in_a_thread(item: Any, run: Any = _WorkItem.run) -> None:
    with _Functions(), _Factories():
        run(item)


@contextmanager
def pretend_gpu(monkeypatch: Any) -> Iterator[torch.device]:
    """Pretends, inside, that the chosen device is a GPU."""
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    with monkeypatch.context() as patch, _Functions(), _Factories():
        torch.__future__.set_swap_module_params_on_conversion(True)  # so that tied parameters stay one
        patch.setattr(device, "current", lambda: GPU)
        patch.setattr(_WorkItem, "run", _in_a_thread)  # modes belong to a thread
        # A wrapped tensor cannot be an inference tensor
        patch.setattr(torch.inference_mode, "__enter__", lambda self: setattr(self, "_gradless", _entered()))
        patch.setattr(torch.inference_mode, "__exit__", lambda self, *error: self._gradless.__exit__(*error))
        try:
            yield GPU
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swapping)

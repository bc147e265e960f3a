"""Chooses the device on which models and tensors are computed, and in which dtype.

The user chooses by the environment variable `MILKGLASS_DEVICE`: "cpu", "cuda", or "cuda:1" for one of several GPUs.

Everything is computed in fp32 on both kinds, except what a server loads (`serving_dtype`) and what a comparison trains
(`training_dtype`). Random numbers that decide a result are drawn on the CPU and moved, so that both devices give the
same result up to rounding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError

if TYPE_CHECKING:
    import torch

DEVICE_VARIABLE = "MILKGLASS_DEVICE"  # the environment variable by which the user chooses
VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"  # CUDA's own environment variable: which GPUs a process sees
DEVICE_NAME = re.compile(r"cpu|cuda(:\d+)?")
Movable = TypeVar("Movable", bound="torch.Tensor | torch.nn.Module | None")


def current() -> torch.device:
    """Returns the device of all computation, and turns TF32 off if it is a GPU.

    Raises:
        UsageError: the chosen device does not exist.
    """
    import torch

    name = chosen_name()
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"{DEVICE_VARIABLE} is {name!r}, and PyTorch finds no GPU here", f"leave {DEVICE_VARIABLE} out, or give cpu"
        )
    device = torch.device(name or "cuda")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UsageError(
            f"{DEVICE_VARIABLE} is {name!r}, and there are {torch.cuda.device_count()} GPUs", "they are counted from 0"
        )
    # cuDNN's recurrent layers round fp32 to 10 bits otherwise, which products of matrices do not
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def chosen_name() -> str | None:
    """Returns the user's choice, or None: the GPU if there is one, else the CPU. Raises UsageError for another name."""
    chosen = os.environ.get(DEVICE_VARIABLE, "")
    if chosen and not DEVICE_NAME.fullmatch(chosen):
        raise UsageError(f"{DEVICE_VARIABLE} is {chosen!r}", "give cpu, cuda or cuda:N")
    return chosen or None


def on_gpu() -> bool:
    """Returns whether the device is a GPU. Raises what `current` raises."""
    return current().type != "cpu"


def move(movable: Movable) -> Movable:
    """Returns a tensor on the device, or moves a module there and returns it. None stays None.

    On the CPU nothing is copied.
    """
    if movable is None:
        return movable
    return movable.to(current())  # type: ignore[return-value]


def tensor(values: NDArray[Any]) -> torch.Tensor:
    """Returns an array as a tensor on the device."""
    import torch

    return torch.from_numpy(values).to(current())


def array(values: torch.Tensor) -> NDArray[Any]:
    """Returns a tensor of any device as an array. On the CPU nothing is copied."""
    return np.asarray(values.detach().cpu().numpy())


def serving_dtype() -> Any:
    """Returns the dtype in which a server loads a model: the checkpoint's own on a GPU, fp32 on the CPU."""
    import torch

    return "auto" if on_gpu() else torch.float32


def has_fast_bf16() -> bool:
    """Returns whether the CPU has instructions for bf16 that oneDNN may use.

    The environment variable DNNL_MAX_CPU_ISA can forbid them. The result is False for older releases of torch, which do
    not tell.
    """
    import torch

    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)
    cpu_capabilities = capabilities()
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    has_instructions = bool(cpu_capabilities.get("amx_bf16") or cpu_capabilities.get("avx512_bf16"))
    return has_instructions and supported is not None and bool(supported())


def training_dtype() -> Literal["bfloat16", "float32"]:
    """Returns "bfloat16" if the device has instructions for it, else "float32".

    Comparisons and the demo train in this dtype. It is the dtype of the arithmetic: the weights stay in fp32.
    """
    import torch

    if not on_gpu():
        return "bfloat16" if has_fast_bf16() else "float32"
    with torch.cuda.device(current()):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def memory_bytes(only_free: bool) -> int | None:
    """Returns the bytes of the GPU's memory, or None if there is no GPU.

    Args:
        only_free: whether only free memory counts.
    """
    import torch

    if not on_gpu():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(current())
    return int(free_bytes if only_free else total_bytes)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child process.

    If a GPU is chosen by its number, the child sees this one alone, as its first: transformers' Trainer takes the first
    one. Otherwise the environment is unchanged.
    """
    name = chosen_name()
    if name is None or ":" not in name:
        return {**environment}
    number = int(name.partition(":")[2])
    visible_gpus = [gpu for gpu in environment.get(VISIBLE_GPUS_VARIABLE, "").split(",") if gpu]
    chosen_gpu = visible_gpus[number] if number < len(visible_gpus) else str(number)
    return {**environment, DEVICE_VARIABLE: "cuda", VISIBLE_GPUS_VARIABLE: chosen_gpu}

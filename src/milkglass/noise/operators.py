"""Draws PyTorch's random operators from a secret stream, such as dropout in a step whose masks nobody may repeat.

PyTorch's generator keeps 32 bits of a seed, so its masks can be searched. Inside `drawing_from(stream)` every operator
that PyTorch marks as random is drawn from the stream instead. One that is not implemented here raises; none falls back
to PyTorch's generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from milkglass import device
from milkglass.errors import UnsupportedModel
from milkglass.noise.stream import Stream

aten = torch.ops.aten


def keep_mask(stream: Stream, like: torch.Tensor, probability: float) -> torch.Tensor:
    """Returns a bool mask of the shape of `like`, in which each entry is true with this probability."""
    drawn = torch.from_numpy(stream.uniform(like.numel())).reshape(like.shape)
    return (drawn < probability).to(like.device)


class _Drawing(TorchDispatchMode):
    """Replaces PyTorch's random operators by draws from a stream while it is entered."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self._draw_of: Mapping[Any, Callable[..., Any]] = {
            aten.native_dropout.default: self._native_dropout,
            aten.bernoulli_.float: self._fill,
            aten.bernoulli.p: lambda like, p, generator=None: keep_mask(self._stream, like, p).to(like.dtype),
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func in self._draw_of:
            return self._draw_of[func](*args, **keywords)
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_attention_without_dropout(func, args, keywords):
            raise UnsupportedModel(
                f"this model draws with {func}, whose randomness PyTorch keeps in 32 bits of a seed",
                "use a model whose only random operator is dropout, or train it without dropout",
            )
        return func(*args, **keywords)

    def _fill(self, target: torch.Tensor, p: float = 0.5, generator: None = None) -> torch.Tensor:
        return target.copy_(keep_mask(self._stream, target, p))

    def _native_dropout(self, x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = keep_mask(self._stream, x, 1 - p)
        return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _is_attention_without_dropout(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Returns whether an operator is one of attention, called without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    index = names.index("dropout_p")
    default = func._schema.arguments[index].default_value
    return bool((args[index] if index < len(args) else keywords.get("dropout_p", default)) == 0)


@contextmanager
def drawing_from(stream: Stream) -> Iterator[None]:
    """Draws PyTorch's random operators from the stream while entered, in this thread.

    Gradient checkpointing must be off, since it would draw a second mask.

    Raises:
        UnsupportedModel: inside, if another random operator is called than dropout and Bernoulli draws.
    """
    # Fused attention on a GPU draws its dropout inside a kernel. In separate operators, as on a CPU, dropout is one
    unfused_attention = sdpa_kernel([SDPBackend.MATH]) if device.on_gpu() else nullcontext()
    with unfused_attention, _Drawing(stream):
        yield

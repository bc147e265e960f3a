"""Dropout as an unknown: finds what a client dropped in its step together with its text (GRAB).

While `Masks` is entered, every dropout of the model, in attention too, multiplies by a mask of ours and not by a draw.
There is one mask of the input's shape for each call, in order. Its entries are from 0 (dropped) to 1 (kept), over 1 - p
as in training. A new mask is 1 - p everywhere, so that the first run is the model without dropout. Several guesses of
one batch share the masks. Only PyTorch's calls are intercepted; the model is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode


class Masks(TorchFunctionMode):
    """The masks of one batch.

    Attributes:
        texts: how many texts the batch has.
        values: the masks in the order of their use, made when first needed.
    """

    def __init__(self, texts: int) -> None:
        super().__init__()
        self.texts = texts
        self.values: list[torch.Tensor] = []
        self._next = 0

    def __enter__(self) -> Self:
        self._next = 0
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.dropout:
            return func(*args, **kwargs)
        return self._masked(*args, **kwargs)

    def _masked(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0:
            return x
        if self._next == len(self.values):
            self.values.append(torch.full_like(x[: self.texts], 1 - p).detach().requires_grad_())
        mask = self.values[self._next]
        self._next += 1
        if len(x) != len(mask):
            mask = mask.repeat(len(x) // len(mask), *[1] * (x.dim() - 1))
        return x * (mask / (1 - p))

    def clamp(self) -> None:
        """Clamps the masks to 0 to 1 after a step of an optimiser."""
        with torch.no_grad():
            for one in self.values:
                one.clamp_(0, 1)

"""Rounding: a gradient is shared in 16 bits (Zhu et al. 2019, section 5.1, which finds that it does not protect).

Out of scope: rounds. Nothing is promised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from milkglass import papers
from milkglass.gradient_defences.defence import GradientDefence, Tensors
from milkglass.noise.stream import Stream
from milkglass.papers import Paper


@dataclass(frozen=True)
class Rounding(GradientDefence):
    """The method and its parameter.

    Attributes:
        form: of the numbers.
    """

    form: Literal["bfloat16", "float16"] = "bfloat16"

    name: ClassVar[str] = "rounding"
    paper: ClassVar[Paper | None] = papers.DLG

    def protect_gradient(self, tensors: Mapping[str, torch.Tensor], texts: int, stream: Stream) -> Tensors:
        dtype = getattr(torch, self.form)
        most = torch.finfo(dtype).max
        return {name: one.clamp(-most, most).to(dtype).to(one.dtype) for name, one in tensors.items()}

"""Prunes the gradient: sets entries to 0 before it is shared.

Random pruning, as in LAMP's code, drops each entry of each tensor with probability `ratio`, independently, and does not
scale up the rest (GHOST, section 5.1, at 0.99). Magnitude pruning, as in Zhu et al. 2019, section 5.2 (after Lin et al.
2018), drops the smallest entries of each tensor, or of all together. What is left is exact. An attacker can still check
spans (attacks/gradients/dager.py), or look at the nonzero rows of the table: nothing is promised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch

from milkglass import papers
from milkglass.gradient_defences.defence import GradientDefence, Tensors
from milkglass.noise.operators import keep_mask
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.parameters import limited_field


@dataclass(frozen=True)
class RandomPruning(GradientDefence):
    """Drops each entry of the gradient at random.

    Attributes:
        ratio: the probability with which an entry is dropped.
    """

    ratio: float = limited_field(0.99, above=0, below=1, hint="GHOST's comparison uses 0.99")

    name: ClassVar[str] = "random-pruning"
    paper: ClassVar[Paper | None] = papers.LAMP

    def protect_gradient(self, tensors: Mapping[str, torch.Tensor], text_count: int, stream: Stream) -> Tensors:
        return {name: tensor * keep_mask(stream, tensor, 1 - self.ratio) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class MagnitudePruning(GradientDefence):
    """Drops the smallest entries of the gradient.

    Attributes:
        ratio: the share that is dropped, rounded down to whole entries, so that something is left.
        among: "tensor": the smallest entries of each tensor are dropped; "all": the smallest of the whole gradient, by
            which all entries of a tensor may be dropped.
    """

    ratio: float = limited_field(0.99, above=0, below=1, hint="0.99 keeps one entry of a hundred")
    among: Literal["tensor", "all"] = "tensor"

    name: ClassVar[str] = "magnitude-pruning"
    paper: ClassVar[Paper | None] = papers.DLG

    def protect_gradient(self, tensors: Mapping[str, torch.Tensor], text_count: int, stream: Stream) -> Tensors:
        if self.among == "tensor":
            return {
                name: tensor * largest_mask(tensor.flatten(), self._remaining_count(tensor.numel())).view_as(tensor)
                for name, tensor in tensors.items()
            }
        entries = torch.cat([tensor.flatten() for tensor in tensors.values()])
        sizes = [tensor.numel() for tensor in tensors.values()]
        masks = largest_mask(entries, self._remaining_count(len(entries))).split(sizes)
        return {
            name: tensor * mask.view_as(tensor) for (name, tensor), mask in zip(tensors.items(), masks, strict=True)
        }

    def _remaining_count(self, count: int) -> int:
        """Returns how many entries remain, by the given decimal fraction: 0.29 of 100 in floats is less than 29."""
        return count - int(Fraction(str(self.ratio)) * count)


def largest_mask(entries: torch.Tensor, count: int) -> torch.Tensor:
    """Returns (n,) 1 for the `count` entries that are largest in magnitude, the first of equal ones, and else 0.

    The mask comes from a threshold, since a table of 10 million entries takes seconds to sort.
    """
    if count >= len(entries):
        return torch.ones_like(entries)
    magnitudes = entries.abs()
    limit = magnitudes.kthvalue(len(magnitudes) - count + 1).values
    is_kept = magnitudes > limit
    equal = (magnitudes == limit).nonzero().flatten()
    is_kept[equal[: count - int(is_kept.sum())]] = True
    return is_kept.to(entries.dtype)

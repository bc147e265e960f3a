"""By how much rough values may be off, and what that leaves of a comparison.

A first look in bf16 rounds each value by a share of itself, so that small cosines are known better than large ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

ROUNDED = 2.0**-8  # the share of a number that it changes by, at most, when it becomes one of bf16

Value = TypeVar("Value", float, torch.Tensor)


@dataclass(frozen=True)
class Slack:
    """By how much rough values are off at most: one of v by `fixed + share * |v|`.

    Attributes:
        fixed: a number, or (b, 1) for rows of values.
        share: 0, or `ROUNDED` of values that are rounded to bf16.
    """

    fixed: float | torch.Tensor
    share: float = 0.0

    def below(self, value: Value) -> Value:
        """If a true value is larger than `value`, the rough one is larger than this."""
        return value - self._off(value)

    def above(self, value: Value) -> Value:
        """If a rough value is larger than this, the true one is larger than `value`."""
        return value + self._off(value)

    def _off(self, value: Value) -> Value:
        if not self.share:
            return self.fixed
        # The share is of the rough value, which is off from this one in turn
        return (self.fixed + self.share * abs(value)) * (1 + 2 * self.share)

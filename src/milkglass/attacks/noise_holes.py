"""The numbers that floating-point noise cannot produce (Mironov 2012). Some of them rule out wrong guesses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEWEST = 0.01  # a width with fewer holes rules nothing out

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

UP, DOWN = np.float32(np.inf), np.float32(-np.inf)


@dataclass(frozen=True)
class Holes:
    """The numbers that noise of one width cannot produce: fl(x + fl(s z)) over fp32 numbers z has holes.

    The product of s and an fp32 number is rounded to one of 2^23 numbers between two powers of two. If the mantissa of
    s is above 1, some of these never occur: 17 % of those between s's mantissa and 2 for s = 1.2. If a number that is
    sent lies in such a hole, seen from a guess x, it rules the guess out. It never rules out the true x.

    Attributes:
        width: s, the width of the noise in fp32.
    """

    width: np.float32

    @property
    def share(self) -> float:
        """Returns the share of the numbers between two powers of two that are holes, by a sample of them."""
        sample = np.linspace(1, 2, 20_001, dtype=np.float32)[:-1]
        return 1 - float(self.noise(sample).mean())

    def noise(self, n: Floats) -> Mask:
        """Returns where n = fl(s z) for some fp32 number z."""
        z = (n.astype(np.float64) / np.float64(self.width)).astype(np.float32)
        hit = (self.width * z) == n
        for direction in (UP, DOWN):
            hit |= (self.width * np.nextafter(z, direction)) == n
        return hit

    def reachable(self, x: Floats, y: Floats) -> Mask:
        """Returns where y = fl(x + n) for some possible noise n."""
        x, y = np.broadcast_arrays(x, y)
        middle = (y.astype(np.float64) - x.astype(np.float64)).astype(np.float32)
        up, down = np.nextafter(middle, UP), np.nextafter(middle, DOWN)
        hit = np.zeros(x.shape, np.bool_)
        for n in (middle, up, down, np.nextafter(up, UP), np.nextafter(down, DOWN)):
            part = ~hit & ((x + n) == y)
            hit[part] = self.noise(n[part])
        return hit

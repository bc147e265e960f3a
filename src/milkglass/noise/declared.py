"""What is public of the noise that a mechanism adds: an attacker is given it (Kerckhoffs).

What this module does not know: how the noise is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AddedNoise:
    """Attributes:
    law: the distribution.
    width: its standard deviation (gaussian) or scale (laplace), in units of what is sent.
    clip: what was bounded before; None: nothing.
    bounded: "text", the L2 norm of all numbers of a text, or "row", the mean absolute coordinate of each row.
    """

    law: Literal["gaussian", "laplace"]
    width: float
    clip: float | None = None
    bounded: Literal["text", "row"] = "text"

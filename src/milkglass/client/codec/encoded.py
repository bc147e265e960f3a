"""What a codec returns: scrambled ids, and where there are labels, these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # a label on which there is no loss
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Encoded:
    """Scrambled ids, one int32 array a text; `token_type_ids` (int8, same shapes) where the model uses them.

    long: places of the texts that were cut to the limit.
    """

    ids: list[Ids]
    token_type_ids: list[NDArray[np.int8]] | None
    long: tuple[int, ...] = ()


@dataclass(frozen=True)
class LabelledIds:
    """Supervised examples: scrambled ids, and labels (int32, same shapes) that are -100 outside the answers.

    long: places of the examples that were cut to the limit.
    unanswered: of those that lost all answers by it, by place: how many tokens come before the first answer.
    """

    ids: list[Ids]
    labels: list[Ids]
    long: tuple[int, ...] = ()
    unanswered: Mapping[int, int] = field(default_factory=dict)

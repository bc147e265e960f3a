"""The key's budget: how much is recovered as more text is sent under one key.

The strongest attack runs again on the first 1,000, 3,000, 10,000 ... tokens of the private text, for each attacker with
text. All runs start from the same candidates, since the clusters follow from the table alone. audit.py runs the attack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from milkglass.audit.report.result import BudgetPoint
from milkglass.audit.scene import Scene
from milkglass.sequences import Ids
from milkglass.threat.observations import Outputs, Tokens, Transcript

REACHED_SHARES = (0.10, 0.25, 0.50)
FIRST_TOKENS = 1000


def measured_sizes(total: int) -> list[int]:
    """Returns the numbers of tokens at which is measured, of a text of `total` tokens."""
    steps = (round(FIRST_TOKENS * 10 ** (i / 2) / FIRST_TOKENS) * FIRST_TOKENS for i in range(20))
    return [*(step for step in steps if step < 0.8 * total), total]


def beginning(scene: Scene, token_count: int) -> tuple[Scene, int]:
    """Returns the scene with its first texts, and how many tokens these have: `token_count` or more if possible."""
    sent = scene.truth.sent
    text_count = int(np.searchsorted(np.cumsum(sent.lengths), token_count) + 1)
    first = np.arange(min(text_count, len(sent)))
    first_texts = sent.chosen(first)
    others = tuple(seen for seen in scene.transcript.observations if not isinstance(seen, Tokens | Outputs))
    transcript = Transcript((*others, Tokens(first_texts)), scene.transcript.size)
    original = None if scene.truth.original is None else scene.truth.original.chosen(first)
    truth = replace(scene.truth, sent=first_texts, original=original)
    return replace(scene, transcript=transcript, truth=truth, texts=None), len(first_texts.ids)


def shares_read(scene: Scene, reading: Ids) -> tuple[float, float]:
    """Returns the shares of running and of content tokens that are read correctly, nan if there are no such tokens."""
    sent = scene.truth.tokens
    counted = scene.truth.ordinary[sent.ids]
    is_right = reading == sent.ids

    def share(among: NDArray[np.bool_]) -> float:
        return float(is_right[among].mean()) if among.any() else float("nan")

    return share(counted), share(counted & scene.truth.content[sent.ids])


def tokens_to_reach(points: Sequence[BudgetPoint]) -> dict[str, dict[str, int]]:
    """Returns for each attacker after how many tokens each share of the content tokens is read.

    Between two points it interpolates linearly over the logarithm of the tokens. If the first point exceeds a share,
    that point is taken. Shares that were never reached are left out.
    """
    result: dict[str, dict[str, int]] = {}
    for attacker in dict.fromkeys(point.adversary for point in points):
        points_of_attacker = sorted(
            (point for point in points if point.adversary == attacker and not math.isnan(point.content)),
            key=lambda point: point.tokens,
        )
        reached = {f"{100 * share:.0f} %": crossing(points_of_attacker, share) for share in REACHED_SHARES}
        result[attacker] = {share: tokens for share, tokens in reached.items() if tokens is not None}
    return result


def crossing(points: Sequence[BudgetPoint], share: float) -> int | None:
    """Returns the number of tokens at which this share is reached. None: it is not."""
    for last_below, first_above in zip([None, *points], points, strict=False):
        if first_above.content >= share:
            if last_below is None:
                return first_above.tokens
            exponent = (share - last_below.content) / (first_above.content - last_below.content)
            return round(last_below.tokens * (first_above.tokens / last_below.tokens) ** exponent)
    return None

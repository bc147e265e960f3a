"""Measures how much of a text is recovered as more text is sent under one key: the key's budget.

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

REACHED_SHARES = (0.10, 0.25, 0.50)  # shares of content tokens for which `tokens_to_reach` counts the tokens sent
FIRST_POINT_TOKENS = 1000  # tokens of the curve's first point


def curve_sizes(total_tokens: int) -> list[int]:
    """Returns how many tokens each point of the curve has, in a text of `total_tokens`: 1,000, 3,000, ... and all."""
    sizes = (round(10 ** (i / 2)) * FIRST_POINT_TOKENS for i in range(20))
    return [*(size for size in sizes if size < 0.8 * total_tokens), total_tokens]


def with_first_texts(scene: Scene, token_count: int) -> tuple[Scene, int]:
    """Returns the scene with its first texts alone, and how many tokens these have.

    Texts are taken until they have at least `token_count` tokens, or all if they have fewer.
    """
    sent = scene.truth.sent
    text_count = int(np.searchsorted(np.cumsum(sent.lengths), token_count) + 1)
    indices = np.arange(min(text_count, len(sent)))
    first_texts = sent.select(indices)
    others = tuple(seen for seen in scene.transcript.observations if not isinstance(seen, Tokens | Outputs))
    transcript = Transcript((*others, Tokens(first_texts)), scene.transcript.vocab_size)
    original = None if scene.truth.original is None else scene.truth.original.select(indices)
    truth = replace(scene.truth, sent=first_texts, original=original)
    return replace(scene, transcript=transcript, truth=truth, texts=None), len(first_texts.ids)


def shares_read(scene: Scene, guess_ids: Ids) -> tuple[float, float]:
    """Returns which shares of the ordinary tokens, and of the content tokens among them, are read correctly.

    A share of no tokens is nan.

    Args:
        scene: the scene, whose truth grades the guess.
        guess_ids: (tokens,) the public id that is guessed for each token of the scene's texts.
    """
    sent = scene.truth.tokens
    is_counted = scene.truth.ordinary[sent.ids]
    is_right = guess_ids == sent.ids

    def share(mask: NDArray[np.bool_]) -> float:
        return float(is_right[mask].mean()) if mask.any() else float("nan")

    return share(is_counted), share(is_counted & scene.truth.content[sent.ids])


def tokens_to_reach(points: Sequence[BudgetPoint]) -> dict[str, dict[str, int]]:
    """Returns after how many tokens sent each share of the content tokens is read: {"attacker": {"10 %": 3000}}.

    A share that an attacker never reaches is left out. See `tokens_at_share`.

    Args:
        points: the points of all attackers' curves, in any order.
    """
    result: dict[str, dict[str, int]] = {}
    for attacker in dict.fromkeys(point.adversary for point in points):
        points_of_attacker = sorted(
            (point for point in points if point.adversary == attacker and not math.isnan(point.content)),
            key=lambda point: point.tokens,
        )
        tokens_by_share = {
            f"{100 * share:.0f} %": tokens_at_share(points_of_attacker, share) for share in REACHED_SHARES
        }
        result[attacker] = {share: tokens for share, tokens in tokens_by_share.items() if tokens is not None}
    return result


def tokens_at_share(points: Sequence[BudgetPoint], share: float) -> int | None:
    """Returns after how many tokens one attacker's curve reaches a share of content tokens, or None if it does not.

    Between two points it interpolates linearly over the logarithm of the tokens. If the first point reaches the share,
    its tokens are returned.

    Args:
        points: the curve's points, by rising number of tokens.
        share: the share of content tokens, from 0 to 1.
    """
    for last_below, first_above in zip([None, *points], points, strict=False):
        if first_above.content >= share:
            if last_below is None:
                return first_above.tokens
            exponent = (share - last_below.content) / (first_above.content - last_below.content)
            return round(last_below.tokens * (first_above.tokens / last_below.tokens) ** exponent)
    return None

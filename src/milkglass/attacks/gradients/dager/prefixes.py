"""Finds a decoder's texts: a prefix grows by a token while the second layer's input lies in the span of its gradients.

A state of a causal model depends only on the tokens before it. So a prefix is right or wrong whatever follows, and
after one wrong token no continuation is in the span.

One kind of wrong prefix is always in the span: a text's first token, repeated. Attention over equal values returns that
value, whatever the positions. So the texts are chosen whose states span most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from milkglass.attacks.gradients.dager.layers import Entrance, SpanTokens, farthest
from milkglass.attacks.gradients.spans import Span
from milkglass.threat.budget import Budget

TOKENS = 8192  # in a forward
DISTINCT = 1e-2  # a state, of length 1, is new where it is so far from the span of the others

Text = tuple[int, ...]


def grown(
    entrance: Entrance,
    spans: Sequence[Span],
    span_tokens: SpanTokens,
    longest: int,
    tolerance: float,
    most: int,
    budget: Budget,
) -> list[Text]:
    """Returns every text that is in the spans from its first token to its last and cannot grow further.

    Args:
        entrance, spans: of the second layer.
        span_tokens: the tokens of each position.
        longest: the greatest length.
        tolerance: how far a state may be from the spans.
        most: how many prefixes are kept at a time, the nearest ones.
    """
    alive: list[Text] = [()]
    ended: list[Text] = []
    for position in range(longest):
        options = span_tokens.at(position)
        longer = [(*prefix, token) for prefix in alive for token in options]
        if not longer or budget.left() <= 0:
            break
        away = torch.cat([farthest(spans, states(entrance, part)[:, -1]) for part in blocks(longer)])
        order = [one for one in away.argsort().tolist() if away[one] < tolerance][:most]
        kept = [longer[one] for one in order]
        parents = {one[:-1] for one in kept}
        ended += [one for one in alive if one and one not in parents]
        alive = kept
        if not alive:
            break
    return ended + [one for one in alive if one]


def states(entrance: Entrance, texts: Sequence[Text]) -> Tensor:
    """Returns (b, t, d) what enters for texts of one length."""
    return entrance.read(entrance.step.embedded(torch.tensor(texts)).detach())


def blocks(texts: list[Text]) -> list[list[Text]]:
    """Returns texts of one length in parts that fit through a model."""
    step = max(1, TOKENS // len(texts[0]))
    return [texts[start : start + step] for start in range(0, len(texts), step)]


def chosen(entrance: Entrance, texts: Sequence[Text], count: int, lengths: Sequence[int] | None) -> list[Text]:
    """Returns at most `count` texts, each time the one that adds most to the span of the states chosen before.

    Args:
        lengths: those of the texts; a text of another length comes after all others. None: not known.
    """
    left = {one: torch.nn.functional.normalize(states(entrance, [one])[0].double(), dim=1) for one in texts}
    expected = list(lengths) if lengths is not None else None
    basis = torch.zeros(entrance.step.table.shape[1], 0, dtype=torch.float64)
    taken: list[Text] = []
    while left and len(taken) < count:
        if basis.shape[0] != (width := next(iter(left.values())).shape[1]):
            basis = torch.zeros(width, 0, dtype=torch.float64)
        new = {one: _added(rows, basis) for one, rows in left.items()}
        best = max(left, key=lambda one: (expected is None or len(one) in expected, new[one].shape[1], -len(one)))
        if not new[best].shape[1] and expected is None:
            break
        basis = torch.cat([basis, new[best]], 1)
        if expected is not None and len(best) in expected:
            expected.remove(len(best))
        del left[best]
        taken.append(best)
    return taken


def _added(rows: Tensor, basis: Tensor) -> Tensor:
    """Returns (d, k) orthonormal directions of rows (t, d) outside the span of a basis (d, r)."""
    rest = rows - (rows @ basis) @ basis.T
    _, values, right = torch.linalg.svd(rest, full_matrices=False)
    return right[values > DISTINCT].T

"""Which tokens of the vocabulary stood at which position, by the span of the first layer's gradients.

What enters the first layer's attention is a function of one token and its position: nothing was mixed yet. So each
token is put at each position, the model itself embeds and normalises it, and what enters is held against the spans.
Where positions enter by rotation only, inside the attention, this shows which tokens there were, and not where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from milkglass.attacks.gradients.dager.layers import Entrance, Matrix
from milkglass.attacks.gradients.inversion import SharedBatch
from milkglass.attacks.gradients.spans import Span, row_space
from milkglass.threat.training_step import SharedStep

FLOATS = 4_000_000  # embedded at a time


@dataclass(frozen=True, eq=False)
class SpanTokens:
    """The tokens whose states lie in the span of the first layer's gradients.

    Attributes:
        tokens: for each position those in the span, nearest first.
        nearest: (t,) of each position the nearest token, in the span or not.
        placed: whether what enters depends on the position; else every position is alike.
    """

    tokens: tuple[tuple[int, ...], ...]
    nearest: tuple[int, ...]
    placed: bool

    def at(self, position: int) -> tuple[int, ...]:
        return self.tokens[position if self.placed else 0]


def spans_of(batch: SharedBatch, entrance: Entrance, total: int | None = None) -> list[Span]:
    """The spans of the gradients of one layer's entrance; a vector that entered lies in all of them.

    Queries, keys and values count as one matrix. Of an adapter's halves, the first (r, d) has the same span, where its
    rank r is not less than the number of vectors; the second (out, r) that of A x, where r is more.

    Args:
        total: how many vectors entered, where that is known.

    Returns:
        None of them where the gradients are not shared, zero, or of full rank: then they exclude nothing.
    """
    direct, result = [], []
    for matrix in entrance.matrices:
        grad = batch.tensor(matrix.name)
        if grad is not None:
            direct.append(grad.T if matrix.transposed else grad)
        second = None if matrix.followed is None else batch.tensor(matrix.followed)
        if second is not None:
            result.append(row_space([second], _weight(batch.step, matrix)))
    spans = [one for one in result if one.rank and not one.full]
    if direct:
        whole = row_space(direct)
        enough = total is not None and total <= whole.rank
        # what was normalised has a dimension less than the model, so that all of the vocabulary would be in it
        if 0 < whole.rank < whole.basis.shape[0] - 1 and (enough or not whole.full):
            spans.append(whole)
    return [one for one in spans if one.rank == max(other.rank for other in spans)]


def _weight(step: SharedStep, matrix: Matrix) -> Tensor:
    return dict(step.module.named_parameters())[matrix.name].detach()


def farthest(spans: Sequence[Span], vectors: Tensor) -> Tensor:
    """(...) the largest distance of vectors (..., d) from any of the spans."""
    return torch.stack([one.distances(vectors) for one in spans]).amax(0)


def tokens(entrance: Entrance, spans: Sequence[Span], positions: int, tolerance: float, most: int) -> SpanTokens | None:
    """Which tokens are in all spans at each of so many positions. None where more than `most` are at one, so that the
    spans exclude nothing."""
    placed = depends_on_position(entrance)
    t = positions if placed else 1
    size, width = entrance.step.table.shape
    parts = []
    for ids in torch.arange(size).split(max(1, FLOATS // (t * width))):
        embeds = entrance.step.embedded(ids[:, None].expand(-1, t)).detach()
        parts.append(farthest(spans, entrance.read(embeds)))
    away = torch.cat(parts)  # (v, t)
    if int((away < tolerance).sum(0).max()) > most:
        return None
    order = away.argsort(dim=0)
    kept = (away < tolerance).sum(0).tolist()
    every = tuple(tuple(order[:count, at].tolist()) for at, count in enumerate(kept))
    return SpanTokens(every, tuple(order[0].tolist()), placed)


def depends_on_position(entrance: Entrance) -> bool:
    """Whether a token at the second position enters otherwise than at the first."""
    part = torch.arange(min(8, len(entrance.step.table)))
    seen = entrance.read(entrance.step.embedded(part[:, None].expand(-1, 2)).detach())
    return not torch.allclose(seen[:, 0], seen[:, 1], rtol=1e-4, atol=1e-6)

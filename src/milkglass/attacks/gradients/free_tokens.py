"""Reads the tokens of a batch from the nonzero rows of the embeddings' gradient ("free tokens").

It runs no model and optimises nothing. It is the cheapest attack, and any other must read more. A row of the embedding
table gets a gradient only if its token occurs.

If the table is also the head and the loss is for the next token, every row gets a gradient as a possible answer. For a
token that was neither read nor a target, that gradient is a combination of the states at which tokens were predicted.
These rows, by far the most, span no more dimensions than there are states. So each row is compared with the span P of
the others,

    |g_x - P g_x| / |g_x|

This is only rounding error for a token that was not read, and more for a token that was. The last token of a text is
never read, so it is not found. If noise was added, those rows are taken whose norms are too large for noise.

The attack does not guess how often a token occurs: the norm of a row depends on its token's effect on the loss, and not
only on how often it occurs. Each token is named once. Texts of a batch are not distinguished: tokens are divided among
them by the lengths, in the order of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milkglass import device, papers
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch
from milkglass.attacks.gradients.spans import row_space
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import require_known

SAMPLE_ROWS = 512  # rows from which the span of the others is taken
MAX_SPREAD = 0.5  # largest spread of the squared norms of rows of noise, relative to their median
MIN_SIGMAS = 8.0  # a row whose squared norm is this many deviations above the median is not noise
NOT_SHARED_REASON = "the gradient of the embeddings is not shared"
MAX_SHARE_OF_ROWS = 0.5  # share of the vocabulary above which rows are not distinguished


@dataclass(frozen=True)
class FreeTokens(Inversion):
    """Reads the tokens whose rows of the embeddings' gradient stand out.

    Attributes:
        apart: how far a row must be from the span of the others, relative to its norm, if most rows are nonzero.
    """

    apart: float = 1e-2

    name = "free-tokens"
    title = "Free tokens (rows of the embeddings' gradient)"
    paper = papers.FEATURE_LEAKAGE.at("section 3").with_deviations(
        "Where the head is the table, the span of the rows of all other tokens is taken away first."
    )
    uses = frozenset({"lengths"})

    def why_unreadable(self, batch: SharedBatch) -> str | None:
        if (grad := table_gradient(batch)) is None:
            return NOT_SHARED_REASON
        if read_tokens(grad, self.apart) is None:
            return "the rows of the embeddings' gradient are all alike: no token can be distinguished from another"
        return None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        return divide_among_texts(read_tokens(require_known(table_gradient(batch)), self.apart), batch)


def table_gradient(batch: SharedBatch) -> Tensor | None:
    """Returns (v, d) the gradient of the embeddings, or None if it is not shared."""
    name = batch.step.table_name
    return None if name is None else batch.gradient(name)


def read_tokens(grad: Tensor, min_distance: float = 1e-2) -> Ids | None:
    """Returns (k,) the ids that were read, ascending, or None if no rows stand out.

    Args:
        grad: (v, d) the embeddings' gradient.
        min_distance: how far a row must be from the span of the others, relative to its norm, if most rows are nonzero.
    """
    was_read = (grad != 0).any(1)
    if int(was_read.sum()) > MAX_SHARE_OF_ROWS * len(grad):
        was_read = _is_outside_span(grad, min_distance)
    if not 0 < int(was_read.sum()) <= MAX_SHARE_OF_ROWS * len(grad):
        return None
    return device.array(was_read.nonzero()[:, 0]).astype(np.int64)


def _is_outside_span(grad: Tensor, min_distance: float) -> Tensor:
    """Returns (v,) whether each row is outside the span of the smallest nonzero rows.

    The smallest rows are of tokens that were neither read nor likely answers. If they span everything, as with noise,
    the rows that are too large for noise are marked instead.
    """
    norms = grad.double().norm(dim=1)
    order = norms.argsort()[int((norms == 0).sum()) :]
    smallest = order[: min(SAMPLE_ROWS, len(grad) // 2)]
    span = row_space([(grad[smallest].double() / norms[smallest, None]).to(grad.dtype)])
    if span.rank >= min(grad.shape[1], len(smallest)):
        return _is_above_noise(norms.square())
    return (span.distances(grad) > min_distance) & (norms > 0)


def _is_above_noise(squares: Tensor) -> Tensor:
    """Returns (v,) whether each row, by its squared norm (v,), is too large to be noise.

    Rows of noise have nearly equal norms (a sum of d independent squares). If most norms are not nearly equal, no row
    is too large.
    """
    median = squares.median()
    spread = 1.4826 * (squares - median).abs().median()  # a standard deviation, whatever the large ones are
    if spread > MAX_SPREAD * median:
        return torch.zeros_like(squares, dtype=torch.bool)
    return squares > median + MIN_SIGMAS * spread


def divide_among_texts(ids: Ids | None, batch: SharedBatch) -> list[Ids]:
    """Divides the tokens among the texts of the batch, by the lengths if they are known, else evenly.

    Args:
        ids: (k,) the tokens. None: there are none.
    """
    ids = np.empty(0, np.int64) if ids is None else ids
    shares = np.ones(batch.size) if batch.lengths is None else batch.lengths.astype(np.float64)
    text_ends = np.rint(np.cumsum(shares / shares.sum()) * len(ids)).astype(np.int64)
    return np.split(ids, text_ends[:-1])

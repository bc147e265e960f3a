"""Free tokens: the nonzero rows of the embeddings' gradient are the tokens that were read.

It runs no model and optimises nothing. It is the cheapest attack, and the least that any other must exceed. A row of
the embedding table gets a gradient only if its token occurs.

If the table is also the head and the loss is for the next token, every row gets a gradient as a possible answer. For a
token that was neither read nor a target, that gradient is a combination of the states at which tokens were predicted.
These rows, by far the most, span no more dimensions than there are states. So each row is compared with the span P of
the others,

    |g_x - P g_x| / |g_x|

which is rounding for these, and not for a token that was read. The last token of a text is never read, so it is not
found. If noise was added, the rows are taken that are too long to be noise, as long as there are some.

The attack does not guess how often a token occurs: the size of a row depends on its tokens' effect, not on their
number. Each token is named once. Texts of a batch are not distinguished: tokens are dealt out by the lengths, in the
order of their ids.
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

SAMPLE_ROWS = 512  # rows from which the span of the others is taken
MAX_SPREAD = 0.5  # largest spread of the squared lengths of rows of noise, relative to their median
MIN_SIGMAS = 8.0  # a row whose squared length is this many deviations above the median is no noise
NOT_SHARED = "the gradient of the embeddings is not shared"
MAX_SHARE_OF_ROWS = 0.5  # share of the vocabulary above which rows are not distinguished


@dataclass(frozen=True)
class FreeTokens(Inversion):
    """The free tokens attack.

    Attributes:
        apart: how far a row must be from the span of the others if no row is zero, relative to its length.
    """

    apart: float = 1e-2

    name = "free-tokens"
    title = "Free tokens (rows of the embeddings' gradient)"
    paper = papers.FEATURE_LEAKAGE.at("section 3").but(
        "Where the head is the table, the span of the rows of all other tokens is taken away first."
    )
    uses = frozenset({"lengths"})

    def why_unreadable(self, batch: SharedBatch) -> str | None:
        if (grad := table_gradient(batch)) is None:
            return NOT_SHARED
        if read_tokens(grad, self.apart) is None:
            return "the rows of the embeddings' gradient are all alike: no token can be distinguished from another"
        return None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        grad = table_gradient(batch)
        return deal_out(None if grad is None else read_tokens(grad, self.apart), batch)


def table_gradient(batch: SharedBatch) -> Tensor | None:
    """Returns (v, d) the gradient of the embeddings. None: it is not shared."""
    name = batch.step.table_name
    return None if name is None else batch.tensor(name)


def read_tokens(grad: Tensor, apart: float = 1e-2) -> Ids | None:
    """Returns (k,) the ids that were read, ascending, by the embeddings' gradient (v, d). None: all rows are alike.

    Args:
        grad: the gradient.
        apart: how far a row must be from the span of the others if no row is zero, relative to its length.
    """
    was_read = (grad != 0).any(1)
    if int(was_read.sum()) > MAX_SHARE_OF_ROWS * len(grad):
        was_read = _is_outside_span(grad, apart)
    if not 0 < int(was_read.sum()) <= MAX_SHARE_OF_ROWS * len(grad):
        return None
    return device.array(was_read.nonzero()[:, 0]).astype(np.int64)


def _is_outside_span(grad: Tensor, apart: float) -> Tensor:
    """Returns (v,) which rows are outside the span of the shortest nonzero rows.

    These are of tokens neither read nor likely answers.
    """
    norms = grad.double().norm(dim=1)
    order = norms.argsort()[int((norms == 0).sum()) :]
    small = order[: min(SAMPLE_ROWS, len(grad) // 2)]
    span = row_space([(grad[small].double() / norms[small, None]).to(grad.dtype)])
    if span.rank >= min(grad.shape[1], len(small)):
        return _is_above_noise(norms.square())
    return (span.distances(grad) > apart) & (norms > 0)


def _is_above_noise(squares: Tensor) -> Tensor:
    """Returns (v,) which rows, by their squared lengths (v,), are too long to be noise.

    Rows of noise have nearly equal lengths (a sum of d independent squares). If most lengths are not nearly equal, none
    is.
    """
    median = squares.median()
    spread = 1.4826 * (squares - median).abs().median()  # a standard deviation, whatever the long ones are
    if spread > MAX_SPREAD * median:
        return torch.zeros_like(squares, dtype=torch.bool)
    return squares > median + MIN_SIGMAS * spread


def deal_out(ids: Ids | None, batch: SharedBatch) -> list[Ids]:
    """Returns the tokens as texts of the batch, dealt out by the lengths or else evenly. None: there are no tokens."""
    ids = np.empty(0, np.int64) if ids is None else ids
    shares = np.ones(batch.size) if batch.lengths is None else batch.lengths.astype(np.float64)
    text_ends = np.rint(np.cumsum(shares / shares.sum()) * len(ids)).astype(np.int64)
    return np.split(ids, text_ends[:-1])

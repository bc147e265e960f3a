"""Free tokens: the rows of the embeddings' gradient that are not zero are the tokens that were read.

No model is run and nothing is optimised: it is the cheapest attack, and any that recovers less than it recovers
nothing. A row of the table of embeddings gets gradient only from places where its token stood.

Where the table is the head as well and the loss asks for the next token, every row gets gradient as a possible answer.
Then there is a row for each token that was no answer, and nothing to recognise it by but its size: the head's part of
row x is a combination of the states that were asked, as many as there were. So rows are held against the span of the
others: those of tokens that were neither read nor asked for, far the most, span no more than the states, and

    |g_x - P g_x| / |g_x|,     P onto that span

is rounding for these, and not for a token that was read. The last token of a text was never read and is not found then.
Where noise was added, rows that are too long for noise are taken, as long as there are such.

How often a token was there is not guessed: rows grow with their tokens' effect, not with their number. Each comes once.
Texts of a batch are not distinguished: all tokens are dealt out by the lengths, in the order of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milkglass import papers
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch
from milkglass.attacks.gradients.spans import row_space
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget

SAMPLE = 512  # rows from which the span of the others is taken
LEVEL = 0.5  # how far the squared lengths of rows of noise may spread, relative to their middle
SIGMAS = 8.0  # a row of noise is not so much longer than others, among any number of rows
NOT_SHARED = "the gradient of the embeddings is not shared"
MAX_SHARE_OF_ROWS = 0.5  # share of the vocabulary above which rows are not distinguished


@dataclass(frozen=True)
class FreeTokens(Inversion):
    """Free tokens: the rows of the embeddings' gradient that are not zero are the tokens that were read.

    Attributes:
        apart: how far a row must be from the span of the others where all are not zero, relative to its length.
    """

    apart: float = 1e-2

    name = "free-tokens"
    title = "Free tokens (rows of the embeddings' gradient)"
    paper = papers.FEATURE_LEAKAGE.at("section 3").but(
        "Where the head is the table, the span of the rows of all other tokens is taken away first."
    )
    uses = frozenset({"lengths"})

    def misses(self, batch: SharedBatch) -> str | None:
        if (grad := table_gradient(batch)) is None:
            return NOT_SHARED
        if bag(grad, self.apart) is None:
            return "the rows of the embeddings' gradient are all alike: no token can be distinguished from another"
        return None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        grad = table_gradient(batch)
        return dealt(None if grad is None else bag(grad, self.apart), batch)


def table_gradient(batch: SharedBatch) -> Tensor | None:
    """(v, d) of the embeddings; None where it is not shared."""
    name = batch.step.table_name
    return None if name is None else batch.tensor(name)


def bag(grad: Tensor, apart: float = 1e-2) -> Ids | None:
    """(k,) the ids that were read, ascending, by the gradient (v, d) of the embeddings; None where the rows are all
    alike."""
    there = (grad != 0).any(1)
    if int(there.sum()) > MAX_SHARE_OF_ROWS * len(grad):
        there = _unlike(grad, apart)
    return (
        there.nonzero()[:, 0].numpy().astype(np.int64)
        if 0 < int(there.sum()) <= MAX_SHARE_OF_ROWS * len(grad)
        else None
    )


def _unlike(grad: Tensor, apart: float) -> Tensor:
    """(v,) which rows are outside the span that nearly all others lie in. That span is taken from the smallest rows,
    which are of tokens that were neither read nor likely answers."""
    lengths = grad.double().norm(dim=1)
    order = lengths.argsort()[int((lengths == 0).sum()) :]
    small = order[: min(SAMPLE, len(grad) // 2)]
    span = row_space([(grad[small].double() / lengths[small, None]).to(grad.dtype)])
    if span.rank >= min(grad.shape[1], len(small)):
        return _outstanding(lengths.square())
    return (span.distances(grad) > apart) & (lengths > 0)


def _outstanding(squares: Tensor) -> Tensor:
    """(v,) which rows are too long, by their squared lengths (v,), to be noise, whose rows are as good as equally long
    (a sum of d independent squares). None is where the lengths are not so."""
    middle = squares.median()
    spread = 1.4826 * (squares - middle).abs().median()  # a standard deviation, whatever the long ones are
    if spread > LEVEL * middle:
        return torch.zeros(len(squares), dtype=torch.bool)
    return squares > middle + SIGMAS * spread


def dealt(ids: Ids | None, batch: SharedBatch) -> list[Ids]:
    """All tokens, dealt out by the lengths; where these are not known, evenly. None: there are no tokens."""
    ids = np.empty(0, np.int64) if ids is None else ids
    shares = np.ones(batch.size) if batch.lengths is None else batch.lengths.astype(np.float64)
    ends = np.rint(np.cumsum(shares / shares.sum()) * len(ids)).astype(np.int64)
    return np.split(ids, ends[:-1])

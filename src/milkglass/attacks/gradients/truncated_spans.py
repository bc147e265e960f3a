"""Truncated spans: DAGER's test by the strongest directions of a gradient, for gradients that were pruned.

Random pruning gives every gradient full rank, so that no vector is outside of its span. But it adds, to a share of the
gradient, an error whose singular values are all alike: the largest directions still lean on what entered the layer. The
attack takes as many of them as there are tokens, and for each position the token that is nearest to them.

    B = the first t right singular vectors of the gradients of queries, keys and values, stacked
    |v - B B^T v| / |v|        smallest for a token that was read

How much that tells depends on the width of the model: of any vector a share sqrt(t / d) lies in t directions of d.

Where positions enter inside the attention alone, the first layer shows tokens without their places. Then texts are
grown as in DAGER, by the directions of the second layer, of which the text covers most. The last token of a text, which
the next-token loss does not read, is left out. The attack reads batches of one text of known length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import svds
from torch import Tensor

from milkglass import device, papers
from milkglass.attacks.gradients.dager_layers import (
    MIN_DISTINCT_DISTANCE,
    AttentionInput,
    TokenTuple,
    blocks,
    checking_work,
    depends_on_position,
    states,
    vocabulary_distances,
)
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch, require_positive
from milkglass.attacks.gradients.spans import Span
from milkglass.errors import UnsupportedModel
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Transcript

DENSE_SVD_RATIO = 4  # above one direction in DENSE_SVD_RATIO, all are computed


@dataclass(frozen=True)
class TruncatedSpans(Inversion):
    """The truncated spans attack.

    Attributes:
        candidates: how many of the nearest tokens, for each token of the text, texts are grown from.
        most: the most prefixes at a time.
    """

    candidates: int = 4
    most: int = 64

    name = "truncated-spans"
    title = "Truncated spans (DAGER's test after pruning)"
    paper = papers.ours("The nearest tokens to the strongest directions of a gradient, as many as there are tokens")
    uses = frozenset({"lengths"})

    def __post_init__(self) -> None:
        require_positive(self, "candidates", "most")

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        try:
            for layer in (0, 1):
                AttentionInput(required(knowledge.step), layer)
        except UnsupportedModel as error:
            return str(error)
        return super().refuses(transcript, knowledge)

    def why_unreadable(self, batch: SharedBatch) -> str | None:
        if batch.size > 1:
            return f"a batch holds {batch.size} texts, and only one can be read at a time"
        if batch.lengths is None:
            return "the attacker does not know the lengths"
        if truncated(batch, AttentionInput(batch.step, 0), 1) is None:
            return "no gradient of the queries, keys and values of layer 1 is shared"
        return None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        count = int(required(batch.lengths)[0]) - (batch.step.task == "next-token")
        low = AttentionInput(batch.step, 0)
        first = truncated(batch, low, count)
        if first is None:
            return [np.empty(0, np.int64)]
        distances = vocabulary_distances(low, [first], count)
        if depends_on_position(low):
            return [device.array(distances.argmin(0)).astype(np.int64)]
        nearest = distances[:, 0].argsort()[: self.candidates * count].tolist()
        high = AttentionInput(batch.step, 1)
        second = truncated(batch, high, count)
        text = tuple(nearest[:count]) if second is None else self._grow_text(high, second, nearest, count, budget)
        return [np.array(text, np.int64)]

    def _grow_text(
        self, attention_input: AttentionInput, span: Span, options: Sequence[int], count: int, budget: Budget
    ) -> TokenTuple:
        """Returns the text of `count` tokens whose states cover most of the span, prefix by prefix."""
        alive: list[TokenTuple] = [()]
        while len(alive[0]) < count and budget.left() > 0:
            longer = [(*prefix, token) for prefix in alive for token in options]
            budget.spend(checking_work(attention_input, [span], len(longer) * len(longer[0])))
            covered = torch.cat([coverage(span, states(attention_input, part)) for part in blocks(longer)])
            alive = [longer[one] for one in covered.argsort(descending=True)[: self.most].tolist()]
        return alive[0]


def coverage(span: Span, vectors: Tensor) -> Tensor:
    """Returns (b,) how many directions of the span the states (b, t, d) of texts cover, up to t.

    Of each state the part counts that is new beside those before it: a text's first token repeated has one state, which
    always lies in the span.
    """
    directions, triangle = torch.linalg.qr(torch.nn.functional.normalize(vectors, dim=-1).mT)
    inside = (span.basis.float().T @ directions).square().sum(1)  # (b, t)
    return (inside * (triangle.diagonal(dim1=1, dim2=2).abs() > MIN_DISTINCT_DISTANCE)).sum(1)


def truncated(batch: SharedBatch, attention_input: AttentionInput, count: int) -> Span | None:
    """Returns the span of the strongest `count` directions of the gradients at one layer. None: none is shared."""
    grads = [(batch.tensor(one.name), one.transposed) for one in attention_input.matrices]
    nonzero = [grad.T if transposed else grad for grad, transposed in grads if grad is not None and bool(grad.any())]
    if not nonzero:
        return None
    stacked = torch.cat([one / one.norm() for one in nonzero])
    return Span(strongest(stacked, count), None, False)


def strongest(rows: Tensor, count: int) -> Tensor:
    """Returns (d, count) the first right singular vectors of rows (m, d), orthonormal, in float64."""
    count = min(count, *rows.shape)
    if count * DENSE_SVD_RATIO > min(rows.shape):
        return torch.linalg.svd(rows.double(), full_matrices=False)[2][:count].T.contiguous()
    singular_values, right_vectors = svds(device.array(rows), k=count, random_state=0, return_singular_vectors="vh")[1:]
    return device.tensor(right_vectors[singular_values.argsort()[::-1]].T.astype(np.float64))

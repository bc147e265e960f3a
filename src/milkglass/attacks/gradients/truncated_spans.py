"""Applies DAGER's test to the strongest directions of a gradient, for gradients that were pruned.

Random pruning gives every gradient full rank, so that no vector is outside its span. But it adds, to a share of the
gradient, an error whose singular values are all alike: the strongest directions still lie near the layer's inputs. The
attack takes as many of them as there are tokens, and for each position the token that is nearest to them.

    B = the first t right singular vectors of the gradients of queries, keys and values, stacked
    |v - B B^T v| / |v|        smallest for a token that was read

How well this test distinguishes tokens depends on the width of the model: t of d directions contain about a share
sqrt(t / d) of a random vector.

Where positions enter only inside the attention (rotary), the first layer shows tokens without their places. Then texts
are grown as in DAGER, by the directions of the second layer: the text that covers most of them is chosen. The last
token of a text, which the next-token loss does not read, is left out. The attack reads batches of one text of known
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import svds
from torch import Tensor

from milkglass import device, papers
from milkglass.attacks.gradients.attention_inputs import (
    MIN_DISTINCT_DISTANCE,
    AttentionInput,
    TokenTuple,
    forward_batches,
    input_states,
    span_check_work,
    state_depends_on_position,
    vocabulary_distances,
)
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch, require_positive
from milkglass.attacks.gradients.spans import Span
from milkglass.errors import UnsupportedModel
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript

DENSE_SVD_RATIO = 4  # a dense SVD is used if more than 1/4 of the directions are wanted


@dataclass(frozen=True)
class TruncatedSpans(Inversion):
    """Takes the tokens nearest to the strongest directions of the gradients.

    Attributes:
        candidates_per_token: how many nearest tokens per token of the text are candidates.
        beam_width: the prefixes that are kept at each step.
    """

    candidates_per_token: int = 4
    beam_width: int = 64

    name = "truncated-spans"
    title = "Truncated spans (DAGER's test after pruning)"
    paper = papers.unpublished_method(
        "The nearest tokens to the strongest directions of a gradient, as many as there are tokens"
    )
    uses = frozenset({"lengths"})

    def __post_init__(self) -> None:
        require_positive(self, "candidates_per_token", "beam_width")

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        try:
            for layer in (0, 1):
                AttentionInput(require_known(knowledge.step), layer)
        except UnsupportedModel as error:
            return str(error)
        return super().refusal(transcript, knowledge)

    def why_unreadable(self, batch: SharedBatch) -> str | None:
        if batch.size > 1:
            return f"a batch holds {batch.size} texts, and only one can be read at a time"
        if batch.lengths is None:
            return "the attacker does not know the lengths"
        if truncated_span(batch, AttentionInput(batch.step, 0), 1) is None:
            return "no gradient of the queries, keys and values of layer 1 is shared"
        return None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        token_count = int(require_known(batch.lengths)[0]) - (batch.step.task == "next-token")
        first_layer, second_layer = AttentionInput(batch.step, 0), AttentionInput(batch.step, 1)
        first_span = require_known(truncated_span(batch, first_layer, token_count))
        distances = vocabulary_distances(first_layer, [first_span], token_count)
        if state_depends_on_position(first_layer):
            return [device.array(distances.argmin(0)).astype(np.int64)]
        nearest = distances[:, 0].argsort()[: self.candidates_per_token * token_count].tolist()
        second_span = truncated_span(batch, second_layer, token_count)
        text_ids = tuple(nearest[:token_count])
        if second_span is not None:
            text_ids = self._beam_search(second_layer, second_span, nearest, token_count, budget)
        return [np.array(text_ids, np.int64)]

    def _beam_search(
        self, attention_input: AttentionInput, span: Span, tokens: Sequence[int], token_count: int, budget: Budget
    ) -> TokenTuple:
        """Returns the text of `token_count` of the given tokens whose states cover most of the span."""
        beam: list[TokenTuple] = [()]
        while len(beam[0]) < token_count and budget.left() > 0:
            extended_prefixes = [(*prefix, token) for prefix in beam for token in tokens]
            budget.spend(span_check_work(attention_input, [span], len(extended_prefixes) * len(extended_prefixes[0])))
            covered = torch.cat(
                [coverage(span, input_states(attention_input, batch)) for batch in forward_batches(extended_prefixes)]
            )
            beam = [extended_prefixes[index] for index in covered.argsort(descending=True)[: self.beam_width].tolist()]
        return beam[0]


def coverage(span: Span, vectors: Tensor) -> Tensor:
    """Returns (b,) the number of directions of the span that the states (b, t, d) cover, as a sum of shares up to t.

    Only the part of a state that is orthogonal to the states before it counts: a text's first token repeated has one
    state, which always lies in the span.
    """
    directions, triangle = torch.linalg.qr(torch.nn.functional.normalize(vectors, dim=-1).mT)
    share_in_span = (span.basis.float().T @ directions).square().sum(1)  # (b, t)
    return (share_in_span * (triangle.diagonal(dim1=1, dim2=2).abs() > MIN_DISTINCT_DISTANCE)).sum(1)


def truncated_span(batch: SharedBatch, attention_input: AttentionInput, count: int) -> Span | None:
    """Returns the span of the strongest `count` directions of the gradients at one layer.

    None if no gradient of the layer is shared, or each is zero.
    """
    grads = [(batch.gradient(matrix.name), matrix.is_transposed) for matrix in attention_input.projections]
    nonzero = [
        grad.T if is_transposed else grad for grad, is_transposed in grads if grad is not None and bool(grad.any())
    ]
    if not nonzero:
        return None
    stacked = torch.cat([grad / grad.norm() for grad in nonzero])
    return Span(leading_right_singular_vectors(stacked, count), None, False)


def leading_right_singular_vectors(rows: Tensor, count: int) -> Tensor:
    """Returns (d, count) the first right singular vectors of rows (m, d), orthonormal, in float64."""
    count = min(count, *rows.shape)
    if count * DENSE_SVD_RATIO > min(rows.shape):
        return torch.linalg.svd(rows.double(), full_matrices=False)[2][:count].T.contiguous()
    singular_values, right_vectors = svds(device.array(rows), k=count, random_state=0, return_singular_vectors="vh")[1:]
    return device.tensor(right_vectors[singular_values.argsort()[::-1]].T.astype(np.float64))

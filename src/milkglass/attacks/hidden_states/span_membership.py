"""Finds the public embeddings that lie in the span of rows that were mixed by a secret matrix.

U = A [H; S] hides which row is whose. But for any A it has the span of H and the shields S (GELO,
hidden_states/gelo.py). Whether a public vector lies in that span can be tested without secrets:

    v in span(U)  <=>  |v - v R R^T| explained by rounding,     R an orthonormal basis of U's rows

1. Every token of the vocabulary is put through the public embeddings and norm, at every place if places enter as
   vectors, and compared with the span of one text (`span_of_sent_rows`, and DAGER's `tokens_in_spans`).
2. If positions are added (BERT, GPT-2), each place has its own tokens, and the text is read in order. Rotary positions
   enter later: then only the *set* of tokens is read. Fewer directions than rows show that some are repeated.
3. If the next layer's rows are mixed and seen as well, a decoder's text is put in order: a prefix is in the second
   span or not, whatever follows (DAGER's `grow_texts`).

A shield adds one direction, which changes nothing while rows and shields are fewer than dimensions. With as many, the
span is everything, and the attack refuses. Noise on U as large as the distance between two tokens defeats the attack;
`noise` tells it the size. Texts that are mixed in one batch are read as one bag. With added positions, places are then
ambiguous: w_i + p_j is in the span with any chain of w_i + p_k, w_l + p_k, w_l + p_j.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from milkglass.attacks import work
from milkglass.attacks.forward import body
from milkglass.attacks.gradients.attention_inputs import (
    AttentionInput,
    SpanTokens,
    choose_texts,
    grow_texts,
    state_depends_on_position,
    tokens_in_spans,
)
from milkglass.attacks.gradients.spans import EDGE_FACTOR, Span, span_of_sent_rows
from milkglass.models.view import Model
from milkglass.papers import unpublished_method
from milkglass.parameters import limited_field, require
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Activations, Transcript
from milkglass.threat.training_step import SharedStep


@dataclass(frozen=True)
class SpanMembership(Attack):
    """Reads mixed rows by the public embeddings that lie in their span.

    Attributes:
        k: the number of ranks of the guess, if places are read.
        tolerance: how far a vector may lie from the span, in units of what errors explain.
        noise: standard deviation of the noise that is known to be on each number sent.
        most: how many prefixes are kept at a time, where a text is put in order.
    """

    k: int = limited_field(10, least=1)
    tolerance: float = limited_field(EDGE_FACTOR, above=0)
    noise: float = limited_field(0.0)
    most: int = limited_field(256, least=1)

    name = "span-membership"
    title = "Public embeddings in the span of mixed rows"
    paper = unpublished_method(
        "Mixing rows by a secret matrix leaves their span, in which public embeddings lie or do not"
    )
    sees = frozenset({Activations})
    assumes = frozenset({"public_model"})
    min_seconds = 5.0  # seconds for a text of MiniLM

    def __post_init__(self) -> None:
        require(self)

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        mixed_states = [
            activations for activations in transcript.all(Activations) if activations.mixed_row_counts is not None
        ]
        if not mixed_states:
            return "no rows are mixed: other attacks read each state"
        layer_0_states = [activations for activations in mixed_states if activations.layer == 0]
        if not layer_0_states:
            return "the states follow from whole texts, and no list of texts is tried"
        width = require_known(knowledge.public_model).width
        if other_widths := [
            activations.hidden.shape[1] for activations in layer_0_states if activations.hidden.shape[1] != width
        ]:
            return f"the rows have {other_widths[0]} dimensions, the public model {width}"
        min_rows = min(
            (int(_row_counts(activations).min()) for activations in layer_0_states if len(activations.lengths)),
            default=0,
        )
        if min_rows >= width:
            return f"every text is mixed to {min_rows} rows or more in {width} dimensions: their span is everything"
        return None

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        mixed_states = [
            activations for activations in transcript.all(Activations) if activations.mixed_row_counts is not None
        ]
        first_rows = [
            part for activations in mixed_states if activations.layer == 0 for part in _rows_of_texts(activations)
        ]
        second_rows = [
            part for activations in mixed_states if activations.layer == 1 for part in _rows_of_texts(activations)
        ]
        reader = SpanReader(require_known(knowledge.public_model), self)
        is_ordered = reader.is_decoder and len(second_rows) == len(first_rows)
        readings = list[Ids]()
        for index, (rows, length) in enumerate(first_rows):
            if budget.left() <= 0:
                break
            if is_ordered:
                readings.append(reader.read_in_order(rows, second_rows[index][0], length, budget))
            elif reader.depends_on_place:
                readings.append(reader.read_in_place(rows, length))
            else:
                readings.append(reader.read_bag(rows, length))
            comparisons = float(length if reader.depends_on_place else 1) * reader.size * rows.numel()
            budget.spend(work.products(comparisons) + work.elements(3 * rows.numel()))
            budget.progress((index + 1) / len(first_rows))
        if not is_ordered and not reader.depends_on_place:
            empty_bag = np.empty(0, np.int64)
            return Guess(bags=(*readings, *(empty_bag for _ in first_rows[len(readings) :])))
        lengths, rank_count = [length for _, length in first_rows], 1 if is_ordered else min(self.k, reader.size)
        guess = np.full((sum(lengths), rank_count), NO_BELIEF, np.int64)
        for reading, text_end, length in zip(readings, np.cumsum(lengths).tolist(), lengths, strict=False):
            guess[text_end - length : text_end] = reading
        return Guess(by_token=guess)


class SpanReader:
    """Compares the public model's tokens with the rows of one text after the other.

    Attributes:
        size: n, the number of public tokens.
        depends_on_place: whether what enters the first layer depends on the place.
        is_decoder: whether a state depends only on its token and those before it.
    """

    def __init__(self, public: Model, attack: SpanMembership) -> None:
        self.attack, self.step = attack, SharedStep(body(public, 2))
        self.first_input = AttentionInput(self.step, 0)
        self.size, self.is_decoder = len(self.step.table), self.step.kind == "decoder"
        self.depends_on_place = state_depends_on_position(self.first_input)

    def span_tokens(self, rows: torch.Tensor, place_count: int) -> SpanTokens:
        """Returns the tokens in the span of rows (m, d) at each place, nearest first; none if the span is everything.

        There are at most as many as directions, since different tokens' vectors are independent.
        """
        span = self._span(rows)
        if span is None:
            return SpanTokens(((),) * place_count, (), self.depends_on_place)
        candidates = tokens_in_spans(self.first_input, [span], place_count, self.attack.tolerance, self.size)
        assert candidates is not None  # it is None only for more tokens than the vocabulary has
        return SpanTokens(
            tuple(tokens[: span.rank] for tokens in candidates.tokens),
            candidates.nearest,
            candidates.depends_on_position,
        )

    def read_bag(self, rows: torch.Tensor, place_count: int) -> Ids:
        """Returns the different tokens, ascending, in the span of rows (m, d), of texts of at most so many tokens."""
        candidates = self.span_tokens(rows, place_count)
        return np.array(sorted({token for tokens in candidates.tokens for token in tokens}), np.int64)

    def read_in_place(self, rows: torch.Tensor, length: int) -> Ids:
        """Returns (length, k) the tokens of one text, nearest first, NO_BELIEF if there are fewer."""
        candidates, k = self.span_tokens(rows, length), min(self.attack.k, self.size)
        ranked_tokens = np.full((length, k), NO_BELIEF, np.int64)
        for place in range(length):
            tokens_at_place = candidates.at(place)[:k]
            ranked_tokens[place, : len(tokens_at_place)] = tokens_at_place
        return ranked_tokens

    def read_in_order(self, rows: torch.Tensor, second_rows: torch.Tensor, length: int, budget: Budget) -> Ids:
        """Returns (length, 1) a decoder's text by its rows of layers 0 and 1, NO_BELIEF if none fits the second."""
        read_tokens, span = np.full((length, 1), NO_BELIEF, np.int64), self._span(second_rows)
        candidates = self.span_tokens(rows, length)
        if span is None or not candidates.at(0):
            return read_tokens
        second_input, attack = AttentionInput(self.step, 1), self.attack
        texts = grow_texts(second_input, [span], candidates, length, attack.tolerance, attack.most, budget)
        likeliest_texts = choose_texts(second_input, texts, 1, [length])
        if likeliest_texts and len(likeliest_texts[0]) == length:
            read_tokens[:, 0] = likeliest_texts[0]
        return read_tokens

    def _span(self, rows: torch.Tensor) -> Span | None:
        """Returns the span of rows (m, d), or None if it is everything or nothing."""
        span = span_of_sent_rows(rows.to(self.step.device), self.attack.noise)
        return None if span.is_full or not span.rank else span


def _row_counts(activations: Activations) -> Ids:
    """Returns (texts,) how many rows stand for each text."""
    return activations.lengths if activations.mixed_row_counts is None else activations.mixed_row_counts


def _rows_of_texts(activations: Activations) -> list[tuple[torch.Tensor, int]]:
    """Returns the rows of each text, and how many tokens it has."""
    rows_of_texts = activations.hidden.split(_row_counts(activations).tolist())
    return list(zip(rows_of_texts, activations.lengths.tolist(), strict=True))

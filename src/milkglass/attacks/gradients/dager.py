"""DAGER: exact inversion, since the gradient of a layer that reads few vectors spans nothing else.

1. The gradient of the first layer's query projection is dQ^T X. Its row space contains what entered at every position,
   and its rank is the number of these vectors (`spans`, `dager_layers`).
2. Every token of the vocabulary is put at every position and compared with that span.
3. The tokens in the span are combined to texts that are in the span of the second layer's gradients too: prefix by
   prefix in a decoder (`grow_texts`), position by position in an encoder (`Combiner`).
4. A causal model with the next-token loss never reads the last token of a text, so the layers' gradients do not show
   it.
   But it is a target. The head's gradient has a row for each target token. It contains minus the state from which
   that token was predicted, divided by the number of predictions. Everything else in the head's gradient follows from
   the text before it, and what is left is that state. If head and table are one, rows of tokens that were read contain
   a part of it too; then the whole gradient decides among these. Adapters leave the head unchanged, and this step does
   not apply.

There is no optimisation, no start and no prior: a text is found exactly or not at all. Noise and pruning give every
gradient full rank, and nothing is found; `surviving-entries` is for these. A batch with as many tokens as the model is
wide has full rank too. Known lengths help.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from milkglass import papers
from milkglass.attacks.gradients.dager_layers import (
    AttentionInput,
    SpanTokens,
    TokenTuple,
    blocks,
    checking_work,
    choose_texts,
    grow_texts,
    largest_distances,
    spans_of,
    states,
    tokens_in_spans,
)
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch, batches
from milkglass.attacks.gradients.spans import Span
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Transcript
from milkglass.threat.training_step import batch as padded

MIN_SHARE_OF_STATE = 0.5  # share of the state that must be left in a row for its token to be the last


@dataclass(frozen=True, eq=False)
class Combiner:
    """Finds an encoder's texts: one token a position, such that all states that enter the second layer are in its span.

    The first layer shows which tokens stand at each position, over all texts of the batch. The second shows which
    tokens belong to one text, since every state of a text depends on all of its tokens. If there are few combinations,
    all are tried. Otherwise a random text is changed position by position, each time to the token whose states are
    nearest, until nothing changes. The best of several starts is taken.

    If a position has as many tokens outside all found texts as there are texts left, each of these texts has one of
    them. If texts share tokens there are fewer, and all tokens stay. No text is found twice, unless every token is in a
    found text and no other text is in the span. Then the batch holds one of them again; the spans do not show which.

    Attributes:
        attention_input: of the second layer.
        spans: of the second layer's gradients.
        tolerance: how far each state may be from the spans.
        combinations: the most combinations that are tried one by one.
        starts: random texts that are improved for each text to be found, above that many combinations.
    """

    attention_input: AttentionInput
    spans: Sequence[Span]
    tolerance: float
    combinations: int
    starts: int

    def texts(
        self, options: Sequence[Sequence[int]], lengths: Sequence[int], lengths_known: bool, budget: Budget,
        rng: np.random.Generator, count: int,
    ) -> list[TokenTuple]:  # fmt: skip
        """Returns the texts of a batch, fewer if no further text is found or the budget is spent.

        Args:
            options: the tokens of each position.
            lengths: of the texts.
            lengths_known: whether there is one text of each of these lengths; else each text may have any of them.
            budget: it ends the search.
            rng: draws the starts.
            count: how many texts the batch holds.
        """
        remaining, expected = [list(one) for one in options], sorted(lengths)
        texts = list[TokenTuple]()
        for number in range(count):
            best_of_lengths = [self.best(remaining[:length], texts, budget, rng) for length in sorted(set(expected))]
            text, distance = min(best_of_lengths, key=lambda one: one[1])
            if not text or (distance >= self.tolerance and not _unused_options(options, texts)):
                repeats = [one for one in texts if len(one) in expected]
                text = min(repeats, key=lambda one: self._nearest([one], budget)[1]) if repeats else text
            if not text:
                break
            texts.append(text)
            if lengths_known:
                expected.remove(len(text))
            if budget.left() <= 0 or (lengths_known and not expected):
                break
            for position, tokens in enumerate(options):
                texts_to_come = sum(one > position for one in expected) if lengths_known else count - number - 1
                unmet = [token for at, token in _unused_options(options, texts) if at == position]
                remaining[position] = unmet if unmet and len(unmet) >= texts_to_come else list(tokens)
        return texts

    def best(
        self, options: Sequence[Sequence[int]], previous: Sequence[TokenTuple], budget: Budget, rng: np.random.Generator
    ) -> tuple[TokenTuple, float]:
        """Returns the nearest text of a length not in `previous`, and its states' mean distance; inf: none."""
        if not all(options):
            return (), math.inf
        if math.prod(len(one) for one in options) <= self.combinations:
            untried = [one for one in itertools.product(*options) if one not in {*previous}]
            return self._nearest(untried, budget) if untried else ((), math.inf)
        nearest: tuple[TokenTuple, float] = ((), math.inf)
        for _ in range(self.starts * (len(previous) + 1)):  # many of them end at a previous text
            text, distance = self._descend(_options_of_new_text(options, previous, rng), budget, rng)
            if text not in previous:
                nearest = min(nearest, (text, distance), key=lambda one: one[1])
            if nearest[1] < self.tolerance or budget.left() <= 0:
                break
        return nearest

    def _nearest(self, texts: list[TokenTuple], budget: Budget) -> tuple[TokenTuple, float]:
        """Returns the nearest text and its distance, of those that are tried before the budget is spent."""
        distances = list[Tensor]()
        for block in blocks(texts):
            distances.append(largest_distances(self.spans, states(self.attention_input, block)).mean(1))
            budget.spend(checking_work(self.attention_input, self.spans, len(block) * len(block[0])))
            if budget.left() <= 0:
                break
        mean_distances = torch.cat(distances)
        index = int(mean_distances.argmin())
        return texts[index], float(mean_distances[index])

    def _descend(
        self, options: Sequence[Sequence[int]], budget: Budget, rng: np.random.Generator
    ) -> tuple[TokenTuple, float]:
        """Returns a random text after its descent, position by position, and its distance."""
        text = tuple(int(rng.choice(one)) for one in options)
        distance = self._nearest([text], budget)[1]
        while True:
            previous_distance = distance
            for position in rng.permutation(len(options)).tolist():
                if budget.left() <= 0:
                    return text, distance
                if len(options[position]) > 1:
                    neighbours = [(*text[:position], token, *text[position + 1 :]) for token in options[position]]
                    text, distance = self._nearest(neighbours, budget)
            if distance >= previous_distance - 1e-12:
                return text, distance


def _unused_options(options: Sequence[Sequence[int]], previous: Sequence[TokenTuple]) -> list[tuple[int, int]]:
    """Returns (position, token) of the options that are in no previous text."""
    met = {(position, token) for text in previous for position, token in enumerate(text)}
    placed_tokens = [(position, token) for position, tokens in enumerate(options) for token in tokens]
    return [one for one in placed_tokens if one not in met]


def _options_of_new_text(
    options: Sequence[Sequence[int]], previous: Sequence[TokenTuple], rng: np.random.Generator
) -> list[Sequence[int]]:  # fmt: skip
    """Returns the options, restricted at random to one token at some positions such that no previous text remains.

    It restricts one position if a token is in no previous text, else as many as needed.
    """
    restricted, same_length = list(options), [one for one in previous if len(one) == len(options)]
    if not same_length:
        return restricted
    if unmet := _unused_options(options, previous):
        position, token = unmet[int(rng.integers(len(unmet)))]
        restricted[position] = [token]
        return restricted
    for position in rng.permutation(len(restricted)).tolist():
        token = int(rng.choice(restricted[position]))
        restricted[position] = [token]
        same_length = [one for one in same_length if one[position] == token]
        if not same_length:
            break
    return restricted


@dataclass(frozen=True)
class DAGER(Inversion):
    """The DAGER attack.

    Attributes:
        first, second: how far a vector may be from the span of the first and of the second layer, relative to its
            length.
        adapters: this tolerance for both layers if adapters are trained.
        most: the most tokens at one position, and the most prefixes at a time. With more, the span excludes nothing.
        combinations: the most combinations of an encoder's tokens that are tried one by one.
        starts: random texts that are improved for each text to be found, above that many combinations.
    """

    first: float = 1e-4
    second: float = 1e-3
    adapters: float = 0.05
    most: int = 256
    combinations: int = 4096
    starts: int = 10

    name = "dager"
    title = "DAGER (exact inversion by row spaces)"
    paper = papers.DAGER.but(
        "The gradients of keys and values, which read the same vectors, are stacked below those of the queries: "
        "a decoder's first token has no query gradient, since it attends to itself alone.",
        "The rank is found at the gap of the singular values, not by a tolerance for each model.",
        "Projections are found by how the model uses them, not by their numbers or names.",
        "Of adapters, the gradient of the second half is used too: of the first it is zero until training starts.",
        "A decoder's last token, which the next-token loss never reads, is taken from the head's gradient. Where "
        "adapters alone are trained there is none, and the last token is left out.",
        "Above 4,096 combinations an encoder's texts are improved position by position, not drawn at random "
        "up to 10 million times.",
        "The tolerance of the first layer is 1e-4 and not 1e-5, which single precision does not always keep.",
    )
    uses = frozenset({"lengths"})

    def __post_init__(self) -> None:
        for name in ("first", "second", "adapters", "most", "combinations", "starts"):
            if (value := getattr(self, name)) <= 0:
                raise UsageError(f"{name} is {value}", "give more than 0, or leave the default")

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        try:
            first_layers = [AttentionInput(required(knowledge.step), layer) for layer in (0, 1)]
        except UnsupportedModel as error:
            return str(error)
        reasons = [_reason(batch, first_layers) for batch in batches(transcript, knowledge)]
        return reasons[0] if reasons and all(reasons) else None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        token_tuples = self._find_texts(batch, budget, rng)
        if batch.step.task == "next-token" and len(token_tuples) == batch.size:
            token_tuples = append_last_tokens(batch, token_tuples)
        texts = [np.array(one, np.int64) for one in token_tuples]
        return texts + [np.empty(0, np.int64)] * (batch.size - len(texts))

    def _find_texts(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[TokenTuple]:
        """Returns the texts that the layers read, in any order; fewer if spans or time do not allow more."""
        lengths = _lengths(batch)
        low, high = (AttentionInput(batch.step, layer) for layer in (0, 1))
        total = None if lengths is None else sum(lengths)
        first, second = spans_of(batch, low, total), spans_of(batch, high, total)
        if not first or not second:
            return []
        adapted = any(one.second_half is not None for one in low.matrices)
        first_tolerance, second_tolerance = (self.adapters, self.adapters) if adapted else (self.first, self.second)
        longest = _longest(batch, lengths, first, second)
        span_tokens = tokens_in_spans(low, first, longest, first_tolerance, self.most)
        if span_tokens is None or not span_tokens.at(0):
            return []
        if batch.step.kind == "decoder":
            texts = grow_texts(high, second, span_tokens, longest, second_tolerance, self.most, budget)
            return choose_texts(high, texts, batch.size, lengths)
        combiner = Combiner(high, second, second_tolerance, self.combinations, self.starts)
        options = _options(span_tokens, lengths)
        expected = lengths if lengths is not None else _possible_lengths(options)
        return combiner.texts(options, expected, lengths is not None, budget, rng, batch.size)


def _reason(batch: SharedBatch, first_layers: list[AttentionInput]) -> str | None:
    """Returns why no text of the batch can be found, whatever its gradients are, or None."""
    lengths = _lengths(batch)
    for number, attention_input in enumerate(first_layers):
        names = [name for m in attention_input.matrices for name in (m.name, m.second_half) if name is not None]
        shared = [grad for name in names if (grad := batch.tensor(name)) is not None]
        if not any(bool(grad.any()) for grad in shared):
            return f"no gradient of the queries, keys and values of layer {number + 1} is shared"
        adapted = any(m.second_half is not None for m in attention_input.matrices)
        if adapted and not spans_of(batch, attention_input, None if lengths is None else sum(lengths)):
            return f"the rank of the adapters of layer {number + 1} is not above the number of tokens"
    return None


def _lengths(batch: SharedBatch) -> list[int] | None:
    """Returns how many tokens of each text the layers read: all, or all but the last with the next-token loss."""
    if batch.lengths is None:
        return None
    return [int(one) - (batch.step.task == "next-token") for one in batch.lengths]


def _longest(batch: SharedBatch, lengths: list[int] | None, first: list[Span], second: list[Span]) -> int:
    """Returns the greatest possible length. A text has at most one token more than the span has dimensions."""
    if lengths is not None:
        return max(lengths)
    limit = int(batch.step.module.config.max_position_embeddings)
    return min(limit, max(one.rank for one in (*first, *second)) + 1)


def _options(span_tokens: SpanTokens, lengths: list[int] | None) -> list[tuple[int, ...]]:
    """Returns the tokens of each position up to the last, or the nearest token if none is in the span."""
    positions = [at for at in range(len(span_tokens.tokens)) if span_tokens.at(at)]
    last = max(lengths) if lengths is not None else max(positions) + 1
    return [span_tokens.at(at) or (span_tokens.nearest[at],) for at in range(last)]


def _possible_lengths(options: list[tuple[int, ...]]) -> list[int]:
    """Returns the possible lengths: all that end at a token with which the longest text can end."""
    return [at + 1 for at, tokens in enumerate(options) if set(tokens) & set(options[-1])]


def append_last_tokens(batch: SharedBatch, texts: Sequence[TokenTuple]) -> list[TokenTuple]:
    """Returns the texts with their last tokens, or unchanged if the head's gradient is not shared."""
    grad = _head_gradient(batch)
    if grad is None or not all(texts):
        return list(texts)
    unexplained, last_states = _unexplained_gradient(batch, grad, texts)
    count = sum(len(one) for one in texts)  # of predictions
    # (v, b) of each text's state in each row
    share = -count * unexplained.double() @ torch.linalg.pinv(last_states.double())
    read = sorted({token for one in texts for token in one})
    share[read] = -torch.inf
    best, token = share.max(0)
    completed = [(*one, int(last)) for one, last in zip(texts, token, strict=True)]
    for row in (best < MIN_SHARE_OF_STATE).nonzero()[:, 0].tolist():
        lasts = [int(token[row]), *read]
        alternatives = [[*completed[:row], (*texts[row], last), *completed[row + 1 :]] for last in lasts]
        completed = min(alternatives, key=lambda one: _misfit(batch, one))
    return completed


def _head_gradient(batch: SharedBatch) -> Tensor | None:
    """Returns (v, d) the gradient of the head's matrix. None: it is not shared."""
    head = batch.step.module.get_output_embeddings().weight
    names = [name for name, one in batch.step.module.named_parameters() if one is head]
    return batch.tensor(names[0]) if names else None


def _unexplained_gradient(batch: SharedBatch, grad: Tensor, texts: Sequence[TokenTuple]) -> tuple[Tensor, Tensor]:
    """Returns (v, d) what known targets leave of the head's gradient, and (b, d) the states before last tokens."""
    ids, mask = (one.to(batch.step.device) for one in padded(texts, 0))
    module, head_inputs = batch.step.module.eval(), []
    head = module.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0].detach()))
    try:
        with torch.enable_grad():
            logits = module(inputs_embeds=batch.step.embed(ids).detach(), attention_mask=mask).logits
            is_token = mask.bool()
            log_partition = logits.logsumexp(-1)[is_token].sum()
            target_logits = logits[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0][is_token[:, 1:]].sum()
            explained = torch.autograd.grad((log_partition - target_logits) / mask.sum(), head.weight)[0]
    finally:
        handle.remove()
    return grad - explained, head_inputs[0][torch.arange(len(mask)), mask.sum(1) - 1]


def _misfit(batch: SharedBatch, texts: Sequence[TokenTuple]) -> float:
    """Returns the squared distance of these texts' gradient from the shared one."""
    ids, mask = padded(texts, 0)
    gradient = replace(batch.step, dropout=False).gradient(ids, mask, None)
    return sum(float((gradient[name] - one).square().sum()) for name, one in batch.tensors.items() if name in gradient)

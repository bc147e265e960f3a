"""Inverts gradients exactly: the gradient of a layer that reads few vectors spans nothing else (DAGER).

1. The gradient of the first layer's query projection is dQ^T X. Its row space contains what entered at every position,
   and its rank is the number of these vectors (`spans`, `attention_inputs`).
2. Every token of the vocabulary is put at every position and compared with that span.
3. The tokens in the span are combined to texts that are in the span of the second layer's gradients too: prefix by
   prefix in a decoder (`grow_texts`), position by position in an encoder (`Combiner`).
4. A causal model with the next-token loss never reads the last token of a text, so the layers' gradients do not show
   it. But it is a target, and the head's gradient has a row for each target token: minus the state from which that
   token was predicted, divided by the number of predictions. Everything else in the head's gradient follows from the
   text before that token, and what is left is the state. If head and table are one, rows of tokens that were read
   contain a part of it too; then the whole gradient decides among these. If only adapters are trained, the head has no
   gradient, and this step does not apply.

No embeddings are optimised and no language is assumed: tokens are in the spans or not. Noise and pruning give every
gradient full rank, and nothing is found; `surviving-entries` is for pruned gradients. A batch with as many tokens as
the model is wide has full rank too. Known lengths help.
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
from milkglass.attacks.gradients.attention_inputs import (
    AttentionInput,
    SpanTokens,
    TokenTuple,
    choose_texts,
    forward_batches,
    grow_texts,
    input_states,
    largest_distances,
    span_check_work,
    spans_of,
    tokens_in_spans,
)
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch, batches
from milkglass.attacks.gradients.spans import Span
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript
from milkglass.threat.training_step import pad_texts

MIN_SHARE_OF_STATE = 0.5  # a row's token is the last one if at least this share of the state is left in the row


@dataclass(frozen=True, eq=False)
class Combiner:
    """Finds an encoder's texts: a token for each position, so that all states that enter layer 2 are in its span.

    The first layer shows which tokens stand at each position, over all texts of the batch. The second shows which
    tokens belong to one text, since every state of a text depends on all of its tokens. If there are few combinations,
    all are tried. Otherwise a random text is changed position by position, each time to the token whose states are
    nearest, until nothing changes. The best of several starts is taken.

    If a position has at least as many tokens outside all found texts as there are texts left, each of these texts takes
    one of them. If texts share tokens there are fewer, and all tokens stay possible. No text is found twice, unless
    every token is in a found text and no other text is in the span. Then the batch holds one of them again, and the
    spans do not show which.

    Attributes:
        attention_input: the input of the second layer's attention.
        spans: the spans of the second layer's gradients.
        tolerance: how far each state may be from the spans.
        max_combinations: the most combinations that are tried one by one.
        start_count: how many random texts are improved for each text to be found, if there are more combinations.
    """

    attention_input: AttentionInput
    spans: Sequence[Span]
    tolerance: float
    max_combinations: int
    start_count: int

    def texts(
        self, options: Sequence[Sequence[int]], lengths: Sequence[int], lengths_are_known: bool, budget: Budget,
        rng: np.random.Generator, text_count: int,
    ) -> list[TokenTuple]:  # fmt: skip
        """Returns the texts of a batch, fewer if no further text is found or the budget is spent.

        Args:
            options: the tokens of each position.
            lengths: the lengths of the texts.
            lengths_are_known: whether there is one text of each of these lengths; else each text may have any of them.
            budget: ends the search.
            rng: draws the starts.
            text_count: how many texts the batch holds.
        """
        remaining_options, remaining_lengths = [list(tokens) for tokens in options], sorted(lengths)
        texts = list[TokenTuple]()
        for index in range(text_count):
            candidates = [
                self.nearest_text(remaining_options[:length], texts, budget, rng)
                for length in sorted(set(remaining_lengths))
            ]
            text, distance = min(candidates, key=lambda candidate: candidate[1])
            if not text or (distance >= self.tolerance and not _unused_options(options, texts)):
                repeats = [earlier_text for earlier_text in texts if len(earlier_text) in remaining_lengths]
                text = min(repeats, key=lambda repeat: self._nearest([repeat], budget)[1]) if repeats else text
            if not text:
                break
            texts.append(text)
            if lengths_are_known:
                remaining_lengths.remove(len(text))
            if budget.left() <= 0 or (lengths_are_known and not remaining_lengths):
                break
            for position, tokens in enumerate(options):
                texts_to_come = text_count - index - 1
                if lengths_are_known:
                    texts_to_come = sum(length > position for length in remaining_lengths)
                unused = [token for place, token in _unused_options(options, texts) if place == position]
                remaining_options[position] = unused if unused and len(unused) >= texts_to_come else list(tokens)
        return texts

    def nearest_text(
        self, options: Sequence[Sequence[int]], previous: Sequence[TokenTuple], budget: Budget, rng: np.random.Generator
    ) -> tuple[TokenTuple, float]:
        """Returns the nearest text of these options that is not in `previous`, and its states' mean distance.

        Without such a text it returns an empty one at an infinite distance.
        """
        if not all(options):
            return (), math.inf
        if math.prod(len(tokens) for tokens in options) <= self.max_combinations:
            untried = [text for text in itertools.product(*options) if text not in {*previous}]
            return self._nearest(untried, budget) if untried else ((), math.inf)
        nearest: tuple[TokenTuple, float] = ((), math.inf)
        for _ in range(self.start_count * (len(previous) + 1)):  # many of them end at a previous text
            text, distance = self._descend(_options_of_new_text(options, previous, rng), budget, rng)
            if text not in previous:
                nearest = min(nearest, (text, distance), key=lambda pair: pair[1])
            if nearest[1] < self.tolerance or budget.left() <= 0:
                break
        return nearest

    def _nearest(self, texts: list[TokenTuple], budget: Budget) -> tuple[TokenTuple, float]:
        """Returns the nearest of the texts that the budget allows to try, at least a batch, and its distance."""
        distances = list[Tensor]()
        for batch in forward_batches(texts):
            distances.append(largest_distances(self.spans, input_states(self.attention_input, batch)).mean(1))
            budget.spend(span_check_work(self.attention_input, self.spans, len(batch) * len(batch[0])))
            if budget.left() <= 0:
                break
        mean_distances = torch.cat(distances)
        index = int(mean_distances.argmin())
        return texts[index], float(mean_distances[index])

    def _descend(
        self, options: Sequence[Sequence[int]], budget: Budget, rng: np.random.Generator
    ) -> tuple[TokenTuple, float]:
        """Returns a random text after its descent, position by position, and its distance."""
        text = tuple(int(rng.choice(tokens)) for tokens in options)
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
    used = {(position, token) for text in previous for position, token in enumerate(text)}
    placed_tokens = [(position, token) for position, tokens in enumerate(options) for token in tokens]
    return [placed for placed in placed_tokens if placed not in used]


def _options_of_new_text(
    options: Sequence[Sequence[int]], previous: Sequence[TokenTuple], rng: np.random.Generator
) -> list[Sequence[int]]:  # fmt: skip
    """Returns the options, restricted at random to one token at some positions so that no previous text remains.

    One position suffices if a token is in no previous text; else as many are restricted as needed.
    """
    restricted, remaining_texts = list(options), [text for text in previous if len(text) == len(options)]
    if not remaining_texts:
        return restricted
    if unused := _unused_options(options, previous):
        position, token = unused[int(rng.integers(len(unused)))]
        restricted[position] = [token]
        return restricted
    for position in rng.permutation(len(restricted)).tolist():
        token = int(rng.choice(restricted[position]))
        restricted[position] = [token]
        remaining_texts = [text for text in remaining_texts if text[position] == token]
        if not remaining_texts:
            break
    return restricted


@dataclass(frozen=True)
class DAGER(Inversion):
    """Finds exactly the texts whose states lie in the spans of the first two layers' gradients.

    Attributes:
        first, second: how far a vector may be from the span of the first and of the second layer, relative to its norm.
        adapters: this tolerance for both layers if adapters are trained.
        most: the most tokens at one position, and the most prefixes at a time. With more, the span excludes nothing.
        combinations: the most combinations of an encoder's tokens that are tried one by one.
        starts: random texts that are improved for each text to be found, above that many combinations.

    Raises:
        UsageError: a value is not above 0.
    """

    first: float = 1e-4
    second: float = 1e-3
    adapters: float = 0.05
    most: int = 256
    combinations: int = 4096
    starts: int = 10

    name = "dager"
    title = "DAGER (exact inversion by row spaces)"
    paper = papers.DAGER.with_deviations(
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

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        try:
            first_layers = [AttentionInput(require_known(knowledge.step), layer) for layer in (0, 1)]
        except UnsupportedModel as error:
            return str(error)
        reasons = [_why_unreadable(batch, first_layers) for batch in batches(transcript, knowledge)]
        return reasons[0] if reasons and all(reasons) else None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        token_tuples = self._find_texts(batch, budget, rng)
        if batch.step.task == "next-token" and len(token_tuples) == batch.size:
            token_tuples = append_last_tokens(batch, token_tuples)
        texts = [np.array(text, np.int64) for text in token_tuples]
        return texts + [np.empty(0, np.int64)] * (batch.size - len(texts))

    def _find_texts(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[TokenTuple]:
        """Returns the texts that the layers read, in any order; fewer if spans or time do not allow more."""
        lengths = _lengths(batch)
        first_input, second_input = (AttentionInput(batch.step, layer) for layer in (0, 1))
        total = None if lengths is None else sum(lengths)
        first_spans, second_spans = spans_of(batch, first_input, total), spans_of(batch, second_input, total)
        if not first_spans or not second_spans:
            return []
        first_tolerance, second_tolerance = (
            (self.adapters, self.adapters) if first_input.has_adapters else (self.first, self.second)
        )
        max_length = _max_length(batch, lengths, [*first_spans, *second_spans])
        span_tokens = tokens_in_spans(first_input, first_spans, max_length, first_tolerance, self.most)
        if span_tokens is None or not span_tokens.at(0):
            return []
        if batch.step.kind == "decoder":
            texts = grow_texts(second_input, second_spans, span_tokens, max_length, second_tolerance, self.most, budget)
            return choose_texts(second_input, texts, batch.size, lengths)
        combiner = Combiner(second_input, second_spans, second_tolerance, self.combinations, self.starts)
        options = _options(span_tokens, lengths)
        possible_lengths = lengths if lengths is not None else _possible_lengths(options)
        return combiner.texts(options, possible_lengths, lengths is not None, budget, rng, batch.size)


def _why_unreadable(batch: SharedBatch, first_layers: list[AttentionInput]) -> str | None:
    """Returns why no text of the batch can be found, or None."""
    lengths = _lengths(batch)
    total = None if lengths is None else sum(lengths)
    for index, attention_input in enumerate(first_layers):
        names = [name for p in attention_input.projections for name in (p.name, p.lora_b_name) if name is not None]
        shared_grads = [grad for name in names if (grad := batch.gradient(name)) is not None]
        if not any(bool(grad.any()) for grad in shared_grads):
            return f"no gradient of the queries, keys and values of layer {index + 1} is shared"
        if attention_input.has_adapters and not spans_of(batch, attention_input, total):
            return f"the rank of the adapters of layer {index + 1} is not above the number of tokens"
    return None


def _lengths(batch: SharedBatch) -> list[int] | None:
    """Returns how many tokens of each text the layers read: all, or all but the last with the next-token loss."""
    if batch.lengths is None:
        return None
    return [int(length) - (batch.step.task == "next-token") for length in batch.lengths]


def _max_length(batch: SharedBatch, lengths: list[int] | None, spans: list[Span]) -> int:
    """Returns the greatest possible length. A text has at most one token more than the largest span has dimensions."""
    if lengths is not None:
        return max(lengths)
    limit = int(batch.step.module.config.max_position_embeddings)
    return min(limit, max(span.rank for span in spans) + 1)


def _options(span_tokens: SpanTokens, lengths: list[int] | None) -> list[tuple[int, ...]]:
    """Returns the tokens of each position up to the last, or the nearest token if none is in the span."""
    filled_positions = [position for position in range(len(span_tokens.tokens)) if span_tokens.at(position)]
    count = max(lengths) if lengths is not None else max(filled_positions) + 1
    return [span_tokens.at(position) or (span_tokens.nearest[position],) for position in range(count)]


def _possible_lengths(options: list[tuple[int, ...]]) -> list[int]:
    """Returns the possible lengths: all that end at a token with which the longest text can end."""
    return [position + 1 for position, tokens in enumerate(options) if set(tokens) & set(options[-1])]


def append_last_tokens(batch: SharedBatch, texts: Sequence[TokenTuple]) -> list[TokenTuple]:
    """Returns the texts with their last tokens, or unchanged if the head's gradient is not shared."""
    grad = _head_gradient(batch)
    if grad is None or not all(texts):
        return list(texts)
    unexplained, last_states = _unexplained_gradient(batch, grad, texts)
    prediction_count = sum(len(text) for text in texts)
    # (v, b) the share of each text's state in each row
    share = -prediction_count * unexplained.double() @ torch.linalg.pinv(last_states.double())
    read_tokens = sorted({token for text in texts for token in text})
    share[read_tokens] = -torch.inf
    largest_share, last_tokens = share.max(0)
    completed = [(*text, int(token)) for text, token in zip(texts, last_tokens, strict=True)]
    for row in (largest_share < MIN_SHARE_OF_STATE).nonzero()[:, 0].tolist():
        options = [int(last_tokens[row]), *read_tokens]
        alternatives = [[*completed[:row], (*texts[row], token), *completed[row + 1 :]] for token in options]
        completed = min(alternatives, key=lambda batch_texts: _misfit(batch, batch_texts))
    return completed


def _head_gradient(batch: SharedBatch) -> Tensor | None:
    """Returns (v, d) the gradient of the head's matrix, or None if it is not shared."""
    head = batch.step.module.get_output_embeddings().weight
    names = [name for name, parameter in batch.step.module.named_parameters() if parameter is head]
    return batch.gradient(names[0]) if names else None


def _unexplained_gradient(batch: SharedBatch, grad: Tensor, texts: Sequence[TokenTuple]) -> tuple[Tensor, Tensor]:
    """Returns (v, d) the head's gradient without what known targets explain, and (b, d) each text's last state."""
    ids, mask = (tensor.to(batch.step.device) for tensor in pad_texts(texts, 0))
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
    ids, mask = pad_texts(texts, 0)
    gradient = replace(batch.step, uses_dropout=False).gradient(ids, mask, None)
    shared = batch.gradients.items()
    return sum(float((gradient[name] - grad).square().sum()) for name, grad in shared if name in gradient)

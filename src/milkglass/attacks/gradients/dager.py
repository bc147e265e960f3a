"""DAGER: exact inversion, since the gradient of a layer that reads few vectors spans nothing else.

1. The gradient of the first layer's query projection is dQ^T X. Its row space contains what entered at every position,
   and its rank is the number of these vectors (`spans`, `dager_layers`).
2. Every token of the vocabulary is put at every position and compared with that span.
3. The tokens in the span are combined to texts that are in the span of the second layer's gradients too: prefix by
   prefix in a decoder (`grown_texts`), position by position in an encoder (`Combiner`).
4. A causal model with the next-token loss never reads the last token of a text, so the layers' gradients do not show
   it.
   But it is a target. The head's gradient has a row for each target, which contains minus the state of its question,
   over the number of questions. Everything else in the head's gradient follows from the text before it, and what is
   left is that state. If head and table are one, rows of tokens that were read contain a part of it too; then the whole
   gradient decides among these. Adapters leave the head unchanged, and this step does not apply.

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
    Entrance,
    SpanTokens,
    Text,
    blocks,
    checked,
    chosen_texts,
    farthest,
    grown_texts,
    spans_of,
    states,
    tokens,
)
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch, batches
from milkglass.attacks.gradients.spans import Span
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Transcript
from milkglass.threat.training_step import batch as padded

SURE = 0.5  # share of the state that must be left in a row for its token to be the last


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
        tolerance: how far each state may be from the spans.
        combinations: the most combinations that are tried one by one.
    """

    entrance: Entrance
    spans: Sequence[Span]
    tolerance: float
    combinations: int
    starts: int

    def texts(
        self, options: Sequence[Sequence[int]], lengths: Sequence[int], known: bool, budget: Budget,
        rng: np.random.Generator, count: int,
    ) -> list[Text]:  # fmt: skip
        """Returns `count` texts of these lengths, from the tokens of each position.

            options: the tokens of each position.
        `known` says whether there is one text of each of these lengths; else each text may have any of them.
        """
        left, expected = [list(one) for one in options], sorted(lengths)
        result = list[Text]()
        for number in range(count):
            tried = [self.best(left[:length], result, budget, rng) for length in sorted(set(expected))]
            text, away = min(tried, key=lambda one: one[1])
            if not text or (away >= self.tolerance and not _unmet(options, result)):
                again = [one for one in result if len(one) in expected]
                text = min(again, key=lambda one: self._nearest([one], budget)[1]) if again else text
            if not text:
                break
            result.append(text)
            if known:
                expected.remove(len(text))
            if budget.left() <= 0 or (known and not expected):
                break
            for position, part in enumerate(options):
                others = sum(one > position for one in expected) if known else count - number - 1
                new = [token for at, token in _unmet(options, result) if at == position]
                left[position] = new if new and len(new) >= others else list(part)
        return result

    def best(
        self, options: Sequence[Sequence[int]], previous: Sequence[Text], budget: Budget, rng: np.random.Generator
    ) -> tuple[Text, float]:
        """Returns the nearest text of a length not in `previous`, and its states' mean distance; inf: none."""
        if not all(options):
            return (), math.inf
        if math.prod(len(one) for one in options) <= self.combinations:
            fresh = [one for one in itertools.product(*options) if one not in {*previous}]
            return self._nearest(fresh, budget) if fresh else ((), math.inf)
        nearest: tuple[Text, float] = ((), math.inf)
        for _ in range(self.starts * (len(previous) + 1)):  # many of them end at a previous text
            text, away = self._descended(_fresh(options, previous, rng), budget, rng)
            if text not in previous:
                nearest = min(nearest, (text, away), key=lambda one: one[1])
            if nearest[1] < self.tolerance or budget.left() <= 0:
                break
        return nearest

    def _nearest(self, texts: list[Text], budget: Budget) -> tuple[Text, float]:
        """Returns the nearest text and its distance, of those that are tried before the budget is spent."""
        done = list[Tensor]()
        for part in blocks(texts):
            done.append(farthest(self.spans, states(self.entrance, part)).mean(1))
            budget.spend(checked(self.entrance, self.spans, len(part) * len(part[0])))
            if budget.left() <= 0:
                break
        away = torch.cat(done)
        at = int(away.argmin())
        return texts[at], float(away[at])

    def _descended(
        self, options: Sequence[Sequence[int]], budget: Budget, rng: np.random.Generator
    ) -> tuple[Text, float]:
        text = tuple(int(rng.choice(one)) for one in options)
        away = self._nearest([text], budget)[1]
        while True:
            before = away
            for position in rng.permutation(len(options)).tolist():
                if budget.left() <= 0:
                    return text, away
                if len(options[position]) > 1:
                    near = [(*text[:position], token, *text[position + 1 :]) for token in options[position]]
                    text, away = self._nearest(near, budget)
            if away >= before - 1e-12:
                return text, away


def _unmet(options: Sequence[Sequence[int]], previous: Sequence[Text]) -> list[tuple[int, int]]:
    """Returns (position, token) of the options that are in no previous text."""
    met = {(position, token) for text in previous for position, token in enumerate(text)}
    every = [(position, token) for position, part in enumerate(options) for token in part]
    return [one for one in every if one not in met]


def _fresh(
    options: Sequence[Sequence[int]], previous: Sequence[Text], rng: np.random.Generator
) -> list[Sequence[int]]:  # fmt: skip
    """Returns the options, restricted at random to one token at some positions such that no previous text remains.

    It restricts one position if a token is in no previous text, else as many as needed.
    """
    free, alike = list(options), [one for one in previous if len(one) == len(options)]
    if not alike:
        return free
    if unmet := _unmet(options, previous):
        position, token = unmet[int(rng.integers(len(unmet)))]
        free[position] = [token]
        return free
    for position in rng.permutation(len(free)).tolist():
        token = int(rng.choice(free[position]))
        free[position] = [token]
        alike = [one for one in alike if one[position] == token]
        if not alike:
            break
    return free


@dataclass(frozen=True)
class DAGER(Inversion):
    """The DAGER attack.

    Attributes:
        first, second: how far a vector may be from the span of the first and of the second layer, relative to its
            length.
        adapters: this tolerance for both layers if adapters are trained.
        most: the most tokens at one position, and the most prefixes at a time. With more, the span excludes nothing.
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
            both = [Entrance(required(knowledge.step), layer) for layer in (0, 1)]
        except UnsupportedModel as error:
            return str(error)
        reasons = [_reason(batch, both) for batch in batches(transcript, knowledge)]
        return reasons[0] if reasons and all(reasons) else None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        result = self._found(batch, budget, rng)
        if batch.step.task == "next-token" and len(result) == batch.size:
            result = completed(batch, result)
        texts = [np.array(one, np.int64) for one in result]
        return texts + [np.empty(0, np.int64)] * (batch.size - len(texts))

    def _found(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Text]:
        lengths = _lengths(batch)
        low, high = (Entrance(batch.step, layer) for layer in (0, 1))
        total = None if lengths is None else sum(lengths)
        first, second = spans_of(batch, low, total), spans_of(batch, high, total)
        if not first or not second:
            return []
        adapted = any(one.followed is not None for one in low.matrices)
        near, nearer = (self.adapters, self.adapters) if adapted else (self.first, self.second)
        longest = _longest(batch, lengths, first, second)
        result = tokens(low, first, longest, near, self.most)
        if result is None or not result.at(0):
            return []
        if batch.step.kind == "decoder":
            texts = grown_texts(high, second, result, longest, nearer, self.most, budget)
            return chosen_texts(high, texts, batch.size, lengths)
        combiner = Combiner(high, second, nearer, self.combinations, self.starts)
        options = _options(result, lengths)
        expected = lengths if lengths is not None else _ends(options)
        return combiner.texts(options, expected, lengths is not None, budget, rng, batch.size)


def _reason(batch: SharedBatch, both: list[Entrance]) -> str | None:
    """Returns why nothing can be found of one batch whatever its values, or None."""
    lengths = _lengths(batch)
    for number, one in enumerate(both):
        names = [name for m in one.matrices for name in (m.name, m.followed) if name is not None]
        shared = [grad for name in names if (grad := batch.tensor(name)) is not None]
        if not any(bool(grad.any()) for grad in shared):
            return f"no gradient of the queries, keys and values of layer {number + 1} is shared"
        adapted = any(m.followed is not None for m in one.matrices)
        if adapted and not spans_of(batch, one, None if lengths is None else sum(lengths)):
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
    there = [at for at in range(len(span_tokens.tokens)) if span_tokens.at(at)]
    last = max(lengths) if lengths is not None else max(there) + 1
    return [span_tokens.at(at) or (span_tokens.nearest[at],) for at in range(last)]


def _ends(options: list[tuple[int, ...]]) -> list[int]:
    """Returns the possible lengths: all that end at a token with which the longest text can end."""
    return [at + 1 for at, part in enumerate(options) if set(part) & set(options[-1])]


def completed(batch: SharedBatch, texts: Sequence[Text]) -> list[Text]:
    """Returns the texts with their last tokens, or unchanged if the head's gradient is not shared."""
    grad = _head(batch)
    if grad is None or not all(texts):
        return list(texts)
    rest, requested = _left(batch, grad, texts)
    count = sum(len(one) for one in texts)  # of questions
    share = -count * rest.double() @ torch.linalg.pinv(requested.double())  # (v, b) of each text's state in each row
    read = sorted({token for one in texts for token in one})
    share[read] = -torch.inf
    best, token = share.max(0)
    result = [(*one, int(last)) for one, last in zip(texts, token, strict=True)]
    for at in (best < SURE).nonzero()[:, 0].tolist():
        tried = [[*result[:at], (*texts[at], last), *result[at + 1 :]] for last in [int(token[at]), *read]]
        result = min(tried, key=lambda part: _misfit(batch, part))
    return result


def _head(batch: SharedBatch) -> Tensor | None:
    head = batch.step.module.get_output_embeddings().weight
    names = [name for name, one in batch.step.module.named_parameters() if one is head]
    return batch.tensor(names[0]) if names else None


def _left(batch: SharedBatch, grad: Tensor, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Returns (v, d) what known targets leave of the head's gradient, and (b, d) the states before last tokens."""
    ids, mask = (one.to(batch.step.device) for one in padded(texts, 0))
    module, states = batch.step.module.eval(), []
    head = module.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: states.append(args[0].detach()))
    try:
        with torch.enable_grad():
            logits = module(inputs_embeds=batch.step.embedded(ids).detach(), attention_mask=mask).logits
            there = mask.bool()
            lost = logits.logsumexp(-1)[there].sum()
            known = logits[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0][there[:, 1:]].sum()
            own = torch.autograd.grad((lost - known) / mask.sum(), head.weight)[0]
    finally:
        handle.remove()
    return grad - own, states[0][torch.arange(len(mask)), mask.sum(1) - 1]


def _misfit(batch: SharedBatch, texts: Sequence[Text]) -> float:
    ids, mask = padded(texts, 0)
    own = replace(batch.step, dropout=False).gradient(ids, mask, None)
    return sum(float((own[name] - one).square().sum()) for name, one in batch.tensors.items() if name in own)

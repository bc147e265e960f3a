"""Draws the next id from a row of logits. Each request has its own generator, so that a batch changes no draw."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

MIN_LOGPROB = -9999.0  # stands for the logarithm of 0, which JSON does not have
MIN_TEMPERATURE = 1e-6  # below it the likeliest id is taken, without rounding in fp32


@dataclass(frozen=True)
class SamplingParams:
    """Says how ids are drawn. The defaults leave the model's distribution unchanged.

    Attributes:
        temperature: 0, or nearly 0, takes the likeliest id.
        top_p: draws from the fewest ids whose probabilities reach this.
        top_k: draws from this many of the likeliest ids; 0: all.
        seed: the seed of the draws. None: a fresh one.
        max_tokens: the most ids of the answer.
        stop_ids: ids that end the answer, the model's own end ids among them.
        min_p: leaves out ids whose probability is below this share of the likeliest's.
        presence_penalty: is subtracted from the logit of each id in the answer.
        frequency_penalty: is subtracted from the logit of an id for each time that it is in the answer.
        repetition_penalty: divides positive logits of ids in prompt or answer, and multiplies negative ones.
        logit_bias: is added to logits, by id.
        logprobs: how many of the likeliest ids are reported with each drawn id. None: not even the drawn one is.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Returns whether the likeliest id is taken."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """Returns whether `adjusted_logits` would change anything."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias) or self.repetition_penalty != 1


def seeded_generator(sampling: SamplingParams) -> torch.Generator:
    """Returns a generator on the CPU, so that a seed draws the same ids on every device."""
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return torch.Generator().manual_seed(seed)


def draw_id(logits: torch.Tensor, sampling: SamplingParams, rng: torch.Generator) -> int:
    """Draws the next id from logits (v,), after penalties and biases; a greedy one needs no `rng`."""
    if sampling.is_greedy:
        return int(logits.argmax())
    scaled = logits.float().cpu()
    scaled = (scaled - scaled.max()) / sampling.temperature  # in this order: nothing can become infinite minus infinite
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = -torch.inf
    if sampling.top_p < 1:
        _keep_nucleus(scaled, sampling.top_p)
    if sampling.min_p > 0:  # the likeliest has logit 0
        scaled[scaled < math.log(sampling.min_p)] = -torch.inf
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=rng))


def adjusted_logits(
    logits: torch.Tensor, sampling: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    """Returns logits (v,) after the repetition penalty, OpenAI's two penalties and the biases, in this order.

    vLLM adds biases first.

    Args:
        logits: the model's, for the next id.
        sampling: the penalties and biases.
        prompt: ids of the prompt.
        answer: ids drawn so far.
    """
    adjusted = logits.float().clone()
    if sampling.repetition_penalty != 1 and (used_ids := sorted({*prompt, *answer})):
        used_logits = adjusted[used_ids]
        adjusted[used_ids] = torch.where(
            used_logits > 0, used_logits / sampling.repetition_penalty, used_logits * sampling.repetition_penalty
        )
    if (sampling.presence_penalty or sampling.frequency_penalty) and answer:
        ids, counts = torch.tensor(answer, device=adjusted.device).unique(return_counts=True)
        adjusted[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    return adjusted


def top_logprobs(logits: torch.Tensor, drawn_id: int, count: int) -> list[tuple[int, float]]:
    """Returns (id, log-probability) of the drawn id, then of the `count` likeliest, by the model's own logits (v,).

    The likeliest come first to last; a drawn id that is among them is there a second time.
    """
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(min(count, len(logprobs)))
    likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    pairs = [(drawn_id, float(logprobs[drawn_id])), *likeliest]
    return [(token, max(value, MIN_LOGPROB)) for token, value in pairs]


def _keep_nucleus(scaled: torch.Tensor, top_p: float) -> None:
    """Keeps, in place, the fewest ids whose probabilities reach `top_p`, at least one."""
    ordered, order = scaled.sort(descending=True)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    mass_before[0] = -1
    scaled[order[mass_before >= top_p]] = -torch.inf

"""How the next id is drawn from a row of logits. One request, one generator: a batch never changes a draw."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

MIN_LOGPROB = -9999.0  # a logarithm of chance 0, which JSON cannot say
COLD = 1e-6  # below it a draw is the most likely id, and fp32 can only spoil it


@dataclass(frozen=True)
class SamplingParams:
    """The values here change nothing of what the model says.

    Attributes:
        temperature: 0, or nearly 0, takes the most likely id.
        top_p: the fewest ids whose chances reach this are drawn from.
        top_k: so many ids are drawn from; 0: all.
        seed: None: a fresh one.
        max_tokens: of the answer.
        stop: ids that end it, the model's own included.
        min_p: ids whose chance is below this share of the likeliest's are left out.
        presence: subtracted from the logit of each id that the answer has.
        frequency: the same for each time that it has it.
        repetition: divides positive logits of ids that prompt or answer has, multiplies negative ones.
        bias: added to logits, by id.
        logprobs: how many of the likeliest ids are reported with each that is drawn; None: none is, not even that one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop: frozenset[int] = field(default_factory=frozenset)
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before an id is drawn."""
        return bool(self.presence or self.frequency or self.bias) or self.repetition != 1


def generator(sampling: SamplingParams) -> torch.Generator:
    """On the CPU, whatever the model runs on: the same seed draws the same everywhere."""
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return torch.Generator().manual_seed(seed)


def draw(logits: torch.Tensor, sampling: SamplingParams, rng: torch.Generator) -> int:
    """The next id from logits (v,)."""
    if sampling.temperature < COLD:
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


def adjusted(
    logits: torch.Tensor, sampling: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    """Logits (v,) with penalties and biases: repetition first, as vLLM and transformers do, then OpenAI's, then biases.

    Args:
        prompt, answer: ids so far.
    """
    result = logits.float().clone()
    if sampling.repetition != 1 and (seen := sorted({*prompt, *answer})):
        values = result[seen]
        result[seen] = torch.where(values > 0, values / sampling.repetition, values * sampling.repetition)
    if (sampling.presence or sampling.frequency) and answer:
        ids, counts = torch.tensor(answer, device=result.device).unique(return_counts=True)
        result[ids] -= sampling.presence + sampling.frequency * counts
    for one, bias in sampling.bias.items():
        result[one] += bias
    return result


def chances(logits: torch.Tensor, taken: int, count: int) -> list[tuple[int, float]]:
    """(id, log-probability) of the id that was taken, then of the `count` likeliest, by the model's own logits (v,)."""
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(min(count, len(logprobs)))
    likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    every = [(taken, float(logprobs[taken])), *likeliest]
    return [(token, max(value, MIN_LOGPROB)) for token, value in every]


def _keep_nucleus(scaled: torch.Tensor, top_p: float) -> None:
    """Leave the fewest ids whose probabilities reach `top_p`, at least one. In place."""
    ordered, places = scaled.sort(descending=True)
    chances = ordered.softmax(-1)
    before = chances.cumsum(-1) - chances
    before[0] = -1
    scaled[places[before >= top_p]] = -torch.inf

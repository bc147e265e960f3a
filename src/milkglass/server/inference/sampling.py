"""How the next id is drawn from a row of logits. One request, one generator: a batch never changes a draw."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import torch

COLD = 1e-6  # below it a draw is the most likely id, and fp32 can only spoil it


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0, or nearly 0, takes the most likely id; `top_k` 0 and `top_p` 1 leave everything in."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop: frozenset[int] = field(default_factory=frozenset)  # ids that end it, the model's own included


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
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=rng))


def _keep_nucleus(scaled: torch.Tensor, top_p: float) -> None:
    """Leave the fewest ids whose probabilities reach `top_p`, at least one. In place."""
    ordered, places = scaled.sort(descending=True)
    chances = ordered.softmax(-1)
    before = chances.cumsum(-1) - chances
    before[0] = -1
    scaled[places[before >= top_p]] = -torch.inf

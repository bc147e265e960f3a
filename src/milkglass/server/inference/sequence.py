"""One prompt on its way through a model: what is asked of it, and what came of it so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from milkglass.errors import MilkglassError
from milkglass.server.inference.engine import explain, not_finite
from milkglass.server.inference.model_runner import Prompt
from milkglass.server.inference.sampling import SamplingParams, adjusted, chances, draw, generator


@dataclass(eq=False)
class Sequence:
    """Callbacks are called in the engine's thread.

    Attributes:
        prompt: scrambled ids, or vectors in place of them.
        sampling: how ids are drawn.
        on_token: receives an id and a reason, which ends the sequence: "stop" (the id is one of the stop ids) or
            "length"; None while it goes on.
        on_error: ends the sequence, too.
        cancelled: frees its row before the next token.
        made: how many ids were drawn.
        answer: the ids that were drawn.
        chances: of the newest id and of the likeliest at its place, where they were asked for; set before `on_token`.
        rng: of this sequence alone: the batch that it is in changes no draw.
    """

    prompt: Prompt
    sampling: SamplingParams
    on_token: Callable[[int, str | None], None]
    on_error: Callable[[MilkglassError], None]
    cancelled: bool = False
    made: int = 0
    answer: list[int] = field(default_factory=list)
    chances: list[tuple[int, float]] = field(default_factory=list)
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = generator(self.sampling)

    def fail(self, error: MilkglassError) -> None:
        self.cancelled = True
        self.on_error(error)

    def sample(self, logits: torch.Tensor) -> int | None:
        """Draw the next id from logits (n,) and report it. None: this was the last one."""
        if not torch.isfinite(logits).any() or torch.isnan(logits).any():
            self.fail(not_finite())
            return None
        try:
            token = draw(self._adjusted(logits), self.sampling, self.rng)
            if self.sampling.logprobs is not None:
                self.chances = chances(logits, token, self.sampling.logprobs)
        except Exception as error:  # noqa: BLE001  (one row's draw must not end the others)
            self.fail(explain(error))
            return None
        self.made += 1
        self.answer.append(token)
        stopped = token in self.sampling.stop
        reason = "stop" if stopped else "length" if self.made >= self.sampling.max_tokens else None
        self.on_token(token, reason)
        return None if reason else token

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.sampling.adjusts:
            return logits
        prompt = [] if isinstance(self.prompt, torch.Tensor) else self.prompt  # vectors have no ids
        return adjusted(logits, self.sampling, prompt, self.answer)

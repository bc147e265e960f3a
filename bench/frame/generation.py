"""Greedy answers of a model through the server's own thread and scheduler, without the web."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from milkglass.server.inference.generator import Generator, Sequence
from milkglass.server.inference.model_runner import TransformersRunner
from milkglass.server.inference.sampling import SamplingParams

Answers = list[list[int]]


def answered(model: Any, prompts: Answers, tokens: int) -> Answers:
    """All at once, `tokens` each. Raises what the engine failed with."""
    answers: Answers = [[] for _ in prompts]
    over, faults = threading.Semaphore(0), list[Exception]()

    def heard(place: int) -> Callable[[int, str | None], None]:
        def on_token(token: int, reason: str | None) -> None:
            answers[place].append(token)
            if reason:
                over.release()

        return on_token

    def failed(error: Exception) -> None:
        faults.append(error)
        over.release()

    engine = Generator(TransformersRunner(model), max_batch=len(prompts), max_waiting=len(prompts))
    engine.start()
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    engine.submit([Sequence(prompt, sampling, heard(place), failed) for place, prompt in enumerate(prompts)])
    for _ in prompts:
        over.acquire()
    engine.close()
    if faults:
        raise faults[0]
    if any(len(one) != tokens for one in answers):
        raise RuntimeError(f"an answer has not {tokens} tokens: times cannot be compared")
    return answers

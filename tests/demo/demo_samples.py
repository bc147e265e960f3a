"""A small DemoResult, with texts that would be dangerous if they were not escaped."""

from __future__ import annotations

from milkglass.demo.result import (
    ClassifiedText,
    DemoRecovery,
    DemoResult,
    DemoStep,
    DemoToken,
    Generated,
    ModelRun,
    View,
)

HOSTILE = '<script>alert("x")</script> & <img src=http://evil.example/x.png>'


def view(text: str, right: int = 2) -> View:
    words = text.split()
    pieces = tuple(DemoToken(word if at < right else "quartz", at < right) for at, word in enumerate(words))
    return View(text, tuple(7919 * (at + 3) % 30_000 for at in range(len(words))), pieces)


def model_run(ref: str) -> ModelRun:
    return ModelRun(
        ref=ref,
        k=10,
        epsilon=0.1,
        vocabulary=30_522,
        kept={"clusters": 2481, "below_k": 0, "singletons": 0, "verbatim": 5, "largest": 128},
        sizes={"the model": 90_900_000, "training data": 21_300},
        steps=(DemoStep("scramble", 4.2, "the key never leaves"), DemoStep("fine-tune", 75.0, "45 steps")),
        losses=(1.1, 0.4),
        recovery=DemoRecovery(0.78, 0.85, 0.2, 0.4, 2900, 0.114, 0.31, 4000, 480),
    )


def result(text: str = "My inhaler is empty and I can hardly speak") -> DemoResult:
    return DemoResult(
        version="0.0",
        seconds=251.0,
        classifier=model_run("demo:minilm"),
        asked=120,
        correct=104,
        alone=98,
        labels=("appointment", "billing", "urgent"),
        classified=(
            ClassifiedText(view(text), "urgent", "urgent"),
            ClassifiedText(view("Invoice A-17512 says more than I owe"), "appointment", "billing"),
        ),
        generator=model_run("demo:smollm2"),
        generated=(Generated(view("Which desk takes this? " + text), view("The front desk."), "The front desk.", ""),),
    )

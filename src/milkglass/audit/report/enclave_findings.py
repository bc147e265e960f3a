"""What the figures mean, in words, where an enclave sends vectors of sanitized tokens: see findings.py."""

from __future__ import annotations

from milkglass.audit.report.result import Finding
from milkglass.audit.scene import Scene

WHY = (
    "Anyone with the table, the provider first, finds the row of each vector that crosses: a token that was not "
    "replaced is read there, without any text of yours. A substitute is near to its token in the table, and an "
    "attacker with text like yours guesses which was meant."
)
CHANGE = (
    "A smaller --epsilon and a larger --p replace more, and cost answers. Ask again and compare; an enclave that is "
    "built with a --corpus of your texts has other tokens for rare."
)


def sends(scene: Scene) -> bool:
    """Whether an enclave sends what is attacked: its report says what proves it."""
    return "proof" in scene.scheme


def answers(scene: Scene) -> Finding | None:
    if not sends(scene):
        return None
    return Finding(
        "The provider reads every answer",
        "always with a split decoder",
        "The server computes the ids of an answer, and each goes back as its vector. No attack is needed, and no "
        "figure here counts them: these are of prompts alone.",
        "Ask nothing whose answer must not be read.",
    )

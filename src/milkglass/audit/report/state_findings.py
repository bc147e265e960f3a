"""Findings in words about vectors: hidden states, or the vectors that an enclave sends. See findings.py."""

from __future__ import annotations

import math
from collections.abc import Mapping

from milkglass.audit.outcome import AttackResult
from milkglass.audit.report.result import Finding
from milkglass.audit.scene import Scene
from milkglass.threat.observations import Activations

WHY = (
    "A hidden state says much of the token that it stands for and of those beside it. An attacker with text and a "
    "client half trains a model to read states, disturbed as they are, and reads yours with it."
)
MIXED = (
    "Mixing the rows of a text hides which row is whose and leaves their span. A public embedding lies in it or does "
    "not: no text, no key and no training is needed to test that."
)
CHANGE = "More noise lowers this figure, and accuracy with it: train again and compare."
NO_CHANGE = "No parameter of this method lowers it: choose another."
ENCLAVE = (
    "Anyone with the table, the provider first, finds the row of each vector that crosses: a token that was not "
    "replaced is read there, without any text of yours. A substitute is near to its token in the table, and an "
    "attacker with text like yours guesses which was meant."
)
ENCLAVE_CHANGE = (
    "A smaller --epsilon and a larger --p replace more, and cost answers. Ask again and compare; an enclave that is "
    "built with a --corpus of your texts has other tokens for rare."
)


def from_enclave(scene: Scene) -> bool:
    """Returns whether an enclave sends what is attacked."""
    return "proof" in scene.scheme


def of_vectors(scene: Scene) -> bool:
    """Returns whether vectors are sent and no ids."""
    return scene.of_states or from_enclave(scene)


def why(scene: Scene) -> str:
    """Returns why what is sent reveals text."""
    if from_enclave(scene):
        return ENCLAVE
    return MIXED if _mixed(scene) else WHY


def change(scene: Scene) -> str:
    """Returns what lowers the figure."""
    if from_enclave(scene):
        return ENCLAVE_CHANGE
    return NO_CHANGE if _mixed(scene) else CHANGE


def words(who: Mapping[str, str], cells: tuple[AttackResult, ...]) -> str:
    """Returns a sentence about the words that are read without their order; "" if no attack reads words so.

    If one vector crosses for a text, nothing else is read.
    """
    best = _best(cells)
    if best is None:
        return ""
    return (
        f"Words of your texts come back, without their order: {best.measures['bag recall']} of them are named, and "
        f"{best.measures['bag precision']} of those named are there, by an attacker who {who[best.adversary]}."
    )


def named_share(cells: tuple[AttackResult, ...]) -> float:
    """Returns the share of a text's words that the best such attack names; nan if there is none."""
    best = _best(cells)
    return math.nan if best is None else best.value("bag recall")


def named(scene: Scene, cells: tuple[AttackResult, ...]) -> Finding | None:
    best = _best(cells) if scene.of_states else None
    if best is None or best.value("bag f1") < 0.1:
        return None
    return Finding(
        "Words of a text are named, without their order",
        f"an attack ({best.title}) names the words of a text with an F1 of 10 % or more: here "
        f"{best.measures['bag f1']}",
        "What is sent must tell the classes apart, and words do. Common words are in most texts: a part of this figure "
        "is what anybody would guess.",
        CHANGE,
    )


def answers(scene: Scene) -> Finding | None:
    if not from_enclave(scene):
        return None
    return Finding(
        "The provider reads every answer",
        "always with a split decoder",
        "The server computes the ids of an answer, and each goes back as its vector. No attack is needed, and no "
        "figure here counts them: these are of prompts alone.",
        "Ask nothing whose answer must not be read.",
    )


def lengths(scene: Scene) -> Finding | None:
    if not scene.of_states or all(one.pooled for one in scene.transcript.all(Activations)):
        return None
    return Finding(
        "Lengths are read by anybody",
        "a state crosses for each token",
        "How many tokens a text has is not hidden, and no guarantee of these methods speaks of it.",
        "Send texts of one length, or a method that sends one vector a text (cape).",
    )


def _mixed(scene: Scene) -> bool:
    return any(one.mixed is not None for one in scene.transcript.all(Activations))


def _best(cells: tuple[AttackResult, ...]) -> AttackResult | None:
    """Returns the best attack that reads words without their order."""
    done = [cell for cell in cells if not math.isnan(cell.value("bag f1"))]
    return max(done, key=lambda cell: cell.value("bag f1"), default=None)

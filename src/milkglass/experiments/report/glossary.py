"""What the names of figures mean, for readers of a result.

A figure's name is its measure, then what it is of: "tokens top-1, knn, model only, sst2, obfuslm". Out of scope:
recipes' own names of data and defences, and measures that are not listed here.
"""

from __future__ import annotations

from collections.abc import Iterable

SPREAD, COST = " +-", " loss"
MEASURES = {
    "accuracy": "of the texts held out of training, the percentage put into the right class",
    "tokens top-1": "of the tokens of the private texts, the percentage that an attack's first guess names",
    "tokens top-3": "the same of its first three guesses",
    "content top-1": "as tokens top-1, without function words and marks, which anyone guesses",
    "vocabulary top-1": "of the vocabulary's entries, the percentage that an attack's first guess names",
    "rouge-l": "how much of a text is in another in the same order, in percent: of a private text in an attack's "
    "reading, or of a reference in an answer",
    "bag f1": "of the words of a private text, without their order, how many an attack names, and how many of those "
    "named are there (F1, in percent)",
    "tokens with a place": "of the tokens of the private texts, the percentage that was sent in any form: no attack "
    "here reads more",
    "texts": "how many other texts the attacker had",
    "private tokens": "how many tokens the private texts have",
    "seconds": "how long it took",
}
SHARES = {  # of recipes of shared training, whose figures are shares of 1, as GHOST's tables have them
    "accuracy": "of the texts held out of training, the share put into the right class",
    "f1": "of the texts held out: of class 1, or the mean over the classes where there are more than two",
    "loss": "of the texts held out, in nats a token",
    "perplexity": "e to the loss",
    "shadow rouge-1": "how much of a text's words are in its shadow, from 0 to 1; rouge-2 of pairs of words, rouge-l "
    "in the same order, meteor by stems",
    "tokens top-1": "of the tokens of the private texts, the share that an attack names at their places",
    "token recall": "the same at any place of the text",
    "tokens named": "of the different tokens of a batch, the share that any reading of it has",
    "exact texts": "the share of texts that were recovered whole",
    "rouge-1": "how much of a private text's words are in an attack's reading, from 0 to 1; rouge-2 of pairs of "
    "words, rouge-l in the same order, meteor by stems",
    "untrained": "the model before training, with a new head",
    "one class for all": "the best that naming one class for every text has: what is worth nothing",
    "seconds": "of a processor, over all cores, that the attack took on all texts; one that took all of its budget was "
    "cut short",
    "drift": "how far training moves the parameters: the norm of what changes",
    "loss deviation": "the loss of a text less that of its shadow, the mean over pairs",
    "gradient deviation": "the norm of a text's gradient less its shadow's, the mean over pairs",
    "epsilon": "for each pair the largest of both drifts and both deviations; local: of the deviations alone",
}
ATTACKERS = {
    "model only": "the attacker has the public model and no text",
    "same kind of text": "the attacker also has other texts of the same kind",
    "strongest": "the attack that reads most, for each measure separately",
}
LEFT_OUT = "an attack that is missing for a defence does not apply to what that defence sends, or its time was over"


def meanings(names: Iterable[str], shares: bool = False) -> tuple[tuple[str, str], ...]:
    """Each part of these figures' names that is listed here, and what it means, in the figures' order.

    Args:
        shares: whether the figures are shares of 1.
    """
    parts = dict.fromkeys(part for name in names for part in name.split(", "))
    if shares:
        one_sided = "; all of it on one side of a figure of 0 or 1"
        widths = {part: width + one_sided for part in parts if (width := _width(part))}
        result = {part: SHARES.get(part) or widths.get(part) or _attack(part) for part in parts}
        return tuple((part, info) for part, info in result.items() if info)
    result = {part: info for part in parts if (info := _meaning(part))}
    if parts.keys() & ATTACKERS.keys():
        result |= {part: title for part in parts if (title := _attack(part))} | {"no figure": LEFT_OUT}
    return tuple(result.items())


def _meaning(part: str) -> str:
    if part in MEASURES or part in ATTACKERS:
        return MEASURES.get(part) or ATTACKERS[part]
    if width := _width(part):
        return f"{width}, in points"
    if part.endswith(COST):
        whole = part.removesuffix(COST)
        return f"{whole} without a defence, less {whole} with it: what it costs, in points"
    return ""


def _width(part: str) -> str:
    whole = part.removesuffix(SPREAD)
    return "" if whole == part else f"half the width of the 95 % interval of {whole}"


def _attack(part: str) -> str:
    from milkglass.attacks.catalogue import EVERY

    return f"attack: {EVERY[part].title}" if part in EVERY else ""

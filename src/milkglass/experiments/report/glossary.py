"""The meanings of figures' names, for readers of a result.

A figure's name is its measure, then its subject: "tokens top-1, knn, model only, sst2, obfuslm".
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

SPREAD, COST, BESIDE = " +-", " loss", " with own model"
WORDS = tomllib.loads(Path(__file__).with_name("glossary.toml").read_text("utf-8"))
MEASURES, SHARES, ATTACKERS = WORDS["measures"], WORDS["shares"], WORDS["attackers"]
LEFT_OUT = "an attack that is missing for a defence does not apply to what that defence sends, or its time was over"


def meanings(names: Iterable[str], shares: bool = False) -> tuple[tuple[str, str], ...]:
    """Returns the parts of these figures' names that have a known meaning, with the meaning, in the figures' order.

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
    if part.endswith(BESIDE):
        return f"{part.removesuffix(BESIDE)} of the server's answers pooled with those of the client's own four models"
    if part.endswith(COST):
        whole = part.removesuffix(COST)
        return f"{whole} without a defence, less {whole} with it: what it costs, in points"
    return ""


def _width(part: str) -> str:
    whole = part.removesuffix(SPREAD)
    return "" if whole == part else f"half the width of the 95 % interval of {whole}"


def _attack(part: str) -> str:
    from milkglass.attacks.catalogue import ALL_ATTACKS

    return f"attack: {ALL_ATTACKS[part].title}" if part in ALL_ATTACKS else ""

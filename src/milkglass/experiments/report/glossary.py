"""The meanings of the parts of figures' names, for readers of a result."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from milkglass.attacks.catalogue import ALL_ATTACKS
from milkglass.experiments.record import BESIDE, SPREAD, ResultRecord

COST = " loss"
WORDS = tomllib.loads(Path(__file__).with_name("glossary.toml").read_text("utf-8"))
MEASURES, SHARES, ATTACKERS = WORDS["measures"], WORDS["shares"], WORDS["attackers"]
LEFT_OUT = "an attack that is missing for a defence does not apply to what that defence sends, or its time was over"


def meanings(
    records: Sequence[ResultRecord], attacks: Mapping[str, str], shares: bool = False
) -> tuple[tuple[str, str], ...]:
    """Returns the parts of these figures' names that have a known meaning, with the meaning, in the figures' order.

    Args:
        attacks: the catalogue's name of each of the recipe's attacks.
        shares: whether the figures are shares of 1.
    """
    known_meanings = SHARES if shares else MEASURES | ATTACKERS
    parts = [(record.measure, record.attack, record.attacker, record.variant) for record in records]
    names = dict.fromkeys(filter(None, itertools.chain.from_iterable(parts)))
    derived = (lambda name: "") if shares else _derived_meaning
    meanings_by_name = {
        name: known_meanings.get(name) or _attack_meaning(attacks.get(name, name)) or derived(name) for name in names
    }
    if any(record.half_width is not None for record in records):
        sided = "; all of it on one side of a figure of 0 or 1" if shares else ", in the figure's own unit"
        meanings_by_name[SPREAD.strip()] = f"half the width of the figure's 95 % interval{sided}"
    if not shares and any(record.attacker for record in records):
        meanings_by_name["no figure"] = LEFT_OUT
    return tuple((name, meaning) for name, meaning in meanings_by_name.items() if meaning)


def _derived_meaning(measure: str) -> str:
    """Returns the meaning of a measure that is made of another."""
    if measure.endswith(BESIDE):
        return f"{measure.removesuffix(BESIDE)} of the server's answers pooled with those of the client's own model"
    if measure.endswith(COST):
        base_measure = measure.removesuffix(COST)
        return f"{base_measure} without a defence, less {base_measure} with it: what it costs, in points"
    return ""


def _attack_meaning(part: str) -> str:
    return f"attack: {ALL_ATTACKS[part].title}" if part in ALL_ATTACKS else ""
